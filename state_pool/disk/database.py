"""Opening the session database: one process at a time, checked before anything is written."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from pathlib import Path

from state_pool.disk.migrations import migrate
from state_pool.errors import DatabaseUnusable

BUSY_TIMEOUT_S = 2.0
"""How long another process may hold SQLite's own lock before we say so."""
_PAGE_BYTES = 8192
_HEADER = b"SQLite format 3\x00"


class ProcessLock:
    """`<database>.lock`, held by one live process; the kernel releases it however that process ends."""

    def __init__(self, path: str) -> None:
        """Waits a little for a process that ends. Raises DatabaseUnusable, naming the owner."""
        self._file = open(f"{path}.lock", "a+b")  # noqa: SIM115 - held for the life of the process
        deadline = time.monotonic() + BUSY_TIMEOUT_S
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    owner = self._owner()
                    self._file.close()
                    raise DatabaseUnusable(
                        f"session database {path} is in use by another process{owner}: stop it, "
                        "or name another file with --state-db"
                    ) from None
                time.sleep(0.05)
        self._file.truncate(0)
        self._file.write(str(os.getpid()).encode())
        self._file.flush()

    def _owner(self) -> str:
        self._file.seek(0)
        pid = self._file.read(20).decode(errors="replace").strip()
        return f" (pid {pid})" if pid.isdigit() else ""

    def release(self) -> None:
        """Let another process have the database."""
        self._file.close()


def open_writer(path: str, synchronous: str) -> sqlite3.Connection:
    """The one connection that writes, with the schema up to date.

    Raises DatabaseUnusable, naming the file, what is wrong and what to do.
    """
    _check_file(path)
    connection = _connect(path)
    try:
        connection.execute(f"PRAGMA page_size={_PAGE_BYTES}")
        _expect(connection, "PRAGMA journal_mode=WAL", "wal", path)
        # The writer moves the log into the file itself, between turns: never inside somebody's commit.
        connection.execute("PRAGMA wal_autocheckpoint=0")
        connection.execute("PRAGMA journal_size_limit=67108864")
        connection.execute(f"PRAGMA synchronous={synchronous}")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("COMMIT")
        _check_length(connection, path)
        migrate(connection, path)
    except sqlite3.Error as error:
        connection.close()
        raise explain(error, path) from error
    except BaseException:
        connection.close()
        raise
    return connection


def open_reader(path: str) -> sqlite3.Connection:
    """A connection that only reads, for the reader thread."""
    connection = _connect(path)
    connection.execute("PRAGMA query_only=ON")
    return connection


def open_maintainer(path: str) -> sqlite3.Connection:
    """A connection that only moves the write-ahead log into the file."""
    connection = _connect(path)
    connection.execute("PRAGMA wal_autocheckpoint=0")
    return connection


def _connect(path: str) -> sqlite3.Connection:
    try:
        return sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=BUSY_TIMEOUT_S)
    except sqlite3.Error as error:
        raise explain(error, path) from error


def _expect(connection: sqlite3.Connection, pragma: str, wanted: str, path: str) -> None:
    answer = str(connection.execute(pragma).fetchone()[0])
    if answer != wanted:
        raise DatabaseUnusable(f"session database {path}: {pragma} answered {answer!r}; is the file on a network disk?")


def _check_file(path: str) -> None:
    file = Path(path)
    folder = file.parent
    if not folder.is_dir():
        raise DatabaseUnusable(f"session database {path}: there is no folder {folder}; make it, or use --state-db")
    for target in (folder, file) if file.exists() else (folder,):
        if not os.access(target, os.W_OK):
            raise DatabaseUnusable(
                f"session database {path}: {target} is not writable; fix its permissions, name another file "
                'with --state-db, or keep sessions in memory only with --state-db ""'
            )
    if file.exists() and file.stat().st_size > 0:
        with file.open("rb") as stream:
            head = stream.read(len(_HEADER))
        if head != _HEADER:
            raise DatabaseUnusable(f"session database {path} is not an SQLite file; name another with --state-db")


def _check_length(connection: sqlite3.Connection, path: str) -> None:
    """A file cut short still opens; what is missing would only be noticed row by row."""
    busy = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
    if busy:
        return  # somebody reads: the end of the file may still be in the write-ahead log
    pages = int(connection.execute("PRAGMA page_count").fetchone()[0])
    page_bytes = int(connection.execute("PRAGMA page_size").fetchone()[0])
    size = Path(path).stat().st_size
    if size < pages * page_bytes:
        raise DatabaseUnusable(
            f"session database {path} is truncated: {size} bytes of {pages * page_bytes}. "
            "Restore it from a backup, or salvage what is left with `python -m state_pool.salvage`"
        )


def explain(error: Exception, path: str) -> DatabaseUnusable:
    """The same failure in words that name the file and the remedy."""
    text = str(error)
    if "locked" in text or "busy" in text:
        remedy = "another process holds a lock on it: close it, or name another file with --state-db"
    elif "readonly" in text or "unable to open" in text:
        remedy = "make the file and its folder writable, or name another with --state-db"
    elif "full" in text:
        remedy = "make room on the disk"
    elif "malformed" in text or "not a database" in text:
        remedy = "restore it from a backup, or salvage what is left with `python -m state_pool.salvage`"
    else:
        remedy = "check the disk"
    return DatabaseUnusable(f"session database {path}: {text}; {remedy}")
