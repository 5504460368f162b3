"""Several engines over one database: who holds a session, refused turns, and engines declared lost."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from state_pool.disk import directory, membership
from state_pool.disk.membership import Membership
from state_pool.disk.operations import Acquire, Append, Quarantined, Release
from state_pool.errors import (
    DialogueNotFound,
    DirectoryUnreachable,
    SessionBusy,
    SessionNotFound,
    SessionUnusable,
    StaleEpoch,
)
from state_pool.session_file import SessionFile, decode
from state_pool.session_key import Tier
from state_pool.sessions import Lease, LeaseState
from state_pool.turns import acquisition, deletes
from state_pool.turns.import_export import MAX_CONCURRENT
from test.pool_fakes import (
    Driver,
    FakeArena,
    Outcome,
    config_in,
    end,
    expected_state,
    fold,
    get_session,
    get_store,
    idle_writer,
)

Engines = Callable[..., Driver]


STORES = [
    "sqlite-log",
    "sqlite-turn",
    pytest.param("postgres-log", marks=pytest.mark.cluster),
    pytest.param("postgres-turn-objects", marks=pytest.mark.cluster),
]
"""Database, durability, and whether states are objects."""


@pytest.fixture(params=STORES)
def engines(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    """Open pools over one database. At the end, check their bookkeeping and close them."""
    monkeypatch.setattr(
        membership, "HEARTBEAT_TIMEOUT_S", 8.0
    )  # threads of a busy machine may be silent for longer than usual
    drivers: list[Driver] = []
    store, durability, *objects = request.param.split("-")
    base = {"state_db": request.getfixturevalue("postgres").database()} if store == "postgres" else {}
    if objects:
        (tmp_path / "objects").mkdir()
        base |= {"checkpoint_store": (tmp_path / "objects").as_uri(), "checkpoint_store_min_mb": 0.0}

    def make(name: str, **changes: object) -> Driver:
        config = config_in(tmp_path, **base, durability=durability, engine=name, service="here", **changes)
        drivers.append(Driver(FakeArena(delay=1), config))
        return drivers[-1]

    yield make
    end(*drivers)


def begin(driver: Driver, session_id: str, tokens: list[int]) -> tuple[Lease, int]:
    """Start a turn: return its lease and the slot with the state after it."""
    lease = driver.ready(driver.pool.turns.checkout(session_id))
    return lease, driver.compute(lease, tokens)


def finish(driver: Driver, lease: Lease, slot: int, tokens: list[int]) -> Exception | None:
    outcome = driver.finish_turn(lease, tokens, slot)
    driver.until(lambda: outcome.known)
    return outcome.calls[0]


def declare_lost(driver: Driver) -> None:
    """Remove the engine as others would after a missed heartbeat."""
    writer = get_store(driver).writer
    assert writer.member is not None
    with idle_writer(driver):
        membership.begin_with_retry(writer._connection)
        writer._connection.execute("DELETE FROM engines WHERE id = ?", (writer.member.number,))
        writer._connection.execute("COMMIT")


def test_next_turn_may_run_on_any_engine(engines: Engines) -> None:
    one, two = engines("one"), engines("two")
    history: list[int] = []
    for turn, driver in enumerate([one, two, two, one, two, one, one]):
        driver.turn("s", [turn, turn + 7])
        history += [turn, turn + 7]
        for each in (one, two):
            assert np.array_equal(each.state("s"), expected_state(history))


def test_state_is_reloaded_only_after_another_engines_turn(engines: Engines) -> None:
    one, two = engines("one"), engines("two")
    one.turn("s", [1])
    two.state("s")  # acquired there without a turn
    loads = one.pool.stats()["counters"]["loads"]
    assert np.array_equal(one.state("s"), expected_state([1]))
    assert one.pool.stats()["counters"]["loads"] == loads
    two.turn("s", [2])
    assert np.array_equal(one.state("s"), expected_state([1, 2]))
    assert one.pool.stats()["counters"]["loads"] == loads + 1


def test_checkout_waits_for_another_engines_turn(engines: Engines) -> None:
    one, two = engines("one"), engines("two")
    lease, slot = begin(one, "s", [1])
    with pytest.raises(SessionBusy, match="another engine"):
        two.ready(two.pool.turns.checkout("s", wait=False))
    waiting = two.pool.turns.checkout("s")
    deadline = time.monotonic() + 0.2
    two.until(lambda: time.monotonic() > deadline)
    assert waiting.state is LeaseState.WAITING
    assert finish(one, lease, slot, [1]) is None
    two.ready(waiting)
    assert waiting.num_tokens == 1
    assert np.array_equal(fold(two.arena.memory[waiting.read_slot], waiting.replay), expected_state([1]))
    two.pool.turns.release(waiting)


def test_wait_for_another_engine_times_out(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = engines("one"), engines("two")
    lease, slot = begin(one, "s", [1])
    with monkeypatch.context() as patched, pytest.raises(SessionBusy, match=r"another engine, and has been for 0\.1 s"):
        patched.setattr(acquisition, "OTHER_ENGINES_TIMEOUT_S", 0.1)
        two.ready(two.pool.turns.checkout("s"))
    assert finish(one, lease, slot, [1]) is None
    assert np.array_equal(two.state("s"), expected_state([1]))


def test_a_turn_that_was_not_stored_lets_other_engines_start(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = engines("one"), engines("two")
    lease = one.ready(one.pool.turns.checkout("s"))
    with monkeypatch.context() as patched:
        failure = OSError("disk full")
        patched.setattr(get_store(one), "submit", lambda job, answered: answered(failure))
        patched.setattr(get_store(one), "submit_state", lambda job, answered: answered(failure))
        outcome = Outcome()
        one.pool.turns.record(lease, [1], outcome)
    one.pool.turns.release(lease)
    one.until(lambda: outcome.known)
    assert not outcome.ok
    two.turn("s", [2])


def test_released_turn_lets_other_engines_start(engines: Engines) -> None:
    one, two = engines("one"), engines("two")
    lease, slot = begin(one, "s", [1])
    one.pool.turns.release(lease)
    one.pool.tiers.free(slot)
    one.settle()
    two.turn("s", [2])
    assert np.array_equal(one.state("s"), expected_state([2]))


@pytest.mark.parametrize("runs_turn", [False, True])
def test_failed_release_is_retried(engines: Engines, monkeypatch: pytest.MonkeyPatch, *, runs_turn: bool) -> None:
    """If another turn runs by then, the retry waits for its end."""
    one, two = engines("one"), engines("two")
    failing, release = [True, True], directory.release

    def fails_twice(connection: sqlite3.Connection, job: Release) -> None:
        if failing:
            failing.pop()
            raise sqlite3.OperationalError("disk I/O error")
        release(connection, job)

    monkeypatch.setattr(directory, "release", fails_twice)
    lease, slot = begin(one, "s", [1])
    one.pool.turns.release(lease)
    one.pool.tiers.free(slot)
    if runs_turn:
        lease, slot = begin(one, "s", [1])
        waiting = two.pool.turns.checkout("s")
        deadline = time.monotonic() + 0.8
        one.until(lambda: time.monotonic() > deadline)
        two.until(lambda: time.monotonic() > deadline)
        assert waiting.state is LeaseState.WAITING
        two.pool.turns.release(waiting)
        assert finish(one, lease, slot, [1]) is None
        failing.clear()
    one.settle()
    two.turn("s", [2])
    assert np.array_equal(one.state("s"), expected_state([1, 2] if runs_turn else [2]))


class Acquiring:
    """Fails the answers to a driver's next acquisitions. An acquisition that fails runs only if `is_run`."""

    def __init__(self, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failures: list[Exception] = []
        self.is_run = False
        self.jobs: list[Acquire] = []
        self._submit = get_store(driver).submit
        monkeypatch.setattr(get_store(driver), "submit", self.submit)
        monkeypatch.setattr(acquisition, "_RETRY_DELAY_S", 0.01)

    def submit(self, job: Any, answered: Callable[[Exception | None], None]) -> None:
        if not isinstance(job, Acquire):
            self._submit(job, answered)
            return
        self.jobs.append(job)
        failure = self.failures.pop() if self.failures else None
        if failure is None or self.is_run:
            self._submit(job, lambda error: answered(failure or error))
        else:
            answered(failure)


def test_a_turn_retries_a_database_that_fails(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    one = engines("one")
    acquiring = Acquiring(one, monkeypatch)
    acquiring.failures = [OSError("locked")] * 3
    one.turn("s", [1])
    assert len(acquiring.jobs) == 4


def test_a_turn_fails_where_the_database_does_not_answer(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    one = engines("one")
    acquiring = Acquiring(one, monkeypatch)
    monkeypatch.setattr(acquisition, "DATABASE_TIMEOUT_S", 0.05)
    acquiring.failures = [OSError("locked")] * 1000
    refused, waiting = one.pool.turns.checkout("s"), one.pool.turns.checkout("s")
    expected = r"^the session database has not answered within 0.05 s \(locked\); try again in a moment$"
    for lease in (refused, waiting):
        with pytest.raises(DirectoryUnreachable, match=expected):
            one.ready(lease)
        assert lease.state is LeaseState.FAILED
    assert len(acquiring.jobs) >= 2
    acquiring.failures = [DirectoryUnreachable("no such host")]
    with pytest.raises(DirectoryUnreachable, match=r"^no such host$"):
        one.ready(one.pool.turns.checkout("s"))
    one.turn("s", [1])


def test_a_session_acquired_without_an_answer_is_released(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine does not know that it holds the session. So no other engine may have to wait for a turn of it."""
    one, two = engines("one"), engines("two")
    acquiring = Acquiring(one, monkeypatch)
    monkeypatch.setattr(acquisition, "DATABASE_TIMEOUT_S", 0.0)
    acquiring.failures, acquiring.is_run = [OSError("the connection broke")], True
    with pytest.raises(DirectoryUnreachable):
        one.ready(one.pool.turns.checkout("s"))
    assert acquiring.jobs[0].fence is not None
    monkeypatch.setattr(acquisition, "DATABASE_TIMEOUT_S", 10.0)
    lease = two.pool.turns.checkout("s")

    def is_ready() -> bool:
        one.pool.poll()
        return lease.state is not LeaseState.WAITING

    two.until(is_ready)
    assert lease.state is LeaseState.READY
    two.pool.turns.release(lease)


def test_a_session_that_runs_a_turn_here_again_is_not_released() -> None:
    """It was deleted and created again meanwhile: the new session runs under the same fence."""
    released: list[Any] = []
    index: dict[str, Any] = {}
    store = SimpleNamespace(submit=lambda job, answered: released.append(job.fence))
    acquiring: Any = acquisition.Acquisition(store, index, *[None] * 4)  # type: ignore[arg-type]
    for known, expected in (("itself", ["f"]), ("busy", []), ("idle", ["f"]), ("", ["f"])):
        session: Any = SimpleNamespace(key="k", acquired=True, fence="f", busy=True)
        others = {"itself": session, "busy": SimpleNamespace(busy=True), "idle": SimpleNamespace(busy=False)}
        index.clear()
        index.update({"k": others[known]} if known else {})
        released.clear()
        acquiring.release(session)
        acquiring.release(session)
        assert (released, session.acquired) == (expected, False), known


def test_fenced_engine_acknowledges_nothing(engines: Engines) -> None:
    one, two = engines("one"), engines("two")
    one.turn("s", [1])
    lease, slot = begin(one, "s", [2])
    declare_lost(one)
    two.turn("s", [3])
    assert isinstance(finish(one, lease, slot, [2]), StaleEpoch)
    assert [engine.pool.stats()["counters"]["stale_turns"] for engine in (one, two)] == [1, 0]
    assert np.array_equal(one.state("s"), expected_state([1, 3]))
    one.turn("s", [4])
    assert np.array_equal(two.state("s"), expected_state([1, 3, 4]))


def test_new_session_of_fenced_engine_exists_once(engines: Engines) -> None:
    one, two = engines("one"), engines("two")
    lease, slot = begin(one, "s", [2])
    declare_lost(one)
    two.turn("s", [3])
    assert isinstance(finish(one, lease, slot, [2]), StaleEpoch)
    assert one.list_sessions().total == two.list_sessions().total == 1


def test_lost_engine_keeps_sessions_that_no_other_engine_acquired(engines: Engines) -> None:
    one, _ = engines("one"), engines("two")
    lease, slot = begin(one, "s", [2])
    declare_lost(one)
    assert finish(one, lease, slot, [2]) is None
    one.settle()
    one.turn("s", [3])
    assert np.array_equal(one.state("s"), expected_state([2, 3]))


def test_outdated_state_does_not_replace_a_later_turn(engines: Engines) -> None:
    one, two = engines("one", checkpoint_idle_s=0), engines("two", checkpoint_idle_s=0)
    for turn in range(40):
        (one if turn % 3 else two).turn("s", [turn])
    for driver in (one, two):
        driver.settle()
    assert np.array_equal(two.state("s"), expected_state(list(range(40))))
    two.pool.close()
    one.pool.close()
    alone = engines("three")
    assert np.array_equal(alone.state("s"), expected_state(list(range(40))))


def test_delete_removes_other_engines_sessions(engines: Engines) -> None:
    one, two = engines("one"), engines("two")
    for name in ("a", "ab", "b"):
        one.turn(name, [1])
    two.turn("ab", [2])
    two.turn("a", [3], branch_from=0)
    deleted: list[int | Exception] = []
    two.pool.turns.delete("a", True, deleted.append)
    two.until(lambda: bool(deleted))
    assert deleted == [3]
    lease = one.ready(one.pool.turns.checkout("a"))
    assert not lease.exists
    one.pool.turns.release(lease)
    assert [entry.session_id for entry in one.list_sessions().sessions] == ["b"]
    assert np.array_equal(one.state("ab"), expected_state([]))


def test_a_turn_that_is_written_again_is_stored_once(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit may have succeeded without an answer. The writer repeats it."""
    one, two = engines("one"), engines("two")
    one.turn("s", [1])
    submit, written = get_store(one).submit, Outcome()

    def twice(job: Any, done: Callable[[Exception | None], None]) -> None:
        if isinstance(job, Append):
            submit(job, written)
        submit(job, done)

    monkeypatch.setattr(get_store(one), "submit", twice)
    one.turn("s", [2])
    assert written.ok is one.pool.has_token_log, "without a log, the state has the turn"
    assert np.array_equal(two.state("s"), expected_state([1, 2]))


def test_a_prefix_with_a_number_deletes_dialogues(engines: Engines) -> None:
    one, two = engines("one"), engines("two")
    for tokens in ([1], [2], [3]):
        one.turn("s", tokens, branch_from=0)
    one.turn("s2", [4])
    deleted: list[int | Exception] = []
    two.pool.turns.delete("s:2", True, deleted.append)
    two.until(lambda: bool(deleted))
    assert deleted == [1]
    with pytest.raises(DialogueNotFound):
        one.state("s", 2)
    assert np.array_equal(one.state("s", 3), expected_state([3]))
    assert np.array_equal(one.state("s2"), expected_state([4]))


def test_a_session_that_another_engine_found_damaged_is_refused(engines: Engines) -> None:
    one, two = engines("one"), engines("two")
    one.turn("s", [1])
    found = Outcome()
    get_store(two).submit(Quarantined(get_session(one, "s").row_id, "its log is damaged"), found)
    two.until(lambda: found.known)
    with pytest.raises(SessionUnusable, match="its log is damaged"):
        one.state("s")
    one.delete("s")
    one.turn("s", [2])
    assert np.array_equal(two.state("s"), expected_state([2]))


def test_delete_wins_over_another_engines_turn(engines: Engines) -> None:
    one, two = engines("one"), engines("two")
    one.turn("s", [1])
    lease, slot = begin(one, "s", [2])
    branch = one.ready(one.pool.turns.checkout("d", branch_from=0))
    branch_slot = one.compute(branch, [5])
    two.delete("s")
    two.delete("d")
    two.turn("s", [9])
    assert isinstance(finish(one, lease, slot, [2]), StaleEpoch)
    assert isinstance(finish(one, branch, branch_slot, [5]), StaleEpoch | SessionNotFound)
    assert np.array_equal(one.state("s"), expected_state([9]))
    assert one.list_sessions().total == 1


def test_a_cancelled_turn_does_not_bring_a_deleted_session_back(engines: Engines) -> None:
    """The turn acquired the session, but the state in memory is the deleted one: it must not be stored."""
    one, two = engines("one", checkpoint_idle_s=600.0), engines("two")
    one.turn("s", [1, 2])
    two.delete("s")
    cancelled = one.pool.turns.checkout("s")
    one.pool.turns.release(cancelled)
    one.settle()
    one.pool.close()  # stores the sessions in memory
    assert two.list_sessions().total == 0
    assert np.array_equal(two.state("s"), expected_state([]))


def test_branches_on_any_engine_get_unique_numbers(engines: Engines) -> None:
    one, two = engines("one"), engines("two")
    first = one.turn("s", [1], branch_from=0).dialogue_idx
    second = two.turn("s", [2], branch_from=first).dialogue_idx
    third = one.turn("s", [3], branch_from=second).dialogue_idx
    fourth = two.turn("s", [4], branch_from=0).dialogue_idx
    assert len({first, second, third, fourth}) == 4
    for driver in (one, two):
        assert np.array_equal(driver.state("s", third), expected_state([1, 2, 3]))
        assert np.array_equal(driver.state("s", fourth), expected_state([4]))
    with pytest.raises(SessionNotFound, match="no dialogue 99"):
        one.ready(one.pool.turns.checkout("s", branch_from=99))


def test_no_branch_from_a_dialogue_deleted_by_another_engine(engines: Engines) -> None:
    one, two = engines("one"), engines("two")
    number = one.turn("s", [1], branch_from=0).dialogue_idx
    lease = one.ready(one.pool.turns.checkout("s", branch_from=number))
    slot = one.compute(lease, [2])
    assert two.delete(f"s:{number}") == 0  # that engine never knew the session
    assert isinstance(finish(one, lease, slot, [2]), SessionNotFound)
    with pytest.raises(SessionNotFound):
        one.ready(one.pool.turns.checkout("s", branch_from=number))


def test_list_shows_all_engines_sessions(engines: Engines) -> None:
    one, two = engines("one"), engines("two")
    one.turn("a", [1])
    two.turn("b", [1])
    page = one.list_sessions()
    assert (page.total, page.in_slots, page.on_disk) == (2, 1, 1)
    assert {entry.session_id: entry.tier for entry in page.sessions} == {"a": Tier.SLOT, "b": Tier.DISK}
    names = ["one", "two"]
    one.until(lambda: sorted(name.rpartition("/")[2] for name in one.pool.stats()["database"]["engines"]) == names)


def test_export_and_import_on_any_engine(engines: Engines) -> None:
    one, two = engines("one"), engines("two")
    one.turn("s", [1, 2])
    two.turn("s", [3])
    file = decode(one.export("s").encode())
    taken, brought = Outcome(), Outcome()
    one.pool.import_export.import_session("s", one.pool.import_export.fit(file), taken)
    one.until(lambda: taken.known)
    assert isinstance(taken.calls[0], SessionBusy)
    one.pool.import_export.import_session("copy", one.pool.import_export.fit(file), brought)
    one.until(lambda: brought.known)
    assert brought.ok
    two.turn("copy", [4])
    assert np.array_equal(one.state("copy"), expected_state([1, 2, 3, 4]))
    assert np.array_equal(one.state("s"), expected_state([1, 2, 3]))


def test_a_refused_export_is_over(engines: Engines) -> None:
    one, two = engines("one"), engines("two")
    two.turn("s", [1])
    for _ in range(2 * MAX_CONCURRENT):
        found: list[SessionFile | Exception] = []
        one.pool.import_export.export("nobody", found.append)
        one.until(lambda: bool(found))  # noqa: B023
        assert isinstance(found[0], SessionNotFound) and found[0].given == "nobody"
    assert not one.pool.import_export.pending
    assert one.export("s").num_tokens == 1


def test_a_state_read_before_another_engines_turn_is_not_used(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = engines("one"), engines("two")
    two.turn("s", [1])
    two.settle()
    store, held = get_store(one), []
    load = store.reader.load
    monkeypatch.setattr(store.reader, "load", lambda row, then: load(row, lambda result: held.append((then, result))))
    lease = one.pool.turns.checkout("s")
    one.until(lambda: bool(held))
    one.pool.turns.release(lease)
    two.turn("s", [2])
    monkeypatch.setattr(store.reader, "load", load)
    again = one.pool.turns.checkout("s")
    one.until(lambda: again.session.turn == 2)
    (then, result) = held.pop()
    then(result)
    one.ready(again)
    assert np.array_equal(fold(one.arena.memory[again.read_slot], again.replay), expected_state([1, 2]))
    one.pool.turns.release(again)


def test_idle_sessions_leave_memory_and_turns_stay(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    one = engines("one", l1_sessions=1, l2_sessions=1)
    for number in range(8):
        one.turn(f"s{number}", [number])
        one.settle()
    lease, slot = begin(one, "s0", [9])
    monkeypatch.setattr(deletes, "_MAX_IDLE_SESSIONS", 0)
    one.until(lambda: len(one.pool._index) <= 3)
    assert lease.session in list(one.pool._index)
    assert finish(one, lease, slot, [9]) is None
    for number in range(8):
        assert np.array_equal(one.state(f"s{number}"), expected_state([number, *([9] if number == 0 else [])]))


def test_expired_sessions_are_deleted_unless_in_use(engines: Engines) -> None:
    one, two = engines("one", session_ttl=0.2), engines("two", session_ttl=0.2)
    two.turn("old", [1])
    lease, slot = begin(two, "used", [1])
    assert finish(two, lease, slot, [1]) is None
    lease, slot = begin(two, "used", [2])

    def gone() -> bool:
        two.pool.poll()
        return [entry.session_id for entry in one.list_sessions().sessions] == ["used"]

    one.until(gone)
    assert finish(two, lease, slot, [2]) is None


def test_sessions_of_a_silent_engine_continue_elsewhere(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = engines("one"), engines("two")
    lease, slot = begin(one, "s", [1])
    assert one.pool._store is not None
    member = one.pool._store.writer.member
    monkeypatch.setattr(membership, "HEARTBEAT_TIMEOUT_S", 2.0)
    monkeypatch.setattr(Membership, "heartbeat_due", property(lambda self: self is not member))
    two.turn("s", [2])
    assert isinstance(finish(one, lease, slot, [1]), StaleEpoch)


def test_engines_that_left_are_forgotten(engines: Engines) -> None:
    two = engines("two")
    writer = get_store(two).writer
    with idle_writer(two):
        for number in range(3):
            Membership(writer._connection, "restarted")
            writer._connection.execute("BEGIN IMMEDIATE")
            assert writer.member is not None and writer.member.heartbeat() == []
            assert len(writer.member._seen) == 1, number
            writer._connection.execute("COMMIT")


def test_stopped_observer_declares_no_engine_lost(engines: Engines) -> None:
    one, two = engines("one"), engines("two")
    writer = get_store(two).writer
    with idle_writer(one), idle_writer(two):  # neither sends a heartbeat by itself
        observer = Membership(writer._connection, "three")
        writer._connection.execute("BEGIN IMMEDIATE")
        assert observer.heartbeat() == []
        writer._connection.execute("COMMIT")
        observer._last_heartbeat -= 10
        for seen in observer._seen.values():
            seen.at -= 10
        writer._connection.execute("BEGIN IMMEDIATE")
        assert observer.heartbeat() == []
        writer._connection.execute("COMMIT")
        observer.leave()
