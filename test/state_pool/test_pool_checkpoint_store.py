"""States as objects outside the database: in a folder, and on an S3-compatible server."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from state_pool.disk import checkpoint_objects, reader, s3, wal
from state_pool.disk.checkpoint_objects import CheckpointObjects, OnFetched, open_checkpoint_store
from state_pool.disk.checkpoint_store import CheckpointStore, CheckpointStoreUnavailable, FolderStore
from state_pool.disk.operations import ObjectLocation, StoredObject
from state_pool.disk.state_store import Connection, ServerUnavailable
from state_pool.disk.statements import StateRow, put_state
from state_pool.errors import DatabaseUnusable, SessionUnusable, TurnNotStored
from state_pool.layout import checksum_pieces
from test.pool_fakes import Driver, end, expected_state, opened
from test.s3_server import KEY, SECRET
from test.state_pool.stored_sessions import raw

Engines = Callable[..., Driver]
IN_A_BUCKET = pytest.param("s3", marks=pytest.mark.cluster)


@pytest.fixture(name="address")
def _address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if getattr(request, "param", "file") == "s3":
        return str(request.getfixturevalue("object_server").bucket())
    (tmp_path / "objects").mkdir()
    return (tmp_path / "objects").as_uri()


@pytest.fixture
def engines(tmp_path: Path, address: str) -> Iterator[Engines]:
    """Open pools. At the end, check their bookkeeping and close them."""
    drivers: list[Driver] = []

    def make(**changes: object) -> Driver:
        settings = {"durability": "turn", "checkpoint_store": address, "checkpoint_store_min_mb": 0.0, **changes}
        drivers.append(opened(tmp_path, **settings))
        return drivers[-1]

    yield make
    end(*drivers)


def keys_in(store: CheckpointStore, key_prefix: str) -> list[str]:
    """Keys of states, without the marker object."""
    return sorted(one.key for batch in store.list(key_prefix) for one in batch if "of-this-database" not in one.key)


def objects_of(driver: Driver) -> CheckpointObjects:
    assert driver.pool._store is not None and driver.pool._store._objects is not None
    return driver.pool._store._objects


def stored_keys(driver: Driver) -> list[str]:
    return keys_in(objects_of(driver)._store, objects_of(driver)._key_prefix)


def has_swept(driver: Driver) -> bool:
    assert driver.pool._store is not None
    return driver.pool._store._next_sweep > 0 and objects_of(driver)._sweeping is None


def named_keys(tmp_path: Path) -> list[str]:
    with raw(tmp_path) as connection:
        assert connection.execute("SELECT count(*) FROM state_chunks").fetchone() == (0,)
        found = connection.execute("SELECT object_key FROM states WHERE object_key IS NOT NULL ORDER BY object_key")
        return [key for (key,) in found]


def restarted(driver: Driver, engines: Engines, **changes: object) -> Driver:
    end(driver)
    return engines(**changes)


@pytest.mark.parametrize("address", ["file", IN_A_BUCKET], indirect=True)
def test_states_are_stored_and_loaded(engines: Engines, tmp_path: Path) -> None:
    one = engines()
    for name in ("a", "b", "c"):
        for turn in range(3):
            one.turn(name, [turn, 7])
    one.delete("b")
    two = restarted(one, engines)
    assert len(named_keys(tmp_path)) == 2
    assert stored_keys(two) == named_keys(tmp_path)  # replaced and deleted objects are gone
    for name in ("a", "c"):
        assert np.array_equal(two.state(name), expected_state([0, 7, 1, 7, 2, 7]))
    stats = two.pool.stats()["database"]
    assert stats["checkpoint_store"]["gets"] == 2 and stats["object_bytes"] == 2 * 128
    assert two.pool.stats()["degraded"] is None


@pytest.mark.parametrize("address", ["file", IN_A_BUCKET], indirect=True)
def test_old_objects_without_a_row_are_swept(engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = engines()
    one.turn("s", [1])
    objects = objects_of(one)
    for number in range(3):
        objects._store.put(f"{objects._key_prefix}/{number:016x}-left", b"by a crash")
    two = restarted(one, engines)
    two.until(lambda: has_swept(two))
    assert len(stored_keys(two)) == 4  # young objects might belong to another engine that has not committed yet
    monkeypatch.setattr(checkpoint_objects, "ORPHAN_AGE_S", -60.0)
    monkeypatch.setattr("state_pool.disk.checkpoint_store.LIST_BATCH_SIZE", 2)
    three = restarted(two, engines)
    three.until(lambda: objects_of(three).stats.orphans == 3 and objects_of(three)._sweeping is None)
    assert stored_keys(three) == named_keys(tmp_path)
    assert np.array_equal(three.state("s"), expected_state([1]))


def test_sweep_ends_when_the_database_is_down(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each further query would block the reader for the whole reconnect timeout."""
    one = engines()
    one.turn("s", [1])
    objects = objects_of(one)
    for number in range(6):
        objects._store.put(f"{objects._key_prefix}/{number:016x}-left", b"by a crash")
    monkeypatch.setattr(checkpoint_objects, "ORPHAN_AGE_S", -60.0)
    monkeypatch.setattr("state_pool.disk.checkpoint_store.LIST_BATCH_SIZE", 2)
    requests: list[list[int]] = []

    def is_away(connection: Connection, states: list[int]) -> set[str]:
        requests.append(states)
        raise ServerUnavailable("there is nobody")

    monkeypatch.setattr(reader, "keys_used", is_away)
    two = restarted(one, engines)
    two.until(lambda: bool(requests) and objects_of(two)._sweeping is None)
    assert len(requests) == 1
    monkeypatch.undo()
    monkeypatch.setattr(checkpoint_objects, "ORPHAN_AGE_S", -60.0)
    three = restarted(two, engines)
    three.until(lambda: objects_of(three).stats.orphans == 6 and objects_of(three)._sweeping is None)
    assert stored_keys(three) == named_keys(tmp_path)


