"""A session database in an SQLite file: its connections, and checks before the first write."""

from __future__ import annotations

import os
import pwd
import sqlite3
from pathlib import Path
from typing import Any

from native.private_files import make_private, open_private
from state_pool.config import PoolConfig
from state_pool.disk.migrations import migrate
from state_pool.disk.process_lock import BUSY_TIMEOUT_S, ProcessLock
from state_pool.disk.state_store import Connection
from state_pool.errors import DatabaseUnusable

_PAGE_BYTES = 8192
_HEADER = b"SQLite format 3\x00"


class SqliteStore:
    """An SQLite file as a `StateStore`."""

    is_server = False

    def __init__(self, config: PoolConfig) -> None:
        """Raises DatabaseUnusable when another process has the file."""
        self.name = str(Path(config.state_db).absolute())
        self._path = str(Path(config.state_db).resolve())
        """The target of a symbolic link: all connections and the lock are on the same file."""
        self.engine = config.engine
        self.shared = bool(config.engine)
        self._synchronous = config.synchronous
        _check_file(self._path)
        self._lock = ProcessLock(self._path, config.service) if self.shared else ProcessLock(self._path)

    @property
    def is_first(self) -> bool:
        """See `StateStore`."""
        return self._lock.is_first

    def open_writer(self) -> sqlite3.Connection:
        """See `StateStore`."""
        connection = open_writer(self._path, self._synchronous)
        if not self._lock.is_on_path:
            connection.close()
            raise DatabaseUnusable(
                f"session database {self.name} was replaced by another file while it was opened; start again"
            )
        if self.shared:
            disable_busy_wait(connection)
        return connection

    def open_reader(self) -> sqlite3.Connection:
        """See `StateStore`."""
        connection = _connect(self._path)
        connection.execute("PRAGMA query_only=ON")
        return connection

    def open_checkpointer(self) -> sqlite3.Connection:
        """Open the connection that checkpoints the write-ahead log."""
        connection = _connect(self._path)
        connection.execute("PRAGMA wal_autocheckpoint=0")
        return connection

    def allow_other_engines(self) -> None:
        """See `StateStore`."""
        if self.shared:
            self._lock.share()

    def used_bytes(self, connection: Connection) -> int:
        """Count the pages in use. Reads only the file's first page, which is cached."""
        execute = connection.execute
        pages = int(execute("PRAGMA page_count").fetchone()[0]) - int(execute("PRAGMA freelist_count").fetchone()[0])
        return pages * int(execute("PRAGMA page_size").fetchone()[0])

    def wrap_error(self, error: sqlite3.Error) -> DatabaseUnusable:
        """See `StateStore`."""
        return wrap_error(error, self.name)

    def close(self) -> None:
        """See `StateStore`."""
        self._lock.release()


class WritingConnection(sqlite3.Connection):
    """A connection that writes only while its files are in place: the database, its write-ahead log and the log's
    index.

    SQLite itself keeps writing to deleted files: committed data is lost when the process ends. Another process would
    create a new log and index meanwhile, and neither would see the other's locks.
    """

    def __init__(self, path: str, *args: Any, **settings: Any) -> None:
        """See sqlite3.Connection."""
        super().__init__(path, *args, **settings)
        target = Path(path).resolve()  # of a link, its target
        self._paths = [Path(f"{target}{end}") for end in ("", "-wal", "-shm")]
        self._opened_file_ids: list[tuple[int, int]] = []

    def execute(self, statement: str, parameters: Any = (), /) -> sqlite3.Cursor:
        """See sqlite3.Connection. Raises sqlite3.OperationalError if a file has moved when a transaction begins."""
        if statement != "BEGIN IMMEDIATE":
            return super().execute(statement, parameters)
        if self._opened_file_ids and self._file_ids() != self._opened_file_ids:
            raise sqlite3.OperationalError("attempt to write a readonly database: its file has been moved")
        cursor = super().execute(statement, parameters)
        # SQLite creates the files of a new database with the first transaction.
        self._opened_file_ids = self._opened_file_ids or self._file_ids()
        return cursor

    def _file_ids(self) -> list[tuple[int, int]]:
        """Device and inode of the files; [] if one is missing."""
        try:
            found = [path.stat() for path in self._paths]
        except OSError:
            return []
        return [(file.st_dev, file.st_ino) for file in found]


