"""Copies of databases: of a running service, before a migration, and broken ones, which are recognised."""

from __future__ import annotations

import logging
import shutil
import sqlite3
from pathlib import Path
from types import SimpleNamespace

import pytest

from state_pool.disk import copies
from state_pool.disk.copies import copy_database
from state_pool.disk.database import open_writer
from state_pool.errors import DatabaseUnusable
from test.pool_fakes import Driver, opened
from test.state_pool.stored_sessions import holds, raw, reopen, write_three
from test.state_pool.test_upgrades import check_states, unpack

MISSING_LOG = "its last turns and sessions are missing"


def write_turns(driver: Driver) -> None:
    for name in "abc":
        driver.turn(name, [ord(name), 1])
        driver.turn(name, [2, 3])


def copy_to(folder: Path, *files: Path) -> Path:
    """Copy files one by one, as `cp` does."""
    folder.mkdir()
    for file in files:
        shutil.copyfile(file, folder / file.name)
    return folder


def test_a_backup_of_a_running_database_is_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    driver = reopen(tmp_path)
    write_turns(driver)
    (tmp_path / "copy").mkdir()
    target = tmp_path / "copy" / "sessions.db"
    with raw(tmp_path) as source:
        copy_database(source, target)
    assert target.stat().st_mode & 0o777 == 0o600
    driver.turn("a", [9])
    driver.pool.close()
    restored = reopen(tmp_path / "copy")
    assert all(holds(restored, name) for name in "abc")
    assert MISSING_LOG not in caplog.text
    restored.pool.close()


def test_a_copy_without_its_log_is_recognised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    driver = reopen(tmp_path)
    write_turns(driver)
    copy = copy_to(tmp_path / "copy", tmp_path / "sessions.db")
    driver.pool.close()
    opened_copy = reopen(copy)
    assert opened_copy.list_sessions().total < 3
    assert MISSING_LOG in caplog.text
    opened_copy.pool.close()
    caplog.clear()
    for folder in (copy, tmp_path):  # closed in order since
        reopen(folder).pool.close()
    assert MISSING_LOG not in caplog.text