@pytest.mark.parametrize("harm", ["missing", "damaged"])
@pytest.mark.parametrize("whole_log", [False, True])
def test_unusable_object_is_logged_and_replaced_by_a_whole_log(
    engines: Engines, tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: str, *, whole_log: bool
) -> None:
    kept = {"durability": "log", "retain_tokens": -1} if whole_log else {}
    one = restarted(engines(**kept), engines, **kept)
    one.turn("s", [1, 2])
    one.turn("t", [3])
    two = restarted(one, engines, **kept)
    store, key = objects_of(two)._store, named_keys(tmp_path)[0]
    store.delete(key)
    if harm == "damaged":
        store.put(key, b"\0" * 128)
    with caplog.at_level(logging.ERROR):
        if whole_log:
            assert np.array_equal(two.state("s"), expected_state([1, 2]))
        else:
            with pytest.raises(SessionUnusable, match=rf"{harm}.*delete the session"):
                two.state("s")
            assert two.pool.stats()["quarantined_count"] == 1
    assert harm in caplog.text and key in caplog.text
    assert np.array_equal(two.state("t"), expected_state([3]))


def test_unavailable_store_quarantines_nothing(engines: Engines, tmp_path: Path) -> None:
    """Neither sessions nor logged turns. Retries succeed later."""
    one = restarted(engines(), engines)
    one.turn("s", [1])
    two = restarted(one, engines, durability="log", checkpoint_tokens=2)
    (tmp_path / "objects").rename(tmp_path / "away")
    with pytest.raises(SessionUnusable, match="try again"):
        two.state("s")
    two.turn("t", [2, 3])  # its checkpoint is due
    two.until(lambda: two.pool.stats()["degraded"] is not None)
    assert "checkpoint store file:" in two.pool.stats()["degraded"]
    (tmp_path / "away").rename(tmp_path / "objects")
    assert np.array_equal(two.state("s"), expected_state([1]))
    two.until(lambda: two.pool.stats()["degraded"] is None)
    three = restarted(two, engines)
    assert len(named_keys(tmp_path)) == 2
    assert np.array_equal(three.state("t"), expected_state([2, 3]))