def open_writer(path: str, synchronous: str) -> sqlite3.Connection:
    """Open the only connection that writes, with the schema up to date.

    Raises DatabaseUnusable, naming the file, the fault and the remedy.
    """
    _check_file(path)
    if not Path(path).exists():
        os.close(open_private(path))  # SQLite gives its log the same mode
    connection = _connect(path, WritingConnection)
    try:
        connection.execute(f"PRAGMA page_size={_PAGE_BYTES}")
        _expect(connection, "PRAGMA journal_mode=WAL", "wal", path)
        # The checkpointer thread moves the log into the file, so no commit waits for that.
        connection.execute("PRAGMA wal_autocheckpoint=0")
        connection.execute("PRAGMA journal_size_limit=67108864")
        connection.execute(f"PRAGMA synchronous={synchronous}")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("COMMIT")
        _check_length(connection, path)
        migrate(connection, path)
    except sqlite3.Error as error:
        connection.close()
        raise wrap_error(error, path) from error
    except BaseException:
        connection.close()
        raise
    return connection


def disable_busy_wait(connection: sqlite3.Connection) -> None:
    """Report a lock at once: writers of a shared database retry by themselves (`begin_with_retry`)."""
    connection.execute("PRAGMA busy_timeout=0")


def _connect(path: str, factory: type[sqlite3.Connection] = sqlite3.Connection) -> sqlite3.Connection:
    try:
        return sqlite3.connect(
            path, isolation_level=None, check_same_thread=False, timeout=BUSY_TIMEOUT_S, factory=factory
        )
    except sqlite3.Error as error:
        raise wrap_error(error, path) from error


def _expect(connection: sqlite3.Connection, pragma: str, expected: str, path: str) -> None:
    answer = str(connection.execute(pragma).fetchone()[0])
    if answer != expected:
        raise DatabaseUnusable(f"session database {path}: {pragma} answered {answer!r}; is the file on a network disk?")


def _check_file(path: str) -> None:
    file = Path(path)
    folder = file.parent
    if not folder.is_dir():
        raise DatabaseUnusable(f"session database {path}: there is no folder {folder}; create it, or use --state-db")
    files = [found for end in ("", "-wal", "-shm") if (found := Path(f"{path}{end}")).exists()]
    for target in (folder, *files):
        if not os.access(target, os.W_OK):
            raise DatabaseUnusable(
                f"session database {path}: {target} is not writable (owner {_user_name(target.stat().st_uid)}, mode "
                f"{target.stat().st_mode & 0o7777:04o}, this process runs as {_user_name(os.geteuid())}); fix its "
                'permissions, name another file with --state-db, or keep sessions in memory only with --state-db ""'
            )
    for target in files:
        make_private(target)
    if file.exists() and file.stat().st_size > 0:
        with file.open("rb") as stream:
            head = stream.read(len(_HEADER))
        if head != _HEADER:
            raise DatabaseUnusable(f"session database {path} is not an SQLite file; name another with --state-db")


def _user_name(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def _check_length(connection: sqlite3.Connection, path: str) -> None:
    """Raises DatabaseUnusable for a truncated file, which SQLite would open without an error."""
    busy = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
    if busy:
        return  # a reader is active: the end of the file may still be in the log
    pages = int(connection.execute("PRAGMA page_count").fetchone()[0])
    page_bytes = int(connection.execute("PRAGMA page_size").fetchone()[0])
    size = Path(path).stat().st_size
    if size < pages * page_bytes:
        raise DatabaseUnusable(
            f"session database {path} is truncated: {size} bytes of {pages * page_bytes}. "
            "Restore it from a backup, or salvage what is left with `python -m state_pool.salvage`"
        )


def wrap_error(error: Exception, path: str) -> DatabaseUnusable:
    """Return the error with the file and a remedy."""
    text = str(error)
    if "locked" in text or "busy" in text:
        remedy = "another process holds a lock on it: close it, or name another file with --state-db"
    elif "readonly" in text or "unable to open" in text:
        remedy = "make the file and its folder writable, or name another with --state-db"
    elif "full" in text:
        remedy = "free space on the disk"
    elif "malformed" in text or "not a database" in text:
        remedy = "restore it from a backup, or salvage what is left with `python -m state_pool.salvage`"
    else:
        remedy = "check the disk"
    return DatabaseUnusable(f"session database {path}: {text}; {remedy}")
