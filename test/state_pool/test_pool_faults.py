"""What is wrong with a disk, a file or a row, and what the pool then says and keeps doing."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from state_pool.arena import Noise
from state_pool.cache import checkpoints
from state_pool.disk.database import ProcessLock
from state_pool.disk.migrations import SCHEMA_VERSION
from state_pool.disk.operations import Append, Checkpoint, SessionRow
from state_pool.disk.recover import salvage
from state_pool.disk.state_store import Connection
from state_pool.disk.statements import append_turn
from state_pool.disk.store import Store
from state_pool.errors import DatabaseUnusable, PoolFull, SessionNotFound, SessionUnusable, TurnNotStored
from state_pool.sessions import SessionKey
from test.pool_fakes import Driver, FakeArena, FakeHost, Outcome, config_in, session_of, state_of

WORDS = 4096
MODES = pytest.mark.parametrize("durability", ["log", "turn"])


def write_three(folder: Path, **changes: object) -> None:
    """Sessions a, b and c with two turns each, stored and closed."""
    driver = Driver(FakeArena(words=WORDS), config_in(folder, **changes))
    for name in "abc":
        driver.turn(name, [ord(name), 1])
        driver.turn(name, [2, 3])
    driver.pool.close()


def holds(driver: Driver, name: str) -> bool:
    """Whether the session is what `write_three` made it."""
    return bool(np.array_equal(driver.state(name), state_of([ord(name), 1, 2, 3], WORDS)))


def reopen(folder: Path, **changes: object) -> Driver:
    """A new process's pool over the same file."""
    return Driver(FakeArena(words=WORDS), config_in(folder, **changes))


@contextlib.contextmanager
def raw(folder: Path):
    """The file behind the pool's back."""
    with contextlib.closing(sqlite3.connect(folder / "sessions.db", isolation_level=None)) as connection:
        yield connection


def store_of(driver: Driver) -> Store:
    """The pool's third tier."""
    assert driver.pool._store is not None
    return driver.pool._store


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (
            "UPDATE state_chunks SET data = zeroblob(length(data)) WHERE id = (SELECT min(id) FROM state_chunks)",
            "chunk",
        ),
        ("DELETE FROM state_chunks WHERE id = (SELECT min(id) + 1 FROM state_chunks)", "incomplete|damaged"),
        ("UPDATE states SET num_tokens = 99 WHERE session = 1", "description"),
    ],
)
def test_a_damaged_row_is_quarantined_and_the_rest_works(tmp_path: Path, damage: str, what: str) -> None:
    write_three(tmp_path)
    with raw(tmp_path) as connection:
        connection.execute(damage)
    driver = reopen(tmp_path)
    with pytest.raises(SessionUnusable, match=what):
        driver.state("a")
    with pytest.raises(SessionUnusable, match=r"delete it|delete the session"):
        driver.turn("a", [5])
    assert holds(driver, "b")
    assert holds(driver, "c")
    driver.settle()
    assert [entry["session_id"] for entry in driver.pool.stats()["quarantined"]] == ["a"]
    assert driver.pool.check_integrity() == []
    driver.pool.close()
    driver = reopen(tmp_path)
    assert driver.pool.stats()["quarantined_count"] == 1, "the quarantine outlives the process"
    assert driver.delete("a") == 1
    driver.turn("a", [7])
    assert np.array_equal(driver.state("a"), state_of([7], WORDS))
    driver.pool.close()


@pytest.mark.parametrize("damage", ["UPDATE turns SET tokens = zeroblob(8)", "DELETE FROM turns WHERE turn = 1"])
def test_a_damaged_log_is_quarantined(tmp_path: Path, damage: str) -> None:
    driver = reopen(tmp_path)
    driver.turn("a", [1, 2])
    driver.turn("a", [3, 4])
    driver.pool._flush = lambda store: None  # type: ignore[method-assign]
    driver.pool.close()
    with raw(tmp_path) as connection:
        connection.execute(damage)
    driver = reopen(tmp_path)
    with pytest.raises(SessionUnusable, match="turn 1"):
        driver.state("a")
    driver.pool.close()