def test_wrong_answers_of_the_store_quarantine_nothing(engines: Engines, tmp_path: Path) -> None:
    """A proxy may answer every request with its own page."""
    one = engines()
    one.turn("s", [1])
    two = restarted(one, engines)
    objects = [path for path in (tmp_path / "objects").rglob("*") if path.is_file()]
    assert len(objects) == 2, "the state, and what marks the place"
    contents = [path.read_bytes() for path in objects]
    for path in objects:
        path.write_bytes(b"<html>Back soon</html>")
    with pytest.raises(SessionUnusable, match=r"answers differ from the objects put.*try again"):
        two.state("s")
    assert "answers differ from the objects put" in two.pool.stats()["degraded"]
    for path, content in zip(objects, contents, strict=True):
        path.write_bytes(content)
    assert np.array_equal(two.state("s"), expected_state([1]))
    assert two.pool.stats()["degraded"] is None


def test_state_damaged_in_transfer_is_fetched_again(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    one = engines()
    one.turn("s", [1])
    two = restarted(one, engines)
    store = objects_of(two)._store
    get, requests = store.get, []

    def damage_once(key: str) -> bytes:
        requests.append(key)
        return bytes(byte ^ (len(requests) == 1) for byte in get(key))

    monkeypatch.setattr(store, "get", damage_once)
    assert np.array_equal(two.state("s"), expected_state([1]))
    assert len(requests) > 1 and two.pool.stats()["database"]["checkpoint_store"]["missing"] == 0


def test_turn_with_failed_upload_is_not_acknowledged(engines: Engines, tmp_path: Path) -> None:
    one = engines()
    one.turn("s", [1])
    (tmp_path / "objects").rename(tmp_path / "away")
    with pytest.raises(TurnNotStored, match="the checkpoint store file:"):
        one.turn("s", [2])
    (tmp_path / "away").rename(tmp_path / "objects")
    assert np.array_equal(one.state("s"), expected_state([1]))
    one.turn("s", [3])
    assert np.array_equal(restarted(one, engines).state("s"), expected_state([1, 3]))


def test_delete_during_upload_wins(engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, go, put = engines(), threading.Event(), FolderStore.put

    def held(self: FolderStore, key: str, data: bytes) -> None:
        go.wait()
        put(self, key, data)

    monkeypatch.setattr(FolderStore, "put", held)
    lease = one.ready(one.pool.turns.checkout("s"))
    outcome = one.finish_turn(lease, [1])
    store = one.pool._store
    assert store is not None
    one.until(lambda: bool(store.writer._staged.uploading))
    one.pool.turns.delete("s")
    go.set()
    one.until(lambda: outcome.known)
    two = restarted(one, engines)
    assert two.list_sessions().total == 0
    assert named_keys(tmp_path) == stored_keys(two) == []


def test_delete_during_commit_keeps_the_object_until_it_is_stored(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash in between would leave a session without its state. Yet its delete was not acknowledged."""
    one, commits, resumed = engines(), threading.Event(), threading.Event()
    writer = one.pool._store.writer  # type: ignore[union-attr]
    commit, deleted = writer._commit, []

    def held() -> None:
        if writer._staged.current is not None:
            commits.set()
            resumed.wait()
        commit()

    monkeypatch.setattr(writer, "_commit", held)
    monkeypatch.setattr(objects_of(one), "delete", deleted.append)
    lease = one.ready(one.pool.turns.checkout("s"))
    one.finish_turn(lease, [1])
    one.until(commits.is_set)
    one.pool.turns.delete("s")
    assert deleted == []
    resumed.set()
    one.settle()
    one.until(lambda: len(deleted) == 1)
    assert named_keys(tmp_path) == []


def test_replaced_object_is_deleted_after_a_wal_checkpoint(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite does not sync each commit: after a power loss the old row may return and name the old object."""
    one = engines()
    writer = one.pool._store.writer  # type: ignore[union-attr]
    begun: list[Callable[[], object]] = []
    with monkeypatch.context() as patched:
        patched.setattr(writer._log._thread, "submit", begun.append)
        one.turn("s", [1])
        one.turn("s", [2])
        one.until(lambda: bool(writer._log._syncing))
        one.settle()
    assert len(stored_keys(one)) == 2
    begun[0]()
    one.until(lambda: len(stored_keys(one)) == 1)


def test_replaced_object_stays_while_a_reader_blocks_the_wal_checkpoint(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, moves, wal_checkpoint = engines(), [], wal.wal_checkpoint
    one.turn("s", [1])
    one.settle()

    def counted(connection: Connection) -> object:
        moves.append(connection)
        return wal_checkpoint(connection)

    with raw(tmp_path) as other:
        other.execute("BEGIN")
        other.execute("SELECT count(*) FROM sessions").fetchone()
        one.turn("s", [2])
        monkeypatch.setattr(wal, "wal_checkpoint", counted)
        one.until(lambda: len(moves) >= 3)
        assert len(stored_keys(one)) == 2
    one.until(lambda: len(stored_keys(one)) == 1)


def test_object_replaced_during_fetch_is_read_again(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engines()
    one.turn("s", [1])
    two = restarted(one, engines)
    get, fetched = CheckpointObjects.get, []

    def replace_first(self: CheckpointObjects, location: ObjectLocation, done: OnFetched) -> None:
        if not fetched:
            replace_object(tmp_path, self._store, location)
        fetched.append(location.stored.key)
        get(self, location, done)

    monkeypatch.setattr(CheckpointObjects, "get", replace_first)
    assert np.array_equal(two.state("s"), expected_state([1]))
    assert len(fetched) == 2 and two.pool.stats()["quarantined_count"] == 0


def replace_object(tmp_path: Path, store: CheckpointStore, location: ObjectLocation) -> None:
    """Replace the object as another engine would. That engine stores the same session's state."""
    data, state, key = store.get(location.stored.key), location.state + 1, f"{location.stored.key}-later"
    stored = StoredObject(key, checksum_pieces([data], state, location.session))
    store.put(key, data)
    with raw(tmp_path) as connection:
        found = connection.execute("SELECT turn, num_tokens, fingerprint, layout, bytes FROM states").fetchone()
        put_state(connection, StateRow(state, location.session, *found, stored))
        connection.commit()
    store.delete(location.stored.key)


def test_wrong_checkpoint_store_is_refused(engines: Engines, tmp_path: Path) -> None:
    one = engines()
    one.turn("s", [1])
    end(one)
    (tmp_path / "other").mkdir()
    with pytest.raises(DatabaseUnusable, match="none of the session database's states"):
        engines(checkpoint_store=(tmp_path / "other").as_uri())
    with pytest.raises(DatabaseUnusable, match="no such folder"):
        engines(checkpoint_store=(tmp_path / "mount").as_uri())
    without = engines(checkpoint_store="")
    with pytest.raises(SessionUnusable, match="start with --checkpoint-store"):
        without.state("s")
    assert np.array_equal(restarted(without, engines).state("s"), expected_state([1]))


def test_small_states_stay_in_the_database(engines: Engines, tmp_path: Path) -> None:
    one = engines()
    one.turn("there", [1])
    two = restarted(one, engines, checkpoint_store_min_mb=1.0)
    two.turn("here", [2])
    assert len(stored_keys(two)) == 1
    three = restarted(two, engines)
    assert np.array_equal(three.state("there"), expected_state([1]))
    assert np.array_equal(three.state("here"), expected_state([2]))
    three.turn("here", [3])
    assert len(stored_keys(three)) == 2


def test_objects_count_towards_the_size_limit(engines: Engines) -> None:
    one = engines(state_db_max_gb=0.001, state_db_full="refuse")
    one.turn("s", [1])
    assert one.pool._store is not None and not one.pool._store.over_limit
    one.pool._store.writer.stats.object_bytes += 1_000_000
    assert one.pool._store.over_limit


@pytest.mark.cluster
def test_error_of_unreachable_bucket_hides_the_keys(
    engines: Engines, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    del engines
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setattr(s3, "RETRIES", 0)
    caplog.set_level(logging.DEBUG)
    address = "s3://states/prefix?endpoint=http://127.0.0.1:9"
    if s3.obstore is not None:
        with pytest.raises(CheckpointStoreUnavailable) as away:
            open_checkpoint_store(address).get("a")
        with pytest.raises(DatabaseUnusable, match="s3://states/prefix") as refused:
            opened(tmp_path, checkpoint_store=address)
        assert not any(word in str(away.value) + str(refused.value) + caplog.text for word in (KEY, SECRET))
    monkeypatch.setattr(s3, "obstore", None)
    with pytest.raises(DatabaseUnusable, match="requirements-cluster"):
        open_checkpoint_store(address)
