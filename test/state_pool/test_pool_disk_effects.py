"""Effects of errors in the writer, the reader and the statements: garbage, wrong quarantines, outdated states."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from rwkv_batch.core.error_mapping import as_service_error
from rwkv_batch.errors import ErrorKind
from state_pool.disk import statements
from state_pool.disk.checkpoint_store import FolderStore
from state_pool.disk.copies import copy_database
from state_pool.disk.database import open_writer
from state_pool.disk.operations import Append, Checkpoint, Delete, ListQuery, SessionRow
from state_pool.disk.writer import Writer
from state_pool.errors import SessionNotFound, SessionReadFailed
from state_pool.layout import ZERO_SLOT
from state_pool.session_key import SessionKey
from test.pool_fakes import Driver, Outcome, end, expected_state, get_session, get_store, opened
from test.state_pool.stored_sessions import raw, write_three
from test.state_pool.test_pool_between import reopened, rows_of
from test.state_pool.test_pool_effects import chunks

# -- the writer --------------------------------------------------------------------------------------------------------


def half_written(driver: Driver, then: Callable[[Writer, int], None], at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Store the state of "s" in many chunks. Call `then` on the writer thread at one of them."""
    writer, put = get_store(driver).writer, statements.put_chunk
    row = get_session(driver, "s").row_id

    def put_and_do(connection: sqlite3.Connection, state: int, number: int, data: memoryview) -> None:
        put(connection, state, number, data)
        if number == at:
            then(writer, row)

    monkeypatch.setattr("state_pool.layout.CHUNK_BYTES", 64)
    monkeypatch.setattr(statements, "put_chunk", put_and_do)
    assert driver.pool.tiers.checkpoints.begin(get_session(driver, "s"))
    driver.settle()
    driver.until(lambda: not get_store(driver).writer.is_collecting_garbage)


def interrupt(writer: Writer) -> None:
    """End a partly written state's transaction, as a waiting job would."""
    row = SessionRow(900 + len(writer._small_jobs), SessionKey("other"), None, 1, 1, 0.0, 0.0)
    writer._small_jobs.append((Append(row, [1]), Outcome()))


@pytest.mark.parametrize("at", [0, 1, None], ids=["first piece", "second piece", "between two"])
def test_chunks_of_state_deleted_during_write_are_collected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int | None
) -> None:
    driver = opened(tmp_path)
    driver.turn("s", [1])
    driver.settle()
    log, deleted, result = get_store(driver).writer._log, [], Outcome()
    checkpoint_if_needed = log.checkpoint_if_needed

    def delete(writer: Writer, row: int) -> None:
        with writer._changed:
            interrupt(writer)
            if at is not None:
                writer.submit(Delete((row,)), result)

    def delete_between(idle: bool) -> str | None:
        """The writer has committed a chunk and looks for the next job."""
        writer = get_store(driver).writer
        if at is None and not deleted and writer._staged.current is not None:
            deleted.append(writer._staged.current.chunks_written)
            writer.submit(Delete((writer._staged.current.job.session.row_id,)), result)
        return checkpoint_if_needed(idle)

    monkeypatch.setattr(log, "checkpoint_if_needed", delete_between)
    half_written(driver, delete, at or 0, monkeypatch)
    driver.until(lambda: result.known and not get_store(driver).writer.is_collecting_garbage)
    assert deleted == ([1] if at is None else [])
    assert chunks(tmp_path) == (0, 0)
    driver.pool.close()


def test_delete_before_the_last_chunk_fails_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is reported once, as a failure. Yet the state's row existed for a moment."""
    driver = opened(tmp_path)
    driver.turn("s", [1])
    driver.settle()
    writer, row = get_store(driver).writer, get_session(driver, "s").row_id
    written, result = writer._state_written, Outcome()

    def deleted_before(staging: object, old: object) -> None:
        writer.submit(Delete((row,)), Outcome())
        written(staging, old)  # type: ignore[arg-type]

    monkeypatch.setattr(writer, "_state_written", deleted_before)
    slot = get_session(driver, "s").slot
    assert slot is not None
    copy = driver.arena.save(slot)
    copy.wait()
    job = SessionRow(row, SessionKey("s"), None, 1, 1, 0.0, 0.0)
    get_store(driver).submit_state(Checkpoint(job, copy.host), result)
    driver.until(lambda: result.known and rows_of(tmp_path, "states") == 0)
    assert len(result.calls) == 1
    assert isinstance(result.calls[0], SessionNotFound)
    driver.pool.close()


