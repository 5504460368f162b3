"""A session database in an SQLite file: its connections, and checks before the first write."""

from __future__ import annotations

import logging
import os
import pwd
import shutil
import sqlite3
from functools import partial
from pathlib import Path
from typing import Any

from native.files import make_private, network_file_system, open_private
from state_pool.config import PoolConfig
from state_pool.disk.copies import check_copy, keep_copy, mark_closed, mark_open, used_bytes
from state_pool.disk.migrations import migrate
from state_pool.disk.process_lock import BUSY_TIMEOUT_S, ProcessLock
from state_pool.disk.state_store import Connection
from state_pool.errors import DatabaseUnusable

logger = logging.getLogger(__name__)

_PAGE_BYTES = 8192
_HEADER = b"SQLite format 3\x00"
_WRITE_VERSION = 18
"""Offset in the header. SQLite changes it to the mode with a log before it makes one."""
_WITHOUT_LOG = b"\1"
"""Of a file that `VACUUM INTO` made and no service has opened."""
_MIN_FREE_BYTES = 1 << 20
_APPLICATION_ID = int.from_bytes(b"RWKV")


class SqliteStore:
    def __init__(self, config: PoolConfig) -> None:
        """Raises DatabaseUnusable when another process has the file."""
        self.name = str(Path(config.state_db).absolute())
        self._path = str(Path(config.state_db).resolve())
        """The target of a symbolic link: all connections and the lock are on the same file."""
        self.engine = config.engine
        self.shared = bool(config.engine)
        self._synchronous = config.synchronous
        self._migrate_backup = config.migrate_backup
        _check_file(self._path)
        if network := network_file_system(Path(self._path).parent):
            logger.warning(
                "session database %s is on a network file system (%s): SQLite is safe there only if no other machine "
                "writes the file, and its locks may not show that. Move it to a local disk with --state-db, or use "
                "postgresql://... for services on several machines",
                self._path,
                network,
            )
        self._lock = ProcessLock(self._path, config.service) if self.shared else ProcessLock(self._path)

    @property
    def is_first(self) -> bool:
        return self._lock.is_first

    def open_writer(self) -> sqlite3.Connection:
        """See `StateStore`. Raises DatabaseUnusable."""
        connection = open_writer(self._path, self._synchronous, keeps_copy=self._migrate_backup, is_first=self.is_first)
        if not self._lock.is_on_path:
            connection.close()
            raise DatabaseUnusable(
                f"session database {self.name} was replaced by another file while it was opened; start again"
            )
        if self.shared:
            disable_busy_wait(connection)
        return connection

    def before_close(self, connection: Connection) -> None:
        mark_closed(connection, is_alone=self._lock.take_alone())

    def open_reader(self) -> sqlite3.Connection:
        connection = _connect(self._path)
        connection.execute("PRAGMA query_only=ON")
        return connection

    def open_checkpointer(self) -> sqlite3.Connection:
        connection = _connect(self._path)
        connection.execute("PRAGMA wal_autocheckpoint=0")
        return connection

    def allow_other_engines(self) -> None:
        if self.shared:
            self._lock.share()

    def used_bytes(self, connection: Connection) -> int:
        return used_bytes(connection)

    def wrap_error(self, error: sqlite3.Error) -> DatabaseUnusable:
        return wrap_error(error, self.name)

    def close(self) -> None:
        self._lock.release()


class WritingConnection(sqlite3.Connection):
    """A connection that writes only while its files are in place: the database, its write-ahead log and the log's
    index.

    SQLite itself keeps writing to deleted files: committed data is lost when the process ends. Another process would
    create a new log and index meanwhile, and neither would see the other's locks.
    """

    def __init__(self, path: str, *args: Any, **settings: Any) -> None:
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
        """Return device and inode of each file; [] if one is missing."""
        try:
            found = [path.stat() for path in self._paths]
        except OSError:
            return []
        return [(file.st_dev, file.st_ino) for file in found]