@pytest.mark.parametrize("durability", ["log", "turn"])
def test_a_whole_history_rebuilds_a_damaged_state(tmp_path: Path, durability: str) -> None:
    write_three(tmp_path, retain_tokens=-1, durability=durability)
    with raw(tmp_path) as connection:
        connection.execute("UPDATE state_chunks SET data = zeroblob(length(data))")
    driver = reopen(tmp_path, retain_tokens=-1)
    for name in "abc":
        assert holds(driver, name)
    driver.pool.close()


@pytest.mark.parametrize("objects", [False, True])
@pytest.mark.parametrize("whole_log", [False, True])
def test_a_stored_state_of_noise_is_a_damaged_one(tmp_path: Path, *, objects: bool, whole_log: bool) -> None:
    """Its bytes are those that were stored; what they mean is known to the arena alone."""
    store = {"checkpoint_store": (tmp_path / "objects").as_uri(), "checkpoint_store_min_mb": 0.0} if objects else {}
    (tmp_path / "objects").mkdir()
    kept = {"retain_tokens": -1 if whole_log else 0, "durability": "turn", **store}
    driver = Driver(FakeArena(words=WORDS), config_in(tmp_path, **kept))
    for name, tokens in (("a", [1, 2]), ("b", [3])):
        driver.turn(name, tokens)
    driver.settle()
    driver.pool.close()
    driver = Driver(FakeArena(words=WORDS), config_in(tmp_path, **kept))
    host_state, noise = driver.arena.host_state, state_of([1, 2], WORDS).tobytes()

    def heard(parts: Mapping[str, bytes | memoryview]) -> FakeHost:
        if noise.startswith(bytes(parts["a.wkv"])):
            raise Noise("part 'a.wkv' of the state has NaN")
        return host_state(parts)

    driver.arena.host_state = heard  # type: ignore[method-assign]
    if whole_log:
        assert np.array_equal(driver.state("a"), state_of([1, 2], WORDS))
    else:
        with pytest.raises(SessionUnusable, match=r"'a\.wkv' of the state has NaN; delete the session"):
            driver.state("a")
    assert np.array_equal(driver.state("b"), state_of([3], WORDS))
    driver.settle()
    assert driver.pool.stats()["quarantined_count"] == (0 if whole_log else 1)
    driver.pool.close()


def test_another_model_is_refused_and_its_sessions_stay(tmp_path: Path) -> None:
    write_three(tmp_path)
    other = Driver(FakeArena(words=WORDS, fingerprint="model-b"), config_in(tmp_path))
    with pytest.raises(SessionUnusable, match=r"another model \(fingerprint model-a, this one is model-b\)"):
        other.state("a")
    other.turn("new", [1])
    assert other.pool.stats()["quarantined_count"] == 0
    other.pool.close()
    driver = reopen(tmp_path)
    assert holds(driver, "a")
    driver.pool.close()


def test_another_model_is_fed_the_whole_history_if_there_is_one(tmp_path: Path) -> None:
    write_three(tmp_path, retain_tokens=-1)
    other = Driver(FakeArena(words=WORDS, fingerprint="model-b"), config_in(tmp_path))
    lease = other.ready(other.pool.checkout("a"))
    assert lease.replay == [ord("a"), 1, 2, 3]
    assert lease.num_tokens == 4
    assert lease.exists
    other.pool.release(lease)
    other.pool.close()


def test_another_state_layout_is_refused(tmp_path: Path) -> None:
    write_three(tmp_path)
    layout = {"a.wkv": ("float16", (2 * (WORDS - 4),)), "a.shift": ("float32", (4,))}
    other = Driver(FakeArena(words=WORDS, layout=layout), config_in(tmp_path))
    with pytest.raises(SessionUnusable, match="layout"):
        other.state("a")
    other.pool.close()


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    write_three(tmp_path)
    with raw(tmp_path) as connection:
        connection.execute("INSERT INTO schema_migrations VALUES (?, 'from the future', 0)", (SCHEMA_VERSION + 1,))
    with pytest.raises(DatabaseUnusable, match=f"has schema {SCHEMA_VERSION + 1}, this version knows"):
        reopen(tmp_path)