@pytest.mark.parametrize("durability", ["log", "turn"])
def test_delete_removes_a_queued_state(tmp_path: Path, durability: str) -> None:
    """Neither the delete nor a restart brings the session back."""
    driver = opened(tmp_path, durability=durability)
    driver.turn("s", [1])
    driver.settle()
    writer = get_store(driver).writer
    with writer._changed:  # the writer thread can take no work meanwhile
        lease = driver.ready(driver.pool.turns.checkout("s"))
        outcome = driver.finish_turn(lease, [2])
        if durability == "log":
            assert driver.pool.tiers.checkpoints.begin(next(iter(driver.pool._index)))
        driver.pool.poll()
        assert writer.queued[1] == 1
        assert driver.pool.turns.delete("s") == 1
    driver.until(lambda: outcome.known)
    assert isinstance(outcome.calls[0], SessionNotFound)
    end(driver)
    driver = opened(tmp_path)
    assert driver.list_sessions().total == 0
    driver.pool.close()
    for table in ("sessions", "turns", "states", "state_chunks"):
        assert rows_of(tmp_path, table) == 0


# -- the reader --------------------------------------------------------------------------------------------------------


def test_single_disk_error_quarantines_no_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = reopened(tmp_path)
    reader = get_store(driver).reader

    def fails(row: int, unusable_states: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as patched:
        patched.setattr(reader._loader, "read", fails)
        with pytest.raises(SessionReadFailed, match=r"disk I/O error\); try again") as raised:
            driver.state("a")
    error = as_service_error(raised.value)
    assert (error.info.kind, error.info.retry_after_s) == (ErrorKind.ENGINE_LOST, 2.0), (
        "503 with Retry-After, no conflict"
    )
    assert np.array_equal(driver.state("a"), expected_state([ord("a")]))
    assert driver.pool.stats()["quarantined_count"] == 0
    driver.pool.close()


def test_session_without_a_state_is_replayed(tmp_path: Path) -> None:
    driver = opened(tmp_path)
    driver.turn("s", [1, 2])
    driver.turn("s", [3])
    driver.close_unsaved()
    driver = opened(tmp_path)
    lease = driver.ready(driver.pool.turns.checkout("s"))
    assert (lease.read_slot, lease.replay) == (ZERO_SLOT, [1, 2, 3])
    driver.pool.turns.release(lease)
    driver.pool.close()


# -- the statements ----------------------------------------------------------------------------------------------------


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """A connection to a database without sessions."""
    opened(tmp_path).pool.close()
    connection = sqlite3.connect(tmp_path / "sessions.db", isolation_level=None)
    yield connection
    connection.close()


def put(connection: sqlite3.Connection, row: int, turn: int = 1, parent: int | None = None) -> None:
    """Write a session or dialogue as of a turn."""
    key = SessionKey("s", -1 if parent is None else row)
    session = SessionRow(row, key, parent, turn, 10 * turn, 0.0, float(turn))
    statements.put_session(connection, session, "model")


def put_state(connection: sqlite3.Connection, row: int) -> None:
    """Write a state for the session."""
    statements.put_state(connection, statements.StateRow(100 + row, row, 1, 10, "model", "", 0))


def ids(connection: sqlite3.Connection) -> list[int]:
    """Row numbers of all sessions."""
    return [row for (row,) in connection.execute("SELECT id FROM sessions ORDER BY id")]


def test_a_parent_stays_while_a_dialogue_needs_it(connection: sqlite3.Connection) -> None:
    """It is hidden until the dialogue has its own state."""
    put(connection, 1)
    put_state(connection, 1)
    put(connection, 2, parent=1)
    assert statements.delete_sessions(connection, [1]) == []
    assert ids(connection) == [1, 2]
    assert statements.count_sessions(connection, ListQuery(0, 0, {}, {})) == 1
    put_state(connection, 2)
    assert [old.state for old in statements.sweep_hidden(connection)] == [101]
    assert ids(connection) == [2]


def test_older_state_does_not_replace_a_newer_one(connection: sqlite3.Connection) -> None:
    put(connection, 1, turn=3)
    put(connection, 1, turn=2)
    assert connection.execute("SELECT turn, num_tokens, updated FROM sessions").fetchone() == (3, 30, 3.0)


def test_dialogues_deleted_together_are_removed_at_once(connection: sqlite3.Connection) -> None:
    """In any number order: an imported child may have a smaller number than its parent."""
    put(connection, 3)
    put(connection, 1, parent=3)
    put(connection, 2, parent=1)
    statements.delete_sessions(connection, [1, 2, 3])
    assert ids(connection) == []


def test_all_chunks_of_a_state_are_collected(connection: sqlite3.Connection) -> None:
    for number in range(10):
        statements.put_chunk(connection, 7, number, memoryview(b"piece"))
    rounds = 0
    while not statements.delete_chunks(connection, 7, 4):
        rounds += 1
    assert rounds == 2
    assert connection.execute("SELECT count(*) FROM state_chunks").fetchone() == (0,)


def test_turns_are_applied_in_order_and_once(tmp_path: Path) -> None:
    write_three(tmp_path)
    with raw(tmp_path) as connection:
        for turn in (1, 2, 4):
            row = SessionRow(1, SessionKey("a"), None, turn, 9, 0.0, 0.0)
            with pytest.raises(sqlite3.IntegrityError, match="does not follow"):
                statements.append_turn(connection, Append(row, [1]), "model-a")
        with pytest.raises(sqlite3.IntegrityError, match="does not follow"):
            statements.append_turn(
                connection, Append(SessionRow(99, SessionKey("new"), None, 2, 9, 0.0, 0.0), [1]), "model-a"
            )


@pytest.mark.parametrize(("retain", "kept"), [(0, []), (3, [4]), (4, [3, 4]), (-1, [1, 2, 3, 4])])
def test_log_keeps_the_retained_tokens(tmp_path: Path, retain: int, kept: list[int]) -> None:
    """Turns of 3 tokens each. After the checkpoint, the last `retain` tokens stay in whole turns."""
    driver = opened(tmp_path, retain_tokens=retain)
    for turn in range(4):
        driver.turn("s", [turn, 0, 0])
    driver.pool.close()
    with raw(tmp_path) as connection:
        assert [row[0] for row in connection.execute("SELECT turn FROM turns ORDER BY turn")] == kept


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, set[str]]]:
    """What `fsync` was called for: the file's name, and the names in its folder at that time."""
    calls: list[tuple[str, set[str]]] = []

    def fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        calls.append((path.name, {one.name for one in (path if path.is_dir() else path.parent).iterdir()}))

    monkeypatch.setattr(os, "fsync", fsync)
    return calls


def test_an_object_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, synced: list[tuple[str, set[str]]]) -> None:
    """And its name is there before the database refers to it."""
    store = FolderStore(tmp_path)
    store.prepare("states")
    store.put("states/a", b"content")
    (part, before), (folder, after) = synced
    assert part == ".a.half" and before == {part}
    assert (folder, after) == ("states", {"a"})


def test_a_copy_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, synced: list[tuple[str, set[str]]]) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "source.db")) as source:
        source.execute("CREATE TABLE a (b)")
        copy_database(source, tmp_path / "copy.db")
    ((name, names),) = synced
    assert name == "copy.db.part" and "copy.db" not in names and (tmp_path / "copy.db").exists()


@pytest.mark.parametrize(("synchronous", "number"), [("NORMAL", 1), ("FULL", 2)])
def test_commits_wait_for_the_disk_as_configured(tmp_path: Path, synchronous: str, number: int) -> None:
    with contextlib.closing(open_writer(str(tmp_path / "s.db"), synchronous)) as connection:
        assert connection.execute("PRAGMA synchronous").fetchone() == (number,)