def test_a_failed_start_leaves_no_mark(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_three(tmp_path)
    with pytest.raises(DatabaseUnusable, match="there is no such folder"):
        reopen(tmp_path, checkpoint_store=(tmp_path / "none").as_uri())
    again = reopen(tmp_path)
    assert all(holds(again, name) for name in "abc")
    again.pool.close()
    assert MISSING_LOG not in caplog.text


def test_an_engine_that_was_killed_leaves_no_mark(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    driver = reopen(tmp_path, engine="one", service="here")
    driver.turn("a", [1])
    with raw(tmp_path) as connection:  # as if it was killed a moment ago
        connection.execute("INSERT INTO engines(id, name, beat) VALUES (99, 'two', 0)")
    driver.pool.close()
    reopen(tmp_path, engine="one", service="here").pool.close()
    assert MISSING_LOG not in caplog.text


def test_a_backup_next_to_the_log_of_a_killed_service_is_not_changed(tmp_path: Path) -> None:
    driver = reopen(tmp_path)
    write_turns(driver)
    with raw(tmp_path) as source:
        copy_database(source, tmp_path / "copy.db")
    driver.turn("a", [9])
    killed = copy_to(tmp_path / "killed", *tmp_path.glob("sessions.db*"))
    driver.pool.close()
    restored = killed / "sessions.db"
    restored.write_bytes((tmp_path / "copy.db").read_bytes())
    with pytest.raises(DatabaseUnusable, match=r"is a backup, and .*-wal is the .*Delete .*sessions\.db-shm, then"):
        reopen(killed)
    assert restored.read_bytes() == (tmp_path / "copy.db").read_bytes()
    for end in ("-wal", "-shm"):
        Path(f"{restored}{end}").unlink()
    again = reopen(killed)
    assert all(holds(again, name) for name in "abc")
    again.pool.close()


@pytest.mark.parametrize("shared", [False, True])
def test_a_killed_service_and_a_moved_database_are_no_copies(
    tmp_path: Path, shared: bool, caplog: pytest.LogCaptureFixture
) -> None:
    sharing = {"engine": "one", "service": "here"} if shared else {}
    write_three(tmp_path, **sharing)
    driver = reopen(tmp_path, **sharing)
    driver.turn("d", [1])
    killed = copy_to(tmp_path / "killed", *tmp_path.glob("sessions.db*"))  # a snapshot of all files at one time
    driver.pool.close()
    moved = copy_to(tmp_path / "moved", tmp_path / "sessions.db")
    for folder, count in ((killed, 4), (moved, 4), (tmp_path, 4)):
        again = reopen(folder, **sharing)
        assert again.list_sessions().total == count
        again.pool.close()
    assert MISSING_LOG not in caplog.text


def test_a_broken_copy_is_refused(tmp_path: Path) -> None:
    """The copy has pages of different times. This happens if the file is written meanwhile."""
    driver = reopen(tmp_path)
    write_turns(driver)
    driver.settle()
    with raw(tmp_path) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        page = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'turns'").fetchone()[0]
    copy = copy_to(tmp_path / "copy", tmp_path / "sessions.db") / "sessions.db"
    driver.pool.close()
    with copy.open("r+b") as file:
        file.seek((page - 1) * 8192)
        file.write(bytes(8192))
    with pytest.raises(DatabaseUnusable, match=r"is a broken copy, .*rwkv-batch backup"):
        reopen(tmp_path / "copy")


def test_a_copy_is_kept_before_a_migration(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    unpack(1, tmp_path)
    opened(tmp_path).pool.close()
    kept = tmp_path / "sessions.db.schema-1"
    assert "has schema 1: migrating it to" in caplog.text
    assert f"before its migration is kept as {kept}" in caplog.text
    assert kept.stat().st_mode & 0o777 == 0o600
    caplog.clear()
    opened(tmp_path).pool.close()
    assert "migrating" not in caplog.text
    (tmp_path / "back").mkdir()
    kept.rename(tmp_path / "back" / "sessions.db")
    with raw(tmp_path / "back") as connection:
        assert connection.execute("SELECT max(version) FROM schema_migrations").fetchone() == (1,)
    driver = opened(tmp_path / "back")
    check_states(driver, 1)
    driver.pool.close()


@pytest.mark.parametrize("why", ["off", "no room"])
def test_a_migration_without_a_copy(
    tmp_path: Path, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    unpack(6, tmp_path)
    if why == "no room":
        disk = SimpleNamespace(disk_usage=lambda folder: SimpleNamespace(free=1 << 20))
        monkeypatch.setattr(copies, "shutil", disk)
    driver = opened(tmp_path, migrate_backup=why != "off")
    check_states(driver, 6)
    driver.pool.close()
    assert not list(tmp_path.glob("*.schema-*"))
    assert ("no copy of" in caplog.text) == (why == "no room")


def test_the_database_of_another_program_stays_unchanged(tmp_path: Path) -> None:
    for statement in ("CREATE TABLE diary(text)", "PRAGMA application_id = 7"):
        file = tmp_path / "sessions.db"
        file.unlink(missing_ok=True)
        with raw(tmp_path) as connection:
            connection.execute(statement)
        file.chmod(0o644)
        before = file.read_bytes()
        with pytest.raises(DatabaseUnusable, match="is an SQLite file of another program"):
            reopen(tmp_path)
        assert file.read_bytes() == before
        assert file.stat().st_mode & 0o777 == 0o644


def test_a_new_database_has_an_application_id(tmp_path: Path) -> None:
    write_three(tmp_path)
    with raw(tmp_path) as connection:
        assert connection.execute("PRAGMA application_id").fetchone() == (int.from_bytes(b"RWKV"),)
        assert connection.execute("PRAGMA page_size").fetchone() == (8192,)


def test_a_full_disk_is_named_while_migrating(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite says "disk I/O error" if it cannot extend its index. Here the cause is a full disk."""
    from state_pool.disk import database

    unpack(1, tmp_path)
    usage = SimpleNamespace(free=4096)
    monkeypatch.setattr(database, "shutil", SimpleNamespace(disk_usage=lambda folder: usage))

    def migrate(*_: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(database, "migrate", migrate)
    with pytest.raises(DatabaseUnusable, match="no space is left on its disk: free some"):
        open_writer(str(tmp_path / "sessions.db"), "NORMAL")