def open_writer(path: str, synchronous: str, *, keeps_copy: bool = False, is_first: bool = False) -> sqlite3.Connection:
    """Open the only connection that writes, with the schema up to date.

    - `keeps_copy`: keep a copy before a migration
    - `is_first`: no other engine has the file open, so marks in it are of an earlier service

    Raises DatabaseUnusable, naming the file, the fault and the remedy.
    """
    _check_file(path)
    if not Path(path).exists():
        os.close(open_private(path))  # SQLite gives its log the same mode
    log = Path(f"{path}-wal")
    had_log = log.exists() and log.stat().st_size > 0
    connection = _connect(path, WritingConnection)
    try:
        connection.execute(f"PRAGMA page_size={_PAGE_BYTES}")  # before the first write, which fixes it
        _check_application(connection, path)
        for end in ("", "-wal", "-shm", ".lock"):
            if (file := Path(f"{path}{end}")).exists():
                make_private(file)
        was_in_wal_mode = connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
        _expect(connection, "PRAGMA journal_mode=WAL", "wal", path)
        # The checkpointer thread moves the log into the file, so no commit waits for that.
        connection.execute("PRAGMA wal_autocheckpoint=0")
        connection.execute("PRAGMA journal_size_limit=67108864")
        connection.execute(f"PRAGMA synchronous={synchronous}")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("COMMIT")
        _check_length(connection, path)
        if is_first and was_in_wal_mode:  # a copy that SQLite made with VACUUM INTO is not
            check_copy(connection, path, had_log=had_log)
        migrate(connection, path, partial(keep_copy, connection, path) if keeps_copy else None)
        if is_first:
            mark_open(connection, path)
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
    if file.exists() and file.stat().st_size > 0:
        with file.open("rb") as stream:
            head = stream.read(_WRITE_VERSION + 1)
        if not head.startswith(_HEADER):
            raise DatabaseUnusable(f"session database {path} is not an SQLite file; name another with --state-db")
        log = Path(f"{path}-wal")
        if head[_WRITE_VERSION:] == _WITHOUT_LOG and log in files and log.stat().st_size > 0:
            raise DatabaseUnusable(
                f"session database {path} is a backup, and {log} is the write-ahead log of the file that was here: "
                f"SQLite would write the log into the backup. Delete {log} and {path}-shm, then start"
            )


def _check_application(connection: sqlite3.Connection, path: str) -> None:
    """Mark a new file as ours. Raises DatabaseUnusable for the database of another program, which stays unchanged."""
    found = int(connection.execute("PRAGMA application_id").fetchone()[0])
    if found == _APPLICATION_ID:
        return
    columns = {name for (name,) in connection.execute("SELECT name FROM pragma_table_info('schema_migrations')")}
    is_empty = connection.execute("SELECT 1 FROM sqlite_master").fetchone() is None
    if found != 0 or not (is_empty or columns == {"version", "name", "applied"}):
        raise DatabaseUnusable(
            f"session database {path} is an SQLite file of another program; name another file with --state-db"
        )
    connection.execute(f"PRAGMA application_id={_APPLICATION_ID}")


def _user_name(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def _check_length(connection: sqlite3.Connection, path: str) -> None:
    """Check that the file is not truncated. SQLite opens such a file without an error. Raises DatabaseUnusable."""
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
    elif "full" in text or ("I/O" in text and shutil.disk_usage(Path(path).parent).free < _MIN_FREE_BYTES):
        # SQLite reports an I/O error if it cannot extend its log's index.
        remedy = "no space is left on its disk: free some"
    elif "malformed" in text or "not a database" in text:
        remedy = (
            "restore it from a backup, or salvage what is left with `python -m state_pool.salvage`; if it is a copy of "
            "a running database, make it with `rwkv-batch backup`"
        )
    else:
        remedy = "check the disk"
    return DatabaseUnusable(f"session database {path}: {text}; {remedy}")
