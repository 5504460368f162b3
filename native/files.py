"""Cache folder, private files and folders, temporary folders, and file system types."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import logging
import os
import shutil
import stat
import sys
import tempfile
import time
import uuid
from pathlib import Path

VARIABLE = "RWKV_BUILD_DIR"


def cache_folder() -> Path:
    """Returns $RWKV_BUILD_DIR, else rwkv-batch in $XDG_CACHE_HOME or ~/.cache. The code's folder may be read-only."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen)
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "rwkv-batch"


logger = logging.getLogger(__name__)

FILE_MODE = 0o600
FOLDER_MODE = 0o700
_OTHERS = 0o077


def open_private(path: Path | str, flags: int = os.O_RDWR) -> int:
    """Return the file's descriptor. A new file is closed to other users. Raises OSError."""
    return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)


def write_private(path: Path, content: bytes) -> None:
    """Writes a file that other users cannot read. Raises OSError."""
    with os.fdopen(open_private(path, os.O_WRONLY | os.O_TRUNC), "wb") as file:
        file.write(content)


def replace_private(path: Path, content: bytes) -> None:
    """Writes a private file in one step: readers see the old content or the new. Raises OSError."""
    temp_path = path.with_name(f".{uuid.uuid4().hex}.new")  # unique: processes may write at the same time
    try:
        write_private(temp_path, content)
        temp_path.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temp_path.unlink(missing_ok=True)
        raise


def write_synced(path: Path, content: bytes | memoryview) -> None:
    """Writes a file that is on disk before it gets its name. Raises OSError; then an older file stays."""
    half = path.with_name(f".{path.name}.half")
    try:
        with half.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        half.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            half.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Syncs a file's content, or the names in a folder. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_private_folder(folder: Path) -> None:
    """Creates a folder, with its parents, that other users cannot enter. Raises OSError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(FOLDER_MODE, exist_ok=True)
    make_private(folder)


def make_private(path: Path) -> None:
    """Remove other users' rights to an existing file or folder.

    Logs the change. If the file belongs to another user, only logs the command for its owner.
    """
    status = path.stat()
    if not status.st_mode & _OTHERS:
        return
    mode = stat.S_IMODE(status.st_mode) & ~_OTHERS
    try:
        path.chmod(mode)
    except OSError as error:
        logger.warning(
            "%s is open to other users (mode %04o) and belongs to user %d, so its mode cannot be changed here (%s): "
            "run `chmod go= %s` as that user",
            path,
            stat.S_IMODE(status.st_mode),
            status.st_uid,
            error.strerror,
            path,
        )
    else:
        before = stat.S_IMODE(status.st_mode)
        logger.warning("%s was open to other users (mode %04o): its mode is %04o now", path, before, mode)


PREFIX = "rwkv-"
"""of their names"""
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
    """Removes a folder. Raises OSError if it has an owner, or never had one."""
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


_NETWORK = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFE534D42: "SMB",
    0xFF534D42: "CIFS",
    0x00C36400: "Ceph",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x5346414F: "AFS",
    0x01021997: "9P",
    0x65735546: "FUSE, perhaps of another machine like sshfs",
}
"""`f_type` of statfs(2), from Linux's magic.h and the file systems' sources."""
_STATFS_BYTES = 256
"""More than the structure has on any processor. It begins with `f_type`."""


def network_file_system(path: Path | str) -> str:
    """Return the name of the network file system that has `path`. Returns "" for a local one or outside Linux."""
    return _NETWORK.get(_type_number(path), "")


def _type_number(path: Path | str) -> int:
    """Return the number of the file system's type. 0: not known."""
    if not sys.platform.startswith("linux"):
        return 0
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    if _statfs()(os.fsencode(path), buffer) != 0:
        return 0
    return ctypes.c_ulong.from_buffer(buffer).value & 0xFFFFFFFF


@functools.cache
def _statfs() -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL(None, use_errno=True).statfs
    function.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
    function.restype = ctypes.c_int
    return function
