"""A session database in an SQLite file: its lock, its connections, and checks before the first write."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from pathlib import Path
from typing import Any

from state_pool.config import PoolConfig
from state_pool.disk.migrations import migrate
from state_pool.disk.state_store import Connection
from state_pool.errors import DatabaseUnusable

BUSY_TIMEOUT_S = 2.0
"""How long another process may hold SQLite's own lock."""
_FIRST_OPEN_TIMEOUT_S = 30.0
"""How long the first engine of a service may take to open the database, with migrations."""
_PAGE_BYTES = 8192
_HEADER = b"SQLite format 3\x00"


class ProcessLock:
    """The lock file `<database>.lock`, held by one process or by the engines of one service. The kernel releases it."""

    def __init__(self, path: str, service: str = "") -> None:
        """Wait a little for an ending process. Raises DatabaseUnusable if the file is held by others or not writable.

        `service`: common name of the engines that may hold it together; "": only this process.
        """
        self.is_first = True
        """Whether no other engine has the database open. None can open it before `share`."""
        self._service = service
        try:
            self._file = open(f"{path}.lock", "a+b")  # noqa: SIM115 - held for the life of the process
        except OSError as error:
            raise DatabaseUnusable(
                f"session database {path}: its lock {path}.lock cannot be written ({error.strerror}); fix the folder's "
                'permissions, name another file with --state-db, or keep sessions in memory only with --state-db ""'
            ) from None
        started_at = time.monotonic()
        while not self._take():
            waited = time.monotonic() - started_at
            if waited > (_FIRST_OPEN_TIMEOUT_S if self._is_ours() else BUSY_TIMEOUT_S):
                owner = self._owner()
                self._file.close()
                raise DatabaseUnusable(
                    f"session database {path} is in use by another process{owner}: stop it, "
                    "or name another file with --state-db"
                )
            time.sleep(0.05)

    def _take(self) -> bool:
        """Take the lock alone, or together with engines of the same service."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return bool(self._service) and self._join()
        self._file.truncate(0)
        self._file.write(f"{os.getpid()} {self._service}".encode())
        self._file.flush()
        return True

    def _join(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        self.is_first = False
        if not self._is_ours():
            fcntl.flock(self._file, fcntl.LOCK_UN)
        return self._is_ours()

    def share(self) -> None:
        """Let other engines of the service in, once the database is open and consistent."""
        if self._service:
            fcntl.flock(self._file, fcntl.LOCK_SH)

    def _read_owner(self) -> list[str]:
        self._file.seek(0)
        return self._file.read(200).decode(errors="replace").split(maxsplit=1)

    def _is_ours(self) -> bool:
        return bool(self._service) and self._read_owner()[1:] == [self._service]

    def _owner(self) -> str:
        pid = "".join(self._read_owner()[:1])
        return f" (pid {pid})" if pid.isdigit() else ""

    def release(self) -> None:
        self._file.close()


class SqliteStore:
    """An SQLite file as a `StateStore`."""

    is_server = False

    def __init__(self, config: PoolConfig) -> None:
        """Raises DatabaseUnusable when another process has the file."""
        self.name = str(Path(config.state_db).absolute())
        self.engine = config.engine
        self.shared = bool(config.engine)
        self._synchronous = config.synchronous
        self._lock: ProcessLock | None = None
        if Path(self.name).parent.is_dir():  # otherwise opening the file reports the missing folder
            self._lock = ProcessLock(self.name, config.service) if self.shared else ProcessLock(self.name)

    @property
    def is_first(self) -> bool:
        """See `StateStore`."""
        return self._lock is None or self._lock.is_first

    def open_writer(self) -> sqlite3.Connection:
        """See `StateStore`."""
        connection = open_writer(self.name, self._synchronous)
        if self.shared:
            disable_busy_wait(connection)
        return connection

    def open_reader(self) -> sqlite3.Connection:
        """See `StateStore`."""
        connection = _connect(self.name)
        connection.execute("PRAGMA query_only=ON")
        return connection

    def open_checkpointer(self) -> sqlite3.Connection:
        """Open the connection that checkpoints the write-ahead log."""
        connection = _connect(self.name)
        connection.execute("PRAGMA wal_autocheckpoint=0")
        return connection

    def allow_other_engines(self) -> None:
        """See `StateStore`."""
        if self._lock is not None and self.shared:
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
        if self._lock is not None:
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
