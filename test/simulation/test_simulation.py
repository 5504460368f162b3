"""Worlds by seed: every answer as predicted, no leaks, every acknowledged turn found again."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from rwkv_batch.core import state_manager
from rwkv_batch.core.sequence import RunningJob, Sequence
from rwkv_batch.core.speculation import Speculation
from rwkv_batch.fleet.member import Member
from state_pool.cache.prefix_cache import PrefixCache, prefix_base
from state_pool.origins import Adapters, LoadedAdapter, Origin
from state_pool.session_key import SessionKey
from state_pool.sessions import Session
from test.conftest import IS_LONG
from test.simulation.history import History
from test.simulation.ledger import Ledger
from test.simulation.runs import FLEET_WORLDS, WorldFailed, run
from test.simulation.tasks import Primitives, Tasks
from test.simulation.world import OWN_WORLDS, SPECULATING_WORLDS, World

pytestmark = pytest.mark.slow

SEEDS = 1000 if IS_LONG else 400
"""Seeds in which a planted fault must be found."""
PART = 20
ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize("first", range(0, SEEDS if IS_LONG else PART, PART))
def test_worlds(first: int) -> None:
    for seed in range(first, first + PART):
        run(seed)


@pytest.mark.parametrize(
    "seed",
    [
        128,  # a turn after a failed import was lost to the import's delete, which the disk had refused at first
        175,  # an export right after an acknowledged first turn was 404 while the row still read its last token
        207,  # what the disk refused to delete came back with an orderly restart
        274,  # the same during work
        741,  # a step with a shared prompt failed: its rows continued without the prompt's scores
        1061,  # the same with a later step in flight
        2746,  # a normal end lost an answered turn whose job had just been cancelled
        3155,  # the same
        1466,  # a scored prompt's next part overtook a step, and its scores came before those in flight
        4985,  # imported states did not count as transfers to host memory
        94,  # after drafts were verified, a row's last token was processed while its next step was launched
        387,  # waiting turns held all slots but one, and a shared prompt held that one
        89305,  # with micro-batches, an older step ended the draft of a step in flight: a wrong state was parked
        19354,  # a fault of the simulation: a session that had lost its last turns still counted as used by them
    ],
)
def test_worlds_that_found_faults(seed: int) -> None:
    run(seed, is_fleet=False)


@pytest.mark.parametrize(
    "seed",
    [
        46,  # a delete ran on each engine: the second removed a turn that was acknowledged meanwhile
        162,
        178,
        90127,  # a request's late answer came from an earlier holder of the ledger, and another job's end reached none
        19399,  # a lost engine's turn went on in a session that was deleted and begun again, with as many tokens
    ],
)
def test_fleets_that_found_faults(seed: int) -> None:
    run(seed, is_fleet=True)


def test_a_world_is_the_same_every_time() -> None:
    code = "from test.simulation.runs import run; print([run(seed)['digest'] for seed in range(3)])"
    elsewhere = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert elsewhere.stdout == f"{[run(seed)['digest'] for seed in range(3)]}\n", elsewhere.stderr


def test_a_delete_does_not_forget_that_a_crash_may_leave_a_later_import() -> None:
    """Checks the simulation: an import that runs while the same file's first import is deleted may be stored."""
    ledger, file, key = Ledger(lazy=False, now=lambda: 0.0), History([7, 8]), SessionKey("imported")
    first, second = (Session(key, row_id, 0.0, 0.0, num_tokens=2) for row_id in (1, 2))
    ledger.files.append(file)
    ledger.keep(first, ledger.imported(ledger.carried(file.stored, []), 2), 0.0)
    gone = ledger.delete([first])
    ledger.unsure[key].extend(ledger.carried(file.stored, []))
    ledger.deleted(gone)
    ledger.recover([second], lambda _: file.stored)
    assert ledger.by_key == {key: file}


def test_a_normal_end_may_keep_what_a_dead_thread_never_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the simulation: the writer may die between a turn's commit and its report, right before the end."""
    step = World.step
    ended: list[int] = []

    def step_and_end(world: World) -> bool:
        world.settings.thread = 0.0 if world.settings.durability == "lazy" else 0.1
        has_worked = step(world)
        if world.pool.failure is not None and not world.faults.quiet:
            ended.append(world.seed)
            world.restart(drained=False)
        return has_worked

    monkeypatch.setattr(World, "step", step_and_end)
    for seed in range(PART):
        run(seed, is_fleet=False)
    assert ended


def test_a_notify_is_not_lost_to_a_wait_that_timed_out() -> None:
    """Checks the simulation: a notify wakes a thread that still waits, as in Python."""
    tasks = Tasks(random.Random(0))
    condition = Primitives(tasks).threading["Condition"]()
    woken: list[bool] = []

    def wait_twice() -> None:
        with condition:
            woken.extend([condition.wait(0.1), condition.wait()])

    task = tasks.start("waits", wait_twice)
    tasks.wait(lambda: False, timeout=1.0)
    condition.notify()
    tasks.wait(lambda: task.ended, timeout=1.0)
    assert woken == [False, True]


def test_the_worlds_notice_a_state_with_a_rejected_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the simulation: a row that continues from a draft of which the last token is wrong is found."""
    settle = Speculation.settle

    def wrong(speculation: Speculation, sequence: Sequence) -> None:
        if sequence.draft is not None and sequence.draft.num_accepted == len(sequence.draft.tokens) - 1:
            sequence.draft.num_accepted += 1
        settle(speculation, sequence)

    monkeypatch.setattr(Speculation, "settle", wrong)
    with pytest.raises(WorldFailed):
        for seed in range(1, SEEDS, SPECULATING_WORLDS):
            run(seed)


def test_the_worlds_notice_a_wrong_cached_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the simulation: a cache that returns the state of a similar prompt is found."""
    offer = PrefixCache.offer

    def wrong(cache: PrefixCache, tokens: list[int], slot: int) -> object:
        return offer(cache, [*tokens[:-1], tokens[-1] ^ 1], slot)

    monkeypatch.setattr(PrefixCache, "offer", wrong)
    with pytest.raises(WorldFailed):
        for seed in range(SEEDS):
            run(seed)


def test_the_worlds_notice_a_prefix_that_was_read_under_another_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    add = Adapters.add

    def add_without_number(adapters: Adapters, origin: Origin) -> LoadedAdapter:
        adapter = add(adapters, origin)
        adapter.number = 0
        return adapter

    monkeypatch.setattr(Adapters, "add", add_without_number)
    monkeypatch.setattr(state_manager, "prefix_base", lambda numbers, salt: prefix_base(filter(None, numbers), salt))
    with pytest.raises(WorldFailed):
        for seed in range(0, SEEDS, OWN_WORLDS):
            run(seed)


def test_the_fleets_notice_turns_that_are_stored_before_they_are_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunningJob, "is_confirmed", property(lambda _: True, lambda *_: None))
    with pytest.raises(WorldFailed, match="fits no history"):
        for seed in range(FLEET_WORLDS - 1, SEEDS, FLEET_WORLDS):
            run(seed)


@pytest.mark.parametrize("waits_for", ["is_expected", "is_new"])
def test_the_fleets_notice_requests_that_do_not_wait_for_the_ledgers_holder(
    monkeypatch: pytest.MonkeyPatch, waits_for: str
) -> None:
    monkeypatch.setattr(Member, waits_for, False)
    with pytest.raises(WorldFailed, match="was charged"):
        for seed in range(FLEET_WORLDS - 1, SEEDS, FLEET_WORLDS):
            run(seed)