def test_a_failed_migration_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_three(tmp_path)
    from state_pool.disk import migrations

    broken = ("adds a column, then fails", ("ALTER TABLE sessions ADD COLUMN extra", "NONSENSE"))
    monkeypatch.setattr(migrations, "MIGRATIONS", (*migrations.MIGRATIONS, broken))
    monkeypatch.setattr(migrations, "SCHEMA_VERSION", SCHEMA_VERSION + 1)
    with pytest.raises(DatabaseUnusable):
        reopen(tmp_path)
    monkeypatch.undo()
    driver = reopen(tmp_path)
    assert holds(driver, "a")
    driver.pool.close()
    with raw(tmp_path) as connection:
        assert "extra" not in [row[1] for row in connection.execute("PRAGMA table_info(sessions)")]


@pytest.mark.parametrize("keep", [0.5, 0.9])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: float) -> None:
    write_three(tmp_path)
    file = tmp_path / "sessions.db"
    os.truncate(file, int(file.stat().st_size * keep))
    with pytest.raises(DatabaseUnusable, match=r"truncated|malformed"):
        reopen(tmp_path)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sessions.db").write_text("this is a diary, not a database\n" * 100)
    with pytest.raises(DatabaseUnusable, match="not an SQLite file"):
        reopen(tmp_path)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatabaseUnusable, match="there is no folder"):
        reopen(tmp_path / "nowhere")


def test_a_lock_that_cannot_be_written_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "sessions.db.lock").mkdir()  # as a folder that may not be written in, for which tests may be too mighty
    with pytest.raises(DatabaseUnusable, match=r"sessions\.db\.lock cannot be written .*--state-db"):
        reopen(tmp_path)


def test_one_process_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("state_pool.disk.database.BUSY_TIMEOUT_S", 0.1)
    lock = ProcessLock(str(tmp_path / "sessions.db"))
    with pytest.raises(DatabaseUnusable, match=rf"in use by another process \(pid {os.getpid()}\)"):
        reopen(tmp_path)
    lock.release()
    reopen(tmp_path).pool.close()


def test_sqlites_own_lock_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_three(tmp_path)
    monkeypatch.setattr("state_pool.disk.database.BUSY_TIMEOUT_S", 0.1)
    with raw(tmp_path) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        with pytest.raises(DatabaseUnusable, match="locked"):
            reopen(tmp_path)


_OPEN = """
import os, sys
if os.getuid() == 0:
    os.setuid(65534)
from pathlib import Path
from test.pool_fakes import Driver, FakeArena, config_in
Driver(FakeArena(words=4096), config_in(Path(sys.argv[1])))
"""


