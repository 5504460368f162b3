"""Makes whole copies of a database file, and recognises broken copies.

Broken copies were made from a running database.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from native.files import open_private, sync
from state_pool.disk.state_store import Connection
from state_pool.disk.statements import read_setting
from state_pool.errors import DatabaseUnusable

logger = logging.getLogger(__name__)

_RESERVE_BYTES = 64 << 20
"""Space that a copy before a migration must leave on the disk."""
_OPEN_FILE = "open_file"
"""Setting with the inode of the file while a service has it open."""


def copy_database(source: sqlite3.Connection, target: Path) -> None:
    """Write a whole copy, also while a service writes. Other users cannot read it. Raises sqlite3.Error, OSError."""
    part = target.with_name(f"{target.name}.part")
    part.unlink(missing_ok=True)
    os.close(open_private(part))
    try:
        source.execute("VACUUM INTO ?", (str(part),))
        with contextlib.closing(sqlite3.connect(part, isolation_level=None)) as copy:
            if _has_settings(copy):
                copy.execute("DELETE FROM pool_settings WHERE name = ?", (_OPEN_FILE,))
        sync(part)
        part.rename(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def keep_copy(connection: sqlite3.Connection, path: str, schema: int) -> None:
    """Copy the database before a migration, if the disk has room. Raises sqlite3.Error, OSError."""
    target = Path(f"{path}.schema-{schema}")
    num_bytes = used_bytes(connection)
    free = shutil.disk_usage(target.parent).free
    if free < num_bytes + _RESERVE_BYTES:
        logger.warning(
            "no copy of %s is kept before its migration: it needs %d MB, the disk has %d MB free; an older version "
            "cannot open the migrated file",
            path,
            num_bytes >> 20,
            free >> 20,
        )
        return
    copy_database(connection, target)
    logger.info(
        "the database before its migration is kept as %s (%d MB): an older version can open that copy; delete it when "
        "you no longer need it, or start with --migrate-backup off to keep none",
        target,
        num_bytes >> 20,
    )


def used_bytes(connection: Connection) -> int:
    """Return the bytes in use. Reads only the file's first page, which is cached."""
    names = ("page_count", "freelist_count", "page_size")
    pages, free, size = (int(connection.execute(f"PRAGMA {name}").fetchone()[0]) for name in names)
    return (pages - free) * size


def mark_open(connection: sqlite3.Connection, path: str) -> None:
    """Record that a service has this file open, in the file itself. Call after the migration."""
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("INSERT OR REPLACE INTO pool_settings VALUES (?, ?)", (_OPEN_FILE, _inode(path)))
    connection.execute("COMMIT")
    connection.execute("PRAGMA wal_checkpoint(PASSIVE)")  # a copy of the file without its log has the mark


def mark_closed(connection: Connection, *, is_alone: bool) -> None:
    """Remove the mark, unless other engines have the file open. Raises sqlite3.Error.

    - `is_alone`: whether none has, although a killed one may still be listed
    """
    connection.execute("BEGIN IMMEDIATE")
    if is_alone or connection.execute("SELECT 1 FROM engines").fetchone() is None:
        connection.execute("DELETE FROM pool_settings WHERE name = ?", (_OPEN_FILE,))
    connection.execute("COMMIT")


def check_copy(connection: sqlite3.Connection, path: str, *, had_log: bool) -> None:
    """Detect a file that was copied while a service wrote it.

    - `had_log`: whether its write-ahead log was there before this process opened it

    Raises DatabaseUnusable for a copy with damaged pages. Warns if the log is missing: then turns may be.
    """
    inode = read_setting(connection, _OPEN_FILE) if _has_settings(connection) else None
    if inode is None:
        return
    if inode != _inode(path):
        fault = " ".join(str(connection.execute("PRAGMA quick_check(1)").fetchone()[0]).split())  # has line breaks
        if fault != "ok":
            raise DatabaseUnusable(
                f"session database {path} is a broken copy, made while a service wrote the original ({fault}); copy it "
                "again with `rwkv-batch backup`, or salvage what is left with `python -m "
                "state_pool.salvage`"
            )
    if not had_log:
        logger.warning(
            "session database %s was open when it was copied or when its service was killed, and its log %s-wal is "
            "missing: if you copied it with cp, its last turns and sessions are missing. `rwkv-batch backup` makes a "
            "whole copy of a running database",
            path,
            path,
        )


def _inode(path: str) -> str:
    return str(Path(path).stat().st_ino)


def _has_settings(connection: sqlite3.Connection) -> bool:
    """Whether the schema has settings. Earlier schemas have none, and no mark."""
    return connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'pool_settings'").fetchone() is not None


@contextlib.contextmanager
def open_with_running_service(database: Path) -> Iterator[sqlite3.Connection]:
    """Open an existing database, also while its service runs. Raises DatabaseUnusable."""
    try:
        source = sqlite3.connect(
            f"{database.absolute().as_uri()}?mode=rw", uri=True, isolation_level=None, timeout=10.0
        )
        with contextlib.closing(source):
            yield source
    except sqlite3.Error as error:
        raise DatabaseUnusable(f"{database} cannot be read: {error}") from None


def copy_file(database: Path, target: Path) -> None:
    """Like `copy_database`, for any SQLite file. Raises DatabaseUnusable, OSError."""
    with open_with_running_service(database) as source:
        copy_database(source, target)
