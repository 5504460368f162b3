"""Turn order, forks, deletes, expiry, status: the pool as its caller sees it."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from state_pool.cache.slots import Slots
from state_pool.config import PoolConfig
from state_pool.errors import DialogueNotFound, InvalidSessionId
from state_pool.session_key import SessionKey, Tier
from state_pool.sessions import LeaseState, Session, SessionIndex
from test.pool_fakes import Driver, FakeArena, Outcome, config_in, end, expected_state, fold, opened


@pytest.fixture(params=["log", "turn", "lazy", "memory"])
def driver(request: pytest.FixtureRequest, tmp_path: Path):
    """Pools of each durability, and one without a disk."""
    changes = {"state_db": ""} if request.param == "memory" else {"durability": request.param}
    driver = opened(tmp_path, delay=1, **changes)
    yield driver
    end(driver)


def test_new_session_starts_from_zero_and_resumes_without_a_copy(driver: Driver) -> None:
    lease = driver.turn("s", [1, 2])
    assert not lease.exists
    saves, loads = driver.arena.saves, driver.arena.loads
    lease = driver.ready(driver.pool.turns.checkout("s"))
    assert (lease.exists, lease.replay, lease.num_tokens, lease.tier) == (True, [], 2, Tier.SLOT)
    assert (driver.arena.saves, driver.arena.loads) == (saves, loads)
    driver.pool.turns.release(lease)


def test_turns_of_one_session_run_in_order(driver: Driver) -> None:
    leases = [driver.pool.turns.checkout("s") for _ in range(4)]
    assert [lease.state for lease in leases] == [LeaseState.READY, *[LeaseState.WAITING] * 3]
    for i, lease in enumerate(leases):
        driver.ready(lease)
        assert lease.num_tokens == i
        assert all(later.state is LeaseState.WAITING for later in leases[i + 1 :])
        driver.finish_turn(lease, [i])
    driver.settle()
    assert np.array_equal(driver.state("s"), expected_state([0, 1, 2, 3]))


def test_released_turn_changes_nothing(driver: Driver) -> None:
    driver.pool.turns.release(driver.ready(driver.pool.turns.checkout("never")))
    assert driver.list_sessions().total == 0
    driver.turn("s", [1])
    lease = driver.ready(driver.pool.turns.checkout("s"))
    slot = driver.compute(lease, [9, 9])
    driver.pool.tiers.free(slot)
    driver.pool.turns.release(lease)
    assert np.array_equal(driver.state("s"), expected_state([1]))


def test_forks_never_change_their_parent(driver: Driver) -> None:
    first = driver.turn("s", [1], branch_from=0)
    second = driver.turn("s", [2], branch_from=1)
    third = driver.turn("s", [3], branch_from=1)
    fourth = driver.turn("s", [4], branch_from=0)
    assert [lease.dialogue_idx for lease in (first, second, third, fourth)] == [1, 2, 3, 4]
    for number, history in {1: [1], 2: [1, 2], 3: [1, 3], 4: [4]}.items():
        assert np.array_equal(driver.state("s", number), expected_state(history))
    driver.turn("s", [5])
    assert np.array_equal(driver.state("s"), expected_state([5])), "the plain session exists next to its dialogues"
    with pytest.raises(DialogueNotFound, match="no dialogue 9"):
        driver.pool.turns.checkout("s", 9)


def test_forks_of_one_parent_run_at_once(driver: Driver) -> None:
    driver.turn("s", [1], branch_from=0)
    leases = [driver.ready(driver.pool.turns.checkout("s", 1)) for _ in range(3)]
    assert len({lease.read_slot for lease in leases}) == 1
    for i, lease in enumerate(leases):
        driver.finish_turn(lease, [10 + i])
    driver.settle()
    for i, lease in enumerate(leases):
        assert np.array_equal(driver.state("s", lease.dialogue_idx), expected_state([1, 10 + i]))


def test_delete_wins_over_a_turn_that_is_being_stored(driver: Driver) -> None:
    lease = driver.ready(driver.pool.turns.checkout("s"))
    outcome = driver.finish_turn(lease, [1])
    driver.delete("s")
    driver.settle()
    assert outcome.known
    assert driver.list_sessions().total == 0


def test_delete_by_id_display_name_and_prefix(driver: Driver) -> None:
    driver.turn("a", [1])
    driver.turn("a", [1], branch_from=0)
    driver.turn("a", [2], branch_from=1)
    driver.turn("ab", [1])
    driver.turn("a:1", [1])
    assert driver.delete("nobody") == 0
    assert driver.delete("a:1") == 1, "a session of that very name comes first"
    assert driver.delete("a:1") == 1, "then the dialogue that is shown so"
    assert np.array_equal(driver.state("a", 2), expected_state([1, 2])), "its child needs it no more"
    assert driver.delete("a") == 2
    assert [entry.session_id for entry in driver.list_sessions().sessions] == ["ab"]
    assert driver.delete("a", prefix=True) == 1


def test_ids_are_opaque(driver: Driver) -> None:
    names = ["../../etc/passwd", "'; DROP TABLE sessions; --", "s", "S", "%", "_", "🙂" * 64, "s:1", " "]
    for i, name in enumerate(names):
        driver.turn(name, [i])
    for i, name in enumerate(names):
        assert np.array_equal(driver.state(name), expected_state([i]))
    assert driver.delete("%", prefix=True) == 1
    for unfit, why in (("\ud800", "not valid Unicode"), ("s\x00t", r"U\+0000")):
        with pytest.raises(InvalidSessionId, match=why):
            driver.pool.turns.checkout(unfit)
        with pytest.raises(InvalidSessionId, match=why):
            driver.delete(unfit, prefix=True)


def test_status_lists_newest_first_in_pages(driver: Driver) -> None:
    for i in range(6):
        driver.turn(f"s{i}", [i])
    driver.turn("s0", [1])
    status = driver.list_sessions(limit=2, offset=1)
    assert [entry.session_id for entry in status.sessions] == ["s5", "s4"]
    assert status.total == 6
    assert status.sessions[0].tier is Tier.SLOT
    assert status.sessions[0].updated == pytest.approx(time.time(), abs=60)
    assert driver.pool.stats()["sessions"] == 6


def test_sessions_expire(tmp_path: Path) -> None:
    driver = opened(tmp_path, session_ttl=60.0)
    driver.turn("old", [1])
    next(iter(driver.pool._index)).updated -= 100
    driver.turn("new", [1])
    driver.until(lambda: driver.list_sessions().total == 1)
    end(driver)
    driver = opened(tmp_path)
    assert [entry.session_id for entry in driver.list_sessions().sessions] == ["new"]
    driver.pool.close()


def test_a_stored_session_costs_little_memory() -> None:
    index = SessionIndex()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for row in range(5000):
        index.add(Session(SessionKey(f"session-{row:030d}"), row, 1e9 + row, 1e9 + row, turn=1000 + row))
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert used < 800 * 5000


def test_memory_only_forgets_the_oldest() -> None:
    driver = Driver(FakeArena(num_slots=8), PoolConfig(state_db="", l1_sessions=2, l2_sessions=3))
    for i in range(30):
        driver.turn(f"s{i}", [i])
    driver.until(lambda: driver.list_sessions().total <= 2 + 3)  # and then it evicts no more
    driver.settle()
    status = driver.list_sessions()
    assert status.sessions[0].session_id == "s29"
    assert driver.pool.stats()["counters"]["lost"] == 30 - status.total
    assert np.array_equal(driver.state("s29"), expected_state([29]))


@pytest.mark.parametrize("durability", ["log", "turn", "lazy"])
def test_release_after_record(tmp_path: Path, durability: str) -> None:
    """With a log the turn stays and is replayed. Without, it is dropped and its caller gets an error."""
    driver = opened(tmp_path, durability=durability)
    driver.turn("s", [1])
    lease = driver.ready(driver.pool.turns.checkout("s"))
    outcome = Outcome()
    driver.pool.turns.record(lease, [2], outcome)
    driver.pool.turns.release(lease)
    driver.until(lambda: outcome.known)
    assert outcome.ok == (durability != "turn")
    assert np.array_equal(driver.state("s"), expected_state([1] if durability == "turn" else [1, 2]))
    end(driver)


@pytest.mark.parametrize("durability", ["log", "turn", "lazy"])
def test_more_turns_than_slots_never_deadlock(tmp_path: Path, durability: str) -> None:
    """More turns at once than slots: each gets its slots in the end."""
    driver = Driver(
        FakeArena(num_slots=6, delay=2),
        config_in(tmp_path, durability=durability, l1_sessions=2, l2_sessions=1, transfer_states=1),
    )
    for i in range(12):
        driver.turn(f"s{i}", [i])
    leases = [driver.pool.turns.checkout(f"s{i}") for i in range(12)]
    done: list[Outcome] = []
    deadline = time.monotonic() + 60
    while len(done) < 12 or not all(outcome.known for outcome in done):
        assert time.monotonic() < deadline, "stuck"
        driver.pool.poll()
        for i, lease in enumerate(leases):
            if lease.state is LeaseState.READY and (slot := driver.pool.tiers.allocate()) is not None:
                driver.arena.run(lease.read_slot, slot, [*lease.replay, 100 + i])
                done.append(Outcome())
                driver.pool.turns.record(lease, [100 + i], done[-1])
                driver.pool.turns.checkin(lease, slot)
    for i in range(12):
        assert np.array_equal(driver.state(f"s{i}"), expected_state([i, 100 + i]))
    end(driver)


def test_a_release_while_waiting_keeps_the_order(driver: Driver) -> None:
    first, second, third = (driver.pool.turns.checkout("s") for _ in range(3))
    driver.pool.turns.release(second)
    driver.finish_turn(first, [1])
    driver.ready(third)
    assert np.array_equal(fold(driver.arena.memory[third.read_slot], third.replay), expected_state([1]))
    driver.pool.turns.release(third)


def test_slots_are_counted() -> None:
    slots = Slots(5)
    one, two, three = slots.allocate(), slots.allocate(), slots.allocate()
    assert {one, two, three} == {2, 3, 4}
    assert slots.allocate() is None
    assert one is not None
    slots.add_ref(one)
    slots.drop_ref(one)
    assert slots.num_free == 0
    slots.drop_ref(one)
    assert slots.num_free == 1
    with pytest.raises(ValueError, match="is free and cannot be released"):
        slots.drop_ref(one)
    with pytest.raises(ValueError, match="free"):
        slots.add_ref(one)
    with pytest.raises(ValueError, match="too small"):
        Slots(2)


def test_lowest_free_slot_is_allocated_first() -> None:
    slots = Slots(7)
    assert [slots.allocate() for _ in range(5)] == [2, 3, 4, 5, 6]
    for slot in (5, 2, 6):
        slots.drop_ref(slot)
    assert [slots.allocate() for _ in range(3)] == [2, 5, 6]