def test_a_read_only_file_is_refused_at_start(tmp_path: Path) -> None:
    """In a process that is not root, since nothing is read-only for root."""
    write_three(tmp_path)
    for path in [*tmp_path.iterdir(), tmp_path]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    for path in list(tmp_path.parents)[:3]:  # the last of them may be the machine's /tmp: nothing is taken from it
        path.chmod(stat.S_IMODE(path.stat().st_mode) | 0o055)
    done = subprocess.run(
        [sys.executable, "-c", _OPEN, str(tmp_path)], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    tmp_path.chmod(0o755)
    assert done.returncode == 1
    if "state_pool" in done.stderr:  # else not even the interpreter's own files can be read without rights
        assert "is not writable" in done.stderr or "read" in done.stderr


MOVED = {"moved": "", "log moved": "-wal", "index moved": "-shm"}


def files_of(connection: Connection) -> dict[str, Path]:
    """A database's files, by how they break."""
    path = connection.execute("PRAGMA database_list").fetchone()[2]
    return {how: Path(f"{path}{end}") for how, end in MOVED.items()}


def break_disk(driver: Driver, how: str) -> None:
    """Make every write fail, without needing rights: too few pages, a connection that may not write, no file."""
    connection = store_of(driver).writer._connection
    if how in MOVED:
        path = files_of(connection)[how]
        path.rename(path.with_name(f"{path.name}.away"))
    elif how == "full":
        connection.execute("PRAGMA max_page_count = 1")
    else:
        connection.execute("PRAGMA query_only = ON")


def mend_disk(driver: Driver) -> None:
    """Space and rights return."""
    connection = store_of(driver).writer._connection
    connection.execute("PRAGMA max_page_count = 1000000")
    connection.execute("PRAGMA query_only = OFF")
    for path in files_of(connection).values():
        away = path.with_name(f"{path.name}.away")
        if away.exists():
            away.rename(path)


@MODES
@pytest.mark.parametrize(
    ("how", "words"),
    [("full", "no space is left"), ("read-only", "is read-only"), *((how, "moved or removed") for how in MOVED)],
)
def test_a_turn_that_cannot_be_stored_is_not_acknowledged(
    tmp_path: Path, durability: str, how: str, words: str
) -> None:
    driver = reopen(tmp_path, durability=durability)
    for name in "ab":
        driver.turn(name, [ord(name), 1])
    driver.settle()
    break_disk(driver, how)
    big = list(range(20_000))  # more than the free part of a page
    for _ in range(3):
        with pytest.raises(TurnNotStored, match=words):
            driver.turn("a", big)
    with pytest.raises(TurnNotStored, match=words):
        driver.turn("unborn", big)
    assert words in driver.pool.stats()["degraded"]
    assert np.array_equal(driver.state("a"), state_of([ord("a"), 1], WORDS)), "the session is what it was"
    if how not in MOVED:  # then it is not read either
        assert driver.list_sessions().total == 2
    mend_disk(driver)
    driver.turn("a", [2, 3])
    assert driver.pool.stats()["degraded"] is None
    assert holds(driver, "a")
    driver.turn("b", [2, 3])
    driver.turn("c", [ord("c"), 1])
    driver.turn("c", [2, 3])
    driver.settle()
    assert driver.pool.check_integrity() == []
    driver.pool.close()
    driver = reopen(tmp_path)
    assert all(holds(driver, name) for name in "abc")
    driver.pool.close()


@MODES
def test_full_tiers_over_a_full_disk_go_on_serving(tmp_path: Path, durability: str) -> None:
    """States cannot be checkpointed: with a log they are replayed, and no slot is ever stuck."""
    driver = reopen(tmp_path, durability=durability, l1_sessions=2, l2_sessions=2, transfer_states=1)
    names = [f"s{i}" for i in range(20)]
    for name in names:
        driver.turn(name, [1, 2, 3])
    break_disk(driver, "full")
    for name in names * 2:
        assert np.array_equal(driver.state(name), state_of([1, 2, 3], WORDS))
    mend_disk(driver)
    driver.pool.close()


def test_states_that_a_full_disk_does_not_take_are_tried_once_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What each writes before it fails would take the room from turns. At the end nothing is put off."""
    driver = reopen(tmp_path, checkpoint_tokens=2, transfer_states=1)
    store, now, tried = store_of(driver), [100.0], list[float]()
    monkeypatch.setattr(checkpoints, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def full(job: Checkpoint, done: Callable[[Exception | None], None]) -> None:
        tried.append(now[0])
        store.writer.stats.degraded = "no space is left"
        done(TurnNotStored("no space is left"))
        store.writer.stats.degraded = None  # a turn still fits

    submit = store.submit_state
    monkeypatch.setattr(store, "submit_state", full)
    for name in "abc":
        driver.turn(name, [1, 2, 3])
    for _ in range(3):
        for _ in range(50):
            driver.pool._checkpoint_some()
            driver.pool.poll()
        now[0] += checkpoints.RETRY_S
    assert tried == [100.0, 101.0, 102.0]
    now[0] -= checkpoints.RETRY_S  # within the pause
    written: list[float] = []

    def ticks() -> float:
        now[0] += 0.001
        return now[0]

    def submitted(job: Checkpoint, done: Callable[[Exception | None], None]) -> None:
        written.append(now[0])
        submit(job, done)

    monkeypatch.setattr(checkpoints, "time", SimpleNamespace(monotonic=ticks))
    monkeypatch.setattr(store, "submit_state", submitted)
    driver.pool.close()
    assert len(written) == 3
    assert written[-1] < 102.5
    driver = reopen(tmp_path)
    assert all(np.array_equal(driver.state(name), state_of([1, 2, 3], WORDS)) for name in "abc")
    driver.pool.close()


def test_a_full_real_disk(tmp_path: Path) -> None:
    """The same on a file system of 2 MB, where this machine lets us mount one."""
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(mount)], capture_output=True)
    if made.returncode != 0:
        pytest.skip("needs the right to mount; the page limit test covers the rest")
    try:
        driver = reopen(mount)
        driver.turn("a", [1, 2])
        filler = mount / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as stream:
            while True:
                stream.write(bytes(4096))
        with pytest.raises(TurnNotStored):
            for _ in range(100):
                driver.turn("b", list(range(2000)))
        assert driver.pool.stats()["degraded"]
        assert np.array_equal(driver.state("a"), state_of([1, 2], WORDS))
        filler.unlink()
        driver.turn("a", [3])
        driver.pool.close()
        driver = reopen(mount)
        assert np.array_equal(driver.state("a"), state_of([1, 2, 3], WORDS))
        driver.pool.close()
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_failed_delete_is_told_and_tried_again(tmp_path: Path) -> None:
    driver = reopen(tmp_path)
    driver.turn("a", [1])
    driver.settle()
    break_disk(driver, "read-only")
    outcome = Outcome()
    assert driver.pool.delete("a", on_durable=outcome) == 1
    driver.until(lambda: outcome.known)
    assert isinstance(outcome.calls[0], TurnNotStored)
    assert driver.list_sessions().total == 0
    mend_disk(driver)
    driver.until(lambda: driver.pool.stats()["degraded"] is None)
    driver.pool.close()
    driver = reopen(tmp_path)
    assert driver.list_sessions().total == 0
    driver.pool.close()


def test_the_disk_cap_evicts_the_oldest(tmp_path: Path) -> None:
    driver = reopen(tmp_path, state_db_max_gb=0.0005, l1_sessions=1, l2_sessions=1)
    for i in range(60):
        driver.turn(f"s{i}", [i])
    driver.until(lambda: not store_of(driver).over_limit and driver.list_sessions().total < 60)
    names = [entry.session_id for entry in driver.list_sessions().sessions]
    assert names == [f"s{i}" for i in range(59, 59 - len(names), -1)], "the newest are left"
    driver.pool.close()


def test_the_disk_cap_refuses_new_sessions(tmp_path: Path) -> None:
    driver = reopen(tmp_path, state_db_max_gb=0.00015, state_db_full="refuse", l1_sessions=1, l2_sessions=1)
    with pytest.raises(PoolFull, match=r"limit of 0\.00015 GB"):
        for i in range(60):
            driver.turn(f"s{i}", [i])
            driver.settle()
    driver.turn("s0", [0])
    driver.pool.close()


def test_a_full_database_takes_new_sessions_when_all_are_deleted(tmp_path: Path) -> None:
    """Nothing is committed behind the delete but that its pieces are collected."""
    driver = reopen(tmp_path, state_db_max_gb=0.00015, state_db_full="refuse", durability="turn")
    with pytest.raises(PoolFull):
        for i in range(60):
            driver.turn(f"s{i}", [i])
    driver.delete("s", prefix=True)
    driver.until(lambda: not store_of(driver).shrinking)
    driver.turn("new", [1])
    driver.pool.close()


def test_lazy_turns_lost_with_a_broken_disk_are_not_hidden(tmp_path: Path) -> None:
    driver = reopen(tmp_path, durability="lazy", l1_sessions=1, l2_sessions=1, transfer_states=1)
    driver.turn("a", [1])
    driver.settle()
    break_disk(driver, "read-only")
    driver.turn("a", [2])
    lost = session_of(driver, "a")
    driver.until(lambda: lost.log_broken)
    for i in range(20):
        driver.turn(f"s{i}", [i])
    driver.until(lambda: lost.slot is None and lost.host is None)
    with pytest.raises(SessionUnusable, match="last turns were lost"):
        driver.state("a")
    mend_disk(driver)
    driver.pool.close()


def test_what_is_whole_is_salvaged(tmp_path: Path) -> None:
    """A truncated file with many sessions: those that are whole come over, exactly; the rest is named."""
    driver = reopen(tmp_path)
    for i in range(20):
        driver.turn(f"s{i}", [i, 1])
        driver.turn(f"s{i}", [2])
    driver.turn("fork", [1], branch_from=0)
    driver.turn("fork", [2], branch_from=1)
    driver.pool.close()
    file = tmp_path / "sessions.db"
    os.truncate(file, int(file.stat().st_size * 0.6))
    (tmp_path / "new").mkdir()
    saved, lost = salvage(file, tmp_path / "new" / "sessions.db")
    assert len(saved) >= 5
    assert lost
    assert not set(saved) & set(lost)
    driver = reopen(tmp_path / "new")
    assert driver.list_sessions().total == len(saved)
    for name in saved:
        if name.startswith("s"):
            assert np.array_equal(driver.state(name), state_of([int(name[1:]), 1, 2], WORDS))
    driver.pool.close()
    with raw(tmp_path / "new") as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"


def test_salvage_keeps_what_has_only_a_log(tmp_path: Path) -> None:
    driver = reopen(tmp_path)
    driver.turn("s", [1, 2])
    driver.turn("fork", [1], branch_from=0)
    driver.turn("fork", [2], branch_from=1)
    driver.pool._flush = lambda store: None  # type: ignore[method-assign]
    driver.pool.close()
    (tmp_path / "new").mkdir()
    saved, lost = salvage(tmp_path / "sessions.db", tmp_path / "new" / "sessions.db")
    assert (sorted(saved), lost) == (["fork:1", "fork:2", "s"], [])
    driver = reopen(tmp_path / "new")
    assert np.array_equal(driver.state("fork", 2), state_of([1, 2], WORDS))
    driver.pool.close()
    with pytest.raises(DatabaseUnusable, match="exists already"):
        salvage(tmp_path / "sessions.db", tmp_path / "new" / "sessions.db")


@MODES
def test_a_delete_overtakes_a_state_that_waits_to_be_written(tmp_path: Path, durability: str) -> None:
    """Nothing brings the session back: not after the delete, not after a restart."""
    driver = reopen(tmp_path, durability=durability)
    driver.turn("s", [1])
    driver.settle()
    writer = store_of(driver).writer
    with writer._changed:  # the writer's thread can take no work meanwhile
        lease = driver.ready(driver.pool.checkout("s"))
        slot = driver.compute(lease, [2])
        outcome = Outcome()
        driver.pool.record(lease, [2], outcome)
        driver.pool.checkin(lease, slot)
        if durability == "log":
            assert driver.pool._tiers.checkpoints.begin(next(iter(driver.pool._index)))
        driver.pool.poll()
        assert writer.queued[1] == 1
        assert driver.pool.delete("s") == 1
    driver.until(lambda: outcome.known)
    assert isinstance(outcome.calls[0], SessionNotFound)
    driver.settle()
    assert driver.pool.check_integrity() == []
    driver.pool.close()
    driver = reopen(tmp_path)
    assert driver.list_sessions().total == 0
    driver.pool.close()
    with raw(tmp_path) as connection:
        for table in ("sessions", "turns", "states", "state_chunks"):
            assert connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] == 0


def test_turns_are_taken_in_order_and_once(tmp_path: Path) -> None:
    write_three(tmp_path)
    with raw(tmp_path) as connection:
        for turn in (1, 2, 4):
            row = SessionRow(1, SessionKey("a"), None, turn, 9, 0.0, 0.0)
            with pytest.raises(sqlite3.IntegrityError, match="does not follow"):
                append_turn(connection, Append(row, [1]), "model-a")
        with pytest.raises(sqlite3.IntegrityError, match="does not follow"):
            append_turn(connection, Append(SessionRow(99, SessionKey("new"), None, 2, 9, 0.0, 0.0), [1]), "model-a")


@pytest.mark.parametrize(("retain", "kept"), [(0, []), (3, [4]), (4, [3, 4]), (-1, [1, 2, 3, 4])])
def test_the_log_keeps_what_is_asked(tmp_path: Path, retain: int, kept: list[int]) -> None:
    """Turns of 3 tokens each; behind the checkpoint the last so many tokens stay, in whole turns."""
    driver = reopen(tmp_path, retain_tokens=retain)
    for turn in range(4):
        driver.turn("s", [turn, 0, 0])
    driver.pool.close()
    with raw(tmp_path) as connection:
        assert [row[0] for row in connection.execute("SELECT turn FROM turns ORDER BY turn")] == kept
