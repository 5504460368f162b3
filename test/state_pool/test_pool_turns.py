"""What a turn refuses and reports, with its exact words. Also what it holds until its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from state_pool.errors import DialogueNotFound, PoolError, PoolFull, SessionBusy, SessionNotFound, SessionUnusable
from state_pool.origins import Origin, mixed_origin
from state_pool.session_key import Tier
from state_pool.sessions import Lease, LeaseState
from test.pool_fakes import Driver, FakeArena, Outcome, config_in, end, expected_state, opened

POET = Origin("poet", "d1")


@pytest.fixture(params=["log", "turn", "lazy", "memory"])
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    changes = {"state_db": ""} if request.param == "memory" else {"durability": request.param}
    driver = opened(tmp_path, **changes)
    yield driver
    end(driver)


def refusal(kind: type[PoolError], call: Callable[[], object]) -> tuple[str, object]:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value), caught.value.given


def finish(driver: Driver, lease: Lease, tokens: list[int]) -> None:
    outcome = driver.finish_turn(lease, tokens)
    driver.until(lambda: outcome.known)
    assert outcome.ok


def test_a_session_is_busy_until_its_turn_is_known(driver: Driver) -> None:
    turns, message = driver.pool.turns, "session 's' is busy with another turn; wait for it, or send wait: true"
    running = driver.ready(turns.checkout("s", wait=False))
    assert refusal(SessionBusy, lambda: turns.checkout("s", wait=False)) == (message, None)
    waiting = turns.checkout("s")
    turns.release(running)
    driver.ready(waiting)
    assert refusal(SessionBusy, lambda: turns.checkout("s", wait=False))[0] == message
    finish(driver, waiting, [1])
    lease = driver.ready(turns.checkout("s", wait=False))
    assert (lease.exists, lease.num_tokens, lease.tier) == (True, 1, Tier.SLOT)
    turns.release(lease)
    assert driver.pool.turns.lease_queue.pending is False and not driver.pool.turns.pending


def test_a_turn_takes_no_pin_before_one_that_waits(tmp_path: Path) -> None:
    """Else steady traffic on sessions in memory keeps others waiting for ever."""
    driver = Driver(FakeArena(num_slots=8), config_in(tmp_path, l1_sessions=5))
    for name in "abcde":
        driver.turn(name, [1])
    turns, tiers = driver.pool.turns, driver.pool.tiers
    running = [driver.ready(turns.checkout(name)) for name in "abc"]
    assert not tiers.can_pin, "half of the slots are for rows"
    waiting = turns.checkout("d")
    for _ in range(2):
        driver.pool.poll()
    turns.release(running.pop())
    later = turns.checkout("e")
    assert (waiting.state, later.state) == (LeaseState.WAITING, LeaseState.WAITING)
    driver.pool.poll()
    assert (waiting.state, later.state) == (LeaseState.READY, LeaseState.WAITING)
    turns.release(running.pop())
    driver.pool.poll()
    assert later.state is LeaseState.READY
    driver.pool.poll()
    turns.release(waiting)
    again = turns.checkout("d")
    assert again.state is LeaseState.READY, "at once, if none waits"
    for lease in (*running, later, again):
        turns.release(lease)
    end(driver)


def test_a_branch_needs_a_finished_dialogue(driver: Driver) -> None:
    turns = driver.pool.turns
    for parent in (-1, 1, 7):
        expected = (f"session 's' has no dialogue {parent}; 0 is its empty root", parent)
        assert refusal(DialogueNotFound, lambda: turns.checkout("s", parent)) == expected  # noqa: B023
    first = driver.ready(turns.checkout("s", 0))
    assert (first.branch, first.dialogue_idx, first.exists) == (True, None, False)
    assert refusal(DialogueNotFound, lambda: turns.checkout("s", 1))[1] == 1
    finish(driver, first, [1, 2])
    second = driver.ready(turns.checkout("s", 1))
    assert (first.dialogue_idx, second.exists, second.num_tokens) == (1, True, 2)
    finish(driver, second, [3])
    assert second.dialogue_idx == 2
    assert np.array_equal(driver.state("s", 2), expected_state([1, 2, 3]))
    assert np.array_equal(driver.state("s", 1), expected_state([1, 2]))
    source = second.source
    assert source is not None and source.readers == 0
    driver.pool._index.mark_unusable(source, "its file is damaged")
    assert refusal(SessionUnusable, lambda: turns.checkout("s", 1)) == ("session 's:1': its file is damaged", None)
    driver.pool._index.mark_usable(source)
    assert driver.delete("s:2") == 1
    assert refusal(DialogueNotFound, lambda: turns.checkout("s", 2))[1] == 2


def test_a_turn_is_recorded_once(driver: Driver) -> None:
    lease = driver.ready(driver.pool.turns.checkout("s"))
    slot = driver.compute(lease, [1])
    first, second, third = Outcome(), Outcome(), Outcome()
    driver.pool.turns.record(lease, [1], first)
    driver.pool.turns.record(lease, [2], second)
    driver.until(lambda: second.known)
    assert str(second.calls[0]) == "the lease has ended or its turn is already recorded"
    driver.pool.turns.checkin(lease, slot)
    driver.until(lambda: first.known)
    assert first.ok and lease.state is LeaseState.DONE
    driver.pool.turns.record(lease, [3], third)
    driver.until(lambda: third.known)
    assert isinstance(third.calls[0], PoolError)
    assert np.array_equal(driver.state("s"), expected_state([1]))


def test_a_lease_that_ends_twice_frees_its_slots_once(driver: Driver) -> None:
    driver.turn("s", [1])
    lease = driver.ready(driver.pool.turns.checkout("s"))
    slot, free = driver.compute(lease, [2]), driver.pool.tiers.slots.num_free
    driver.pool.turns.release(lease)
    driver.pool.turns.release(lease)
    driver.pool.turns.checkin(lease, slot)
    assert driver.pool.tiers.slots.num_free == free + 1
    assert np.array_equal(driver.state("s"), expected_state([1]))


def test_a_delete_ends_running_and_waiting_turns(driver: Driver) -> None:
    turns = driver.pool.turns
    driver.turn("chat one", [1])
    driver.turn("other", [1])
    running, waiting = driver.ready(turns.checkout("chat one")), turns.checkout("chat one")
    branch, kept = driver.ready(turns.checkout("chat two", 0)), driver.ready(turns.checkout("other", 0))
    assert driver.delete("chat", prefix=True) == 1
    for lease, name in ((running, "chat one"), (waiting, "chat one"), (branch, "chat two")):
        assert lease.state is LeaseState.FAILED and isinstance(lease.error, SessionNotFound)
        assert str(lease.error).startswith(f"session '{name}") and str(lease.error).endswith(
            "was deleted while its turn ran or waited"
        )
    assert kept.state is LeaseState.READY
    outcome = driver.finish_turn(running, [2])
    driver.until(lambda: outcome.known)
    assert isinstance(outcome.calls[0], SessionNotFound)
    for lease in (waiting, branch, kept):
        turns.release(lease)
    assert [entry.session_id for entry in driver.list_sessions().sessions] == ["other"]
    assert driver.delete("nobody") == 0


def test_a_turn_after_delete_begins_a_new_session(driver: Driver) -> None:
    driver.turn("s", [1])
    lease = driver.ready(driver.pool.turns.checkout("s"))
    outcome = Outcome()
    driver.pool.turns.record(lease, [2], outcome)
    assert driver.delete("s") == 1
    driver.pool.turns.checkin(lease, driver.compute(lease, [2]))
    driver.until(lambda: outcome.known)
    assert isinstance(outcome.calls[0], SessionNotFound)
    driver.turn("s", [3])
    assert np.array_equal(driver.state("s"), expected_state([3]))


def test_a_full_database_takes_no_new_session_and_no_branch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = opened(tmp_path, state_db_full="refuse", state_db_max_gb=2.5)
    driver.turn("s", [1])
    monkeypatch.setattr(type(driver.pool._store), "over_limit", property(lambda store: True))
    message = (
        "the session database holds its limit of 2.5 GB and takes no new session; delete some, or raise "
        "--state-db-max-gb"
    )
    for call in (lambda: driver.pool.turns.checkout("new"), lambda: driver.pool.turns.checkout("s", 0)):
        assert refusal(PoolFull, call) == (message, None)
    driver.turn("s", [2])
    driver.pool._config = driver.pool.turns._config = config_in(tmp_path, state_db_full="evict")
    driver.pool.turns.release(driver.ready(driver.pool.turns.checkout("new")))
    driver.pool.close()


def test_a_session_keeps_the_mixture_that_it_began_with(driver: Driver) -> None:
    turns = driver.pool.turns
    mixture = mixed_origin([POET, None])
    lease = driver.ready(turns.checkout("s", mixture=mixture))
    outcome = Outcome()
    turns.record(lease, [1], outcome)
    turns.release(lease)
    driver.until(lambda: outcome.known)
    if not outcome.ok:  # without a token log nothing of it is kept
        return
    expected = "session 's' began with a mixture of poet, empty; name these states, in this order"
    for other in (None, mixed_origin([None, POET]), POET):
        assert refusal(PoolError, lambda: turns.checkout("s", mixture=other))[0] == expected  # noqa: B023
    again = driver.ready(turns.checkout("s", mixture=mixture))
    assert again.replay == [1] and again.session.origin == mixture
    turns.release(again)
    branch = driver.ready(turns.checkout("s", branch_from=0, mixture=mixture))
    assert branch.session.origin == mixture
    turns.release(branch)
    driver.turn("plain", [1])
    with pytest.raises(PoolError, match="not known to have begun with 'poet': it began with the empty state") as caught:
        turns.checkout("plain", mixture=POET)
    assert caught.value.given == "poet"
