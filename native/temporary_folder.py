"""A folder of one process, beside those of others: what a process that was killed has left is removed by the next.

Whoever holds the lock of the file in it is its owner, and the system lets go of the lock with the process, however that
ends. So no running process loses its folder, of any user, container or service.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

PREFIX = "rwkv-"
"""Prefix of their names."""
_LOCK = "owner.lock"
STALE_FILE_S = 3600.0
"""Unfinished files older than this belong to dead processes."""


class TemporaryFolder:
    """A temporary folder, removed by `remove` or by a later process."""

    def __init__(self, kind: str = "") -> None:
        """Creates a folder of that kind and removes stale ones. Raises OSError if it cannot be created."""
        remove_stale()
        while True:
            self.path = tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-" if kind else PREFIX)
            self._lock = os.open(os.path.join(self.path, _LOCK), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            with contextlib.suppress(OSError):  # a file system without locks: it is nobody's then, and stays
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            if os.fstat(self._lock).st_nlink:
                return
            os.close(self._lock)  # another process came between the two calls, and has removed it

    def remove(self) -> None:
        """Removes the folder. May be called twice."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def remove_stale() -> None:
    """Removes this user's folders whose owner has ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another's, or one that has just been removed
            if folder.lstat().st_uid == os.geteuid():
                _remove_unowned(folder)


def _remove_unowned(folder: Path) -> None:
    """Raises OSError if it has an owner, or never had one."""
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def remove_stale_files(folder: Path) -> None:
    """Remove a folder's hidden files that dead processes left. Those of live processes are younger."""
    with contextlib.suppress(OSError):  # no folder, no permission, or another process removes them too
        for temp_path in folder.glob(".*"):
            if time.time() - temp_path.stat().st_mtime > STALE_FILE_S:
                temp_path.unlink()
