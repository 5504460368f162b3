"""Files that the pool refuses to open, each with its reason: newer, truncated, not SQLite, in use, read-only."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from state_pool.disk import database
from state_pool.disk.database import open_writer
from state_pool.disk.migrations import SCHEMA_VERSION
from state_pool.disk.process_lock import ProcessLock
from state_pool.errors import DatabaseUnusable, TurnNotStored
from test.state_pool.stored_sessions import holds, raw, reopen, write_three


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    write_three(tmp_path)
    with raw(tmp_path) as connection:
        connection.execute("INSERT INTO schema_migrations VALUES (?, 'from the future', 0)", (SCHEMA_VERSION + 1,))
    with pytest.raises(DatabaseUnusable, match=f"has schema {SCHEMA_VERSION + 1}, this version knows"):
        reopen(tmp_path)


def test_failed_migration_is_rolled_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_file_that_is_not_sqlite_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sessions.db").write_text("this is a diary, not a database\n" * 100)
    with pytest.raises(DatabaseUnusable, match="not an SQLite file"):
        reopen(tmp_path)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatabaseUnusable, match="there is no folder"):
        reopen(tmp_path / "nowhere")


def test_error_for_unwritable_lock_names_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "sessions.db.lock").mkdir()  # like a folder without write permission, which does not stop root
    with pytest.raises(DatabaseUnusable, match=r"sessions\.db\.lock cannot be written .*--state-db"):
        reopen(tmp_path)


def test_second_process_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("state_pool.disk.process_lock.BUSY_TIMEOUT_S", 0.1)
    lock = ProcessLock(str(tmp_path / "sessions.db"))
    with pytest.raises(DatabaseUnusable, match=rf"in use by another process \(pid {os.getpid()}\)"):
        reopen(tmp_path)
    lock.release()
    reopen(tmp_path).pool.close()


def test_a_service_of_an_earlier_version_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to schema 6, a service locks only the file with its name."""
    monkeypatch.setattr("state_pool.disk.process_lock.BUSY_TIMEOUT_S", 0.1)
    with (tmp_path / "sessions.db.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        print(4321, file=lock, flush=True)
        with pytest.raises(DatabaseUnusable, match=r"in use by another process \(pid 4321\)"):
            reopen(tmp_path)
    reopen(tmp_path).pool.close()


def test_a_file_replaced_while_it_is_opened_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replaced(path: str, *arguments: object, **options: object) -> sqlite3.Connection:
        connection = open_writer(path, *arguments, **options)  # type: ignore[arg-type]
        Path(path).rename(f"{path}.moved")
        return connection

    write_three(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(database, "open_writer", replaced)
        with pytest.raises(DatabaseUnusable, match="was replaced by another file while it was opened; start again"):
            reopen(tmp_path)
    assert not (tmp_path / "sessions.db").exists(), "nothing is written under the name"


def test_a_forked_child_keeps_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("state_pool.disk.process_lock.BUSY_TIMEOUT_S", 0.1)
    lock = ProcessLock(str(tmp_path / "sessions.db"))
    end, ours = os.pipe()
    child = os.fork()
    if not child:
        os.close(ours)
        os.read(end, 1)  # until this test closes its end
        os._exit(0)
    try:
        lock.release()
        ProcessLock(str(tmp_path / "sessions.db")).release()
    finally:
        os.close(ours)
        os.close(end)
        os.waitpid(child, 0)


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
    """Runs in a process that is not root. As root it could write everything."""
    write_three(tmp_path)
    for path in [*tmp_path.iterdir(), tmp_path]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    for path in list(tmp_path.parents)[:3]:  # the last may be the machine's /tmp: its rights stay
        path.chmod(stat.S_IMODE(path.stat().st_mode) | 0o055)
    done = subprocess.run(
        [sys.executable, "-c", _OPEN, str(tmp_path)], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    tmp_path.chmod(0o755)
    assert done.returncode == 1
    if "state_pool" in done.stderr:  # otherwise it cannot even read the interpreter's files
        assert "is not writable" in done.stderr or "read" in done.stderr


_WRITE = """
import sys
from pathlib import Path
from test.pool_fakes import Driver, FakeArena
from state_pool.config import PoolConfig
driver = Driver(FakeArena(words=4096), PoolConfig(state_db=sys.argv[1]))
driver.turn("other", [1])
print("stored")
driver.pool.close()
"""


@pytest.mark.parametrize("way", ["symbolic link", "hard link", "deleted lock"])
def test_a_second_process_is_refused_by_any_name(tmp_path: Path, way: str) -> None:
    """The lock is on the file. So another name or a deleted `.lock` leads to the same lock."""
    driver = reopen(tmp_path)
    driver.turn("a", [ord("a"), 1])
    file, other = tmp_path / "sessions.db", tmp_path / "elsewhere" / "other.db"
    other.parent.mkdir()
    match way:
        case "symbolic link":
            other.symlink_to(file)
        case "hard link":
            other.hardlink_to(file)
        case _:
            other = file
            Path(f"{file}.lock").unlink()
    done = subprocess.run(
        [sys.executable, "-c", _WRITE, str(other)], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.stdout == "", done.stdout
    assert "which writes this file: stop it" in done.stderr
    driver.turn("a", [2, 3])
    driver.pool.close()
    if way == "hard link":
        with pytest.raises(DatabaseUnusable, match=r"has 2 names \(hard links\)"):
            reopen(tmp_path)
        other.unlink()
    driver = reopen(tmp_path)
    assert holds(driver, "a")
    assert [entry.session_id for entry in driver.list_sessions().sessions] == ["a"]
    driver.pool.close()


def test_a_database_is_opened_through_a_symbolic_link(tmp_path: Path) -> None:
    write_three(tmp_path)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "sessions.db").symlink_to(tmp_path / "sessions.db")
    driver = reopen(tmp_path / "linked")
    assert holds(driver, "a")
    driver.pool.close()


@pytest.mark.parametrize("durability", ["log", "turn", "lazy"])
def test_rows_of_another_process_are_not_replaced(tmp_path: Path, durability: str) -> None:
    """Another program ignores the lock. It takes the row numbers that this service will use."""
    driver = reopen(tmp_path, durability=durability, checkpoint_tokens=1)
    with raw(tmp_path) as connection:
        for row in range(1, 4):
            connection.execute(
                "INSERT INTO sessions(id, session_id, dialogue, fingerprint, turn, num_tokens, created, updated) "
                "VALUES (?, ?, -1, 'model-a', 0, 0, 1, 1)",
                (row, f"foreign{row}"),
            )
        if durability == "lazy":
            driver.turn("mine", [1])
            driver.until(lambda: "another process writes" in str(driver.pool.stats()["degraded"]))
        else:
            with pytest.raises(TurnNotStored, match="another process writes this session database"):
                driver.turn("mine", [1])
        stored = connection.execute("SELECT session_id, turn FROM sessions ORDER BY id").fetchall()
    assert stored == [("foreign1", 0), ("foreign2", 0), ("foreign3", 0)]
    driver.pool.close()


def test_the_file_of_another_owner_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log may belong to another user. An example is root, after a start as root."""
    write_three(tmp_path)
    log = tmp_path / "sessions.db-wal"
    log.touch(0o600)
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(log))
    with pytest.raises(DatabaseUnusable, match=rf"{log} is not writable \(owner .*, mode 0600, this process runs as"):
        reopen(tmp_path)
