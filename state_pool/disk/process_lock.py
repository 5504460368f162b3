"""The lock of a database file: one process writes it, or the engines of one service.

The lock is on the file itself, not on its name. So a symbolic link, a hard link or a deleted `.lock` does not lead to
another lock. The kernel releases it with the process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import time
from pathlib import Path

from native.files import open_private
from state_pool.errors import DatabaseUnusable

BUSY_TIMEOUT_S = 2.0
"""How long another process may hold the lock, or SQLite's own."""
_FIRST_OPEN_TIMEOUT_S = 600.0
"""How long the first engine of a service may take to open the database, with a copy before a migration."""
_LOCK_BYTE = 1 << 62
"""Offset of the locked byte. SQLite locks bytes near 2^30 only."""


class ProcessLock:
    """A lock on a byte of the database. The file `<database>.lock` has the owner's name."""

    def __init__(self, path: str, service: str = "") -> None:
        """Wait a little for an ending process. Raises DatabaseUnusable if another process writes the file.

        - `path`: resolved, without symbolic links; an empty file is created if there is none
        - `service`: common name of the engines that may write the file together; "": only this process
        """
        self.is_first = True
        """Whether no other engine has the database open. None can open it before `share`."""
        self._path = path
        self._service = service
        self._file = _open(path, path)
        try:
            self._owner_file = os.fdopen(_open(path, f"{path}.lock", os.O_RDWR | os.O_APPEND), "a+b")
        except BaseException:
            os.close(self._file)
            raise
        started_at = time.monotonic()
        try:
            while not self._take():
                waited = time.monotonic() - started_at
                if waited > (_FIRST_OPEN_TIMEOUT_S if self._is_ours() else BUSY_TIMEOUT_S):
                    raise DatabaseUnusable(
                        f"session database {path} is in use by another process{self._owner()}, which writes this file: "
                        "stop it, or name another file with --state-db"
                    )
                time.sleep(0.05)
            _refuse_hard_links(path, os.fstat(self._file).st_nlink)
        except BaseException:
            self.release()
            raise

    @property
    def is_on_path(self) -> bool:
        """Whether the path still leads to the locked file."""
        try:
            return os.path.samestat(Path(self._path).stat(), os.fstat(self._file))
        except OSError:
            return False

    def _take(self) -> bool:
        if not self._lock_byte(fcntl.F_WRLCK):
            return bool(self._service) and self._join()
        if not self._lock_owner_file(fcntl.LOCK_EX):  # program versions up to schema 6 lock only this file
            self._lock_byte(fcntl.F_UNLCK)
            return False
        self._owner_file.truncate(0)
        self._owner_file.write(f"{os.getpid()} {self._service}".encode())
        self._owner_file.flush()
        self.is_first = True
        return True

    def _join(self) -> bool:
        if not self._lock_byte(fcntl.F_RDLCK):
            return False
        if not (self._is_ours() and self._lock_owner_file(fcntl.LOCK_SH)):
            self._lock_byte(fcntl.F_UNLCK)
            return False
        self.is_first = False
        return True

    def share(self) -> None:
        """Let other engines of the service in. The database must be open and consistent."""
        if self._service:
            self._lock_owner_file(fcntl.LOCK_SH)
            self._lock_byte(fcntl.F_RDLCK)

    def take_alone(self) -> bool:
        """Lock out other engines until `release`. Returns False if another has the database open."""
        return self._lock_byte(fcntl.F_WRLCK)

    def _lock_byte(self, kind: int) -> bool:
        """Set an open-file lock, which no other descriptor of this process releases. False: others hold one."""
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, struct.pack("hhqqi0q", kind, os.SEEK_SET, _LOCK_BYTE, 1, 0))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise DatabaseUnusable(
                f"session database {self._path} cannot be locked ({error.strerror}); move it to a local disk, "
                "and name it with --state-db"
            ) from None
        return True

    def _lock_owner_file(self, kind: int) -> bool:
        try:
            fcntl.flock(self._owner_file, kind | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def _read_owner(self) -> list[str]:
        self._owner_file.seek(0)
        return self._owner_file.read(200).decode(errors="replace").split(maxsplit=1)

    def _is_ours(self) -> bool:
        return bool(self._service) and self._read_owner()[1:] == [self._service]

    def _owner(self) -> str:
        pid = "".join(self._read_owner()[:1])
        return f" (pid {pid})" if pid.isdigit() else ""

    def release(self) -> None:
        """Release the lock. Close all SQLite connections of this process first: this ends their locks too."""
        with contextlib.suppress(DatabaseUnusable, OSError):  # a forked child would keep what is only closed here
            self._lock_byte(fcntl.F_UNLCK)
            fcntl.flock(self._owner_file, fcntl.LOCK_UN)
        os.close(self._file)
        self._owner_file.close()


def _open(database: str, path: str, flags: int = os.O_RDWR) -> int:
    """Open a file that only this user may read. Raises DatabaseUnusable."""
    try:
        return open_private(path, flags)
    except OSError as error:
        name = "it" if path == database else f"its lock {path}"
        raise DatabaseUnusable(
            f"session database {database}: {name} cannot be written ({error.strerror}); fix the folder's "
            'permissions, name another file with --state-db, or keep sessions in memory only with --state-db ""'
        ) from None


def _refuse_hard_links(path: str, names: int) -> None:
    """Check that the file has only one name, as SQLite's log does. Raises DatabaseUnusable."""
    if names > 1:
        raise DatabaseUnusable(
            f"session database {path} has {names} names (hard links), but its write-ahead log has only one: turns "
            f"would be lost under another name. Remove the other names (`find . -samefile {path}`), or copy the file"
        )
