"""Many more sessions than memory holds, and a disk slow for states. Turns run from the log."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from state_pool.disk.operations import StagedState
from state_pool.disk.writer import Writer
from state_pool.sessions import LeaseState
from test.pool_fakes import Driver, FakeArena, Outcome, config_in, end, expected_state, get_store


def small_pool(folder: Path, **changes: object) -> Driver:
    """Open a pool that holds two sessions in slots. Host memory holds two more."""
    limits: dict[str, object] = {"l1_sessions": 2, "l2_sessions": 2, "transfer_states": 2}
    return Driver(FakeArena(num_slots=10, delay=1), config_in(folder, **(limits | changes)))


@pytest.mark.parametrize("durability", ["log", "lazy"])
def test_turns_do_not_wait_for_whole_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: str) -> None:
    """The disk stores turns but no state."""
    driver = small_pool(tmp_path, durability=durability)
    names = [f"s{i}" for i in range(24)]
    with monkeypatch.context() as patched:
        patched.setattr(get_store(driver).writer, "_write_state", lambda staging: time.sleep(0.001))
        for turn in range(3):
            for i, name in enumerate(names):
                driver.turn(name, [i, turn])
        assert driver.pool.stats()["counters"]["left_to_log"] > 0
    for i, name in enumerate(names):
        assert np.array_equal(driver.state(name), expected_state([i, 0, i, 1, i, 2]))
    end(driver)
    driver = small_pool(tmp_path)
    assert all(np.array_equal(driver.state(name), expected_state([i, 0, i, 1, i, 2])) for i, name in enumerate(names))
    driver.pool.close()


def test_all_simultaneous_turns_are_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every session waits for its state at once: none starves, in slots or in host memory."""
    driver = small_pool(tmp_path)
    names = [f"s{i}" for i in range(24)]
    monkeypatch.setattr(get_store(driver).writer, "_write_state", lambda staging: time.sleep(0.001))
    for i, name in enumerate(names):
        driver.turn(name, [i])
    waiting = {i: driver.pool.turns.checkout(name) for i, name in enumerate(names)}
    outcomes: list[Outcome] = []

    def run_ready() -> bool:
        """Run the ready turns if there is a slot, like an engine."""
        for i, lease in list(waiting.items()):
            slot = driver.pool.tiers.allocate() if lease.state is LeaseState.READY else None
            if slot is not None:
                driver.arena.run(lease.read_slot, slot, [*lease.replay, 100 + i])
                outcomes.append(Outcome())
                driver.pool.turns.record(lease, [100 + i], outcomes[-1])
                driver.pool.turns.checkin(lease, slot)
                del waiting[i]
        return not waiting and all(outcome.known for outcome in outcomes)

    driver.until(run_ready)
    assert all(outcome.ok for outcome in outcomes)
    monkeypatch.undo()
    end(driver)


def test_replay_is_bounded_by_the_log_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk writes one state per many turns. Still, each session's log stays within its limit."""
    driver = small_pool(tmp_path, checkpoint_tokens=30)
    write, rounds = Writer._write_state, iter(range(10**9))

    def slowly(writer: Writer, staging: StagedState) -> None:
        if next(rounds) % 50 == 0:
            write(writer, staging)
        else:
            time.sleep(0.001)  # waiting turns go first

    monkeypatch.setattr(Writer, "_write_state", slowly)
    names = [f"s{i}" for i in range(10)]
    replays = []
    for turn in range(8):
        for i, name in enumerate(names):
            replays.append(len(driver.turn(name, [i, turn, *range(8)]).replay))
    assert 0 < max(replays) < 30
    for i, name in enumerate(names):
        assert np.array_equal(
            driver.state(name), expected_state([t for turn in range(8) for t in (i, turn, *range(8))])
        )
    driver.pool.close()


def test_branch_of_a_stored_parent_needs_no_checkpoint(tmp_path: Path) -> None:
    driver = small_pool(tmp_path, checkpoint_tokens=30)
    driver.turn("s", list(range(40)), branch_from=0)
    driver.until(lambda: get_store(driver).writer.stats.states == 1)
    driver.settle()
    child = driver.turn("s", [1], branch_from=1).session
    assert child.log_tokens == 1
    assert driver.pool.tiers.checkpoints.can_replay(child)
    driver.pool.close()
