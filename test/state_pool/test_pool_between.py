"""What happens while something is under way: a copy, a read, a write, a turn that waits for its log."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from state_pool.errors import PoolFull, SessionNotFound, TurnNotStored
from state_pool.session_file import SessionFile, decode
from state_pool.sessions import Lease, LeaseState, SessionKey
from test.pool_fakes import Driver, FakeArena, Outcome, config_in, expected_state, fold, get_session, get_store
from test.state_pool.test_pool_portable import export
from test.state_pool.test_pool_prefix import Prompts, cache, head_of


def opened(folder: Path, delay: int = 0, **changes: object) -> Driver:
    return Driver(FakeArena(delay=delay), config_in(folder, **changes))


def rows_of(folder: Path, table: str = "sessions") -> int:
    """How many rows the database has in a table."""
    with sqlite3.connect(folder / "sessions.db") as connection:
        return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def computed(driver: Driver, name: str, token: int) -> tuple[Lease, int]:
    """A turn whose state is computed and of which nothing is recorded."""
    lease = driver.ready(driver.pool.checkout(name))
    return lease, driver.compute(lease, [token])


# -- states on their way to the disk -----------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["log", "turn"])
def test_a_state_that_leaves_its_slot_when_its_session_is_deleted_is_not_stored(
    tmp_path: Path, durability: str
) -> None:
    driver = opened(tmp_path, delay=3, durability=durability)
    lease, slot = computed(driver, "s", 1)
    outcome = Outcome()
    driver.pool.record(lease, [1], outcome)
    driver.pool.checkin(lease, slot)
    if durability == "log":
        driver.until(lambda: outcome.known)
        assert driver.pool._tiers.checkpoints.begin(get_session(driver, "s"))
    assert driver.pool._tiers.busy
    driver.delete("s")
    driver.settle()
    assert outcome.known
    assert (rows_of(tmp_path), rows_of(tmp_path, "states")) == (0, 0)
    driver.pool.close()


def test_a_session_with_a_gap_in_its_log_is_stored_with_its_next_turn(tmp_path: Path) -> None:
    """However short the log is: only the state has the turn that is missing there."""
    driver = opened(tmp_path, durability="lazy", checkpoint_idle_s=1e9)
    driver.turn("s", [1])
    driver.settle()
    get_session(driver, "s").log_broken = True
    driver.turn("s", [2])
    driver.settle()
    assert get_store(driver).writer.stats.states == 1
    assert not get_session(driver, "s").log_broken
    driver.pool.close()


def test_a_state_may_go_only_when_its_last_turn_is_in_the_log(tmp_path: Path) -> None:
    driver = opened(tmp_path, durability="lazy", checkpoint_idle_s=1e9)
    checkpoints = driver.pool._tiers.checkpoints
    with get_store(driver).writer._changed:
        driver.turn("s", [1])
        assert not checkpoints.can_replay(get_session(driver, "s"))
    driver.settle()
    assert checkpoints.can_replay(get_session(driver, "s"))
    driver.pool.close()


@pytest.mark.parametrize("session_first", [True, False])
def test_the_longest_unused_state_makes_room_whoever_owns_it(tmp_path: Path, session_first: bool) -> None:
    prompts = Prompts(tmp_path, prefix_cache_slots=4, prefix_cache_l2=4)
    if session_first:
        prompts.driver.turn("s", [1])
    cache(prompts, 1)
    if not session_first:
        prompts.driver.turn("s", [1])
    held = [prompts.driver.slot() for _ in range(prompts.pool.num_free)]
    held.append(prompts.driver.slot())
    left_its_slot = get_session(prompts.driver, "s").slot is None
    assert (left_its_slot, prompts.pool._prefix.sizes) == ((True, (1, 0)) if session_first else (False, (0, 1)))
    for slot in held:
        prompts.pool.free(slot)
    prompts.close()


# -- cached prefixes ---------------------------------------------------------------------------------------------------


def test_nobody_waits_for_a_prefix_as_long_as_his_prompt(tmp_path: Path) -> None:
    """It would leave no token to compute, so it is no hit when it comes."""
    prompts = Prompts(tmp_path)
    head = head_of(1)
    prompts.pool.observe_prompt([*head, 1])
    assert prompts.pool.prefix_cache_points([*head, 2]) == [len(head)]
    assert prompts.pool.should_wait_for_prefix([*head, 3])
    assert not prompts.pool.should_wait_for_prefix(head)
    prompts.pool.abandon_cache_point(head)
    prompts.close()


def test_a_prefix_that_is_read_again_while_it_leaves_stays_in_its_slot(tmp_path: Path) -> None:
    prompts = Prompts(tmp_path)
    cache(prompts, 1)
    prompts.pool._prefix.evict()
    hit = prompts.pool.match_prefix([*head_of(1), 7])
    assert hit is not None
    prompts.driver.settle()
    assert prompts.pool._prefix.sizes == (1, 0)
    assert prompts.pool.check_integrity() == []
    prompts.pool.unpin(hit)
    prompts.close()


def test_a_prefix_for_which_there_is_no_slot_is_found_when_there_is_one(tmp_path: Path) -> None:
    prompts = Prompts(tmp_path)
    cache(prompts, 1)
    prompts.pool._prefix.evict()
    prompts.driver.settle()
    held = [prompts.driver.slot() for _ in range(prompts.pool.num_free)]
    assert prompts.pool.match_prefix([*head_of(1), 7]) is None
    assert prompts.pool.check_integrity(rows=held) == []
    for slot in held:
        prompts.pool.free(slot)
    hit = prompts.pool.match_prefix([*head_of(1), 7])
    assert hit is not None
    assert np.array_equal(prompts.driver.arena.memory[hit.slot], expected_state(head_of(1)))
    prompts.pool.unpin(hit)
    prompts.close()


# -- turns -------------------------------------------------------------------------------------------------------------


def test_no_branch_from_a_dialogue_whose_turn_is_not_kept_yet(tmp_path: Path) -> None:
    driver = opened(tmp_path)
    lease = driver.ready(driver.pool.checkout("s", 0))
    slot = driver.compute(lease, [1])
    outcome = Outcome()
    driver.pool.record(lease, [1], outcome)
    assert lease.dialogue_idx == 1
    with pytest.raises(SessionNotFound, match="no dialogue 1"):
        driver.pool.checkout("s", 1)
    driver.pool.checkin(lease, slot)
    driver.until(lambda: outcome.known)
    driver.pool.release(driver.ready(driver.pool.checkout("s", 1)))
    driver.pool.close()


def test_a_recorded_turn_is_what_it_was_when_it_was_recorded(tmp_path: Path) -> None:
    driver = opened(tmp_path)
    lease = driver.ready(driver.pool.checkout("s"))
    tokens, outcome = [1, 2], Outcome()
    with get_store(driver).writer._changed:  # written later than the engine goes on with its list
        driver.pool.record(lease, tokens, outcome)
        tokens.append(3)
    driver.pool.release(lease)
    driver.until(lambda: outcome.known)
    assert np.array_equal(driver.state("s"), expected_state([1, 2]))
    driver.pool.close()


def logged(driver: Driver, token: int) -> tuple[Lease, int, Outcome]:
    """A turn of "s" that the log has, and whose state is not checked in."""
    lease, slot = computed(driver, "s", token)
    outcome = Outcome()
    driver.pool.record(lease, [token], outcome)
    driver.until(lambda: lease.session.pending is not None and lease.session.pending.outcome is True)
    return lease, slot, outcome


def test_a_turn_is_acknowledged_when_whoever_asks_next_finds_it(tmp_path: Path) -> None:
    driver = opened(tmp_path)
    lease, slot, outcome = logged(driver, 1)
    assert not outcome.known
    driver.pool.checkin(lease, slot)
    assert outcome.ok
    assert driver.list_sessions().total == 1
    driver.pool.close()


@pytest.mark.parametrize("how", ["checked in", "given up"])
def test_a_delete_between_the_log_and_the_state_wins(tmp_path: Path, how: str) -> None:
    driver = opened(tmp_path)
    lease, slot, outcome = logged(driver, 1)
    driver.pool.delete("s")
    if how == "checked in":
        driver.pool.checkin(lease, slot)
    else:
        driver.pool.free(slot)
        driver.pool.release(lease)
    driver.settle()
    assert isinstance(outcome.calls[0], SessionNotFound)
    assert len(outcome.calls) == 1
    assert rows_of(tmp_path) == 0
    assert driver.pool.check_integrity() == []
    driver.pool.close()


def test_a_session_whose_first_turn_was_given_up_is_forgotten(tmp_path: Path) -> None:
    driver = opened(tmp_path)
    driver.pool.release(driver.ready(driver.pool.checkout("s")))
    assert driver.pool._index.get(SessionKey("s")) is None
    assert list(driver.pool._index) == []
    driver.pool.close()


# -- leases ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def given_up(tmp_path: Path) -> Iterator[Driver]:
    """Durability "lazy": the state after turn 2 of "s" was given up, and its log is not written yet."""
    driver = opened(tmp_path, durability="lazy", checkpoint_idle_s=1e9)
    driver.turn("s", [1])
    driver.settle()
    with get_store(driver).writer._changed:
        lease = driver.ready(driver.pool.checkout("s"))
        driver.pool.record(lease, [2], Outcome())
        driver.pool.release(lease)
        driver.until(lambda: get_session(driver, "s").turn == 2)
        yield driver
    driver.settle()
    driver.pool.close()


def test_a_state_is_read_back_when_its_log_is_whole(given_up: Driver) -> None:
    lease = given_up.pool.checkout("s")
    given_up.pool.poll()
    assert not get_session(given_up, "s").loading
    assert lease.state is LeaseState.WAITING
    writer = get_store(given_up).writer
    writer._changed.release()
    try:
        given_up.ready(lease)
    finally:
        writer._changed.acquire()
    assert np.array_equal(fold(given_up.arena.memory[lease.read_slot], lease.replay), expected_state([1, 2]))
    given_up.pool.release(lease)


def test_an_export_comes_when_the_log_is_whole(given_up: Driver) -> None:
    with pytest.raises(PoolFull, match="is being written; try again"):
        given_up.pool.export("s", lambda file: None)


def test_who_waits_longer_for_a_slot_gets_it_first(tmp_path: Path) -> None:
    driver = opened(tmp_path, l1_sessions=0, l2_sessions=8)
    for name in "abc":
        driver.turn(name, [ord(name)])
    driver.until(lambda: not driver.pool._index.l1)
    driver.settle()
    held = [driver.slot() for _ in range(driver.pool.num_free)]
    leases = [driver.pool.checkout(name) for name in "abc"]
    for _ in range(3):  # however often it is tried in between
        driver.pool.poll()
    waiting: Callable[[], list[Lease]] = lambda: [one for one in leases if one.poll() is LeaseState.WAITING]  # noqa: E731
    assert waiting() == leases
    for number in range(1, 4):
        driver.pool.free(held.pop())
        driver.until(lambda: len(waiting()) < 4 - number)  # noqa: B023
        assert waiting() == leases[number:]
    for lease in leases:
        driver.pool.release(lease)
    for slot in held:
        driver.pool.free(slot)
    driver.pool.close()


def reopened(folder: Path, **changes: object) -> Driver:
    """A new process over two sessions that are on disk only."""
    driver = opened(folder)
    for name in "ab":
        driver.turn(name, [ord(name)])
    driver.pool.close()
    return opened(folder, **changes)


def test_a_session_that_is_deleted_while_it_is_read_stays_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = reopened(tmp_path)
    store = get_store(driver)
    load, late = store.load, []
    monkeypatch.setattr(store, "load", lambda *asked: late.append(asked))
    lease = driver.pool.checkout("a")
    session = get_session(driver, "a")
    assert session.loading
    load(*late[0])
    driver.until(lambda: store._reader._jobs.empty())
    driver.delete("a")
    driver.until(lambda: not session.loading)
    assert lease.poll() is LeaseState.FAILED
    assert (session.slot, session.host, list(driver.pool._index.l2)) == (None, None, [])
    driver.pool.release(lease)
    driver.pool.close()


def test_a_session_that_was_read_may_leave_again(tmp_path: Path) -> None:
    driver = reopened(tmp_path)
    for name in "ab":
        assert np.array_equal(driver.state(name), expected_state([ord(name)]))
    assert driver.pool._tiers.num_loading == 0
    assert [get_session(driver, name).readers for name in "ab"] == [0, 0]
    driver.pool.close()


# -- imports -----------------------------------------------------------------------------------------------------------


def failed_import(driver: Driver, monkeypatch: pytest.MonkeyPatch, *, stores_state: bool) -> Lease:
    """The disk takes nothing but, maybe, the import's state; even what is left is not deleted. A turn that waited."""
    whole = decode(export(driver, "a"))
    file = SessionFile(whole.fingerprint, whole.num_tokens + 2, [5, 6], whole.layout, whole.parts)
    store, outcome = get_store(driver), Outcome()

    def refuse(job: object, done: Callable[[Exception | None], None]) -> None:
        driver.pool._deliver(lambda: done(TurnNotStored("the disk is full")))

    with monkeypatch.context() as patched:
        patched.setattr(store, "submit", refuse)
        if not stores_state:
            patched.setattr(store, "submit_state", refuse)
        driver.pool.import_session("t", file, outcome)
        lease = driver.pool.checkout("t")
        driver.until(lambda: outcome.known)
        driver.pool.poll()
    assert isinstance(outcome.calls[0], TurnNotStored)
    assert not driver.ready(lease).exists
    return lease


def test_nothing_is_left_of_an_import_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = reopened(tmp_path)
    driver.pool.release(failed_import(driver, monkeypatch, stores_state=True))
    assert rows_of(tmp_path) == 3
    driver.pool._turns.retry_deletes()
    driver.settle()
    assert (rows_of(tmp_path), rows_of(tmp_path, "states")) == (2, 2)
    driver.pool.close()


def test_who_waited_for_an_import_that_failed_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The import's delete, when the disk takes it at last, leaves the turn alone."""
    driver = reopened(tmp_path)
    lease = failed_import(driver, monkeypatch, stores_state=False)
    slot = driver.compute(lease, [7])
    outcome = Outcome()
    driver.pool.record(lease, [7], outcome)
    driver.pool.checkin(lease, slot)
    driver.until(lambda: outcome.known)
    assert outcome.ok
    driver.pool._turns.retry_deletes()
    driver.settle()
    assert rows_of(tmp_path) == 3
    assert np.array_equal(driver.state("t"), expected_state([7]))
    driver.pool.close()


def test_one_import_after_the_other_is_taken(tmp_path: Path) -> None:
    driver = reopened(tmp_path)
    data = export(driver, "a")
    for number in range(4):
        outcome = Outcome()
        driver.pool.import_session(f"t{number}", decode(data), outcome)
        driver.until(lambda: outcome.known)  # noqa: B023
        assert outcome.ok
    assert not driver.pool._import_export.pending
    driver.pool.close()
