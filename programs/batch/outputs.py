"""The output and the file of errors: only ever appended to, and cut back to what is known to be whole."""

from __future__ import annotations

import fcntl
import gzip
import os
import sys
from pathlib import Path

import zstandard

from programs.record import RunError

STDOUT = "-"


class OutputFile:
    """One file, held by this run alone. Every append is whole in itself, compressed or not."""

    def __init__(self, path: Path, compression: str) -> None:
        """Opens, or makes it. Raises RunError if it cannot be had."""
        self._path = path
        self._compression = compression
        if path.exists() and not path.is_file():
            raise RunError(f"{path} is no regular file, and nothing else can be gone on with; give - for a pipe")
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RunError(f"{path} cannot be written ({error.strerror})") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise RunError(f"{path} is being written by another run; wait for it, or give another file") from None
        self.length = os.fstat(self._file).st_size

    def cut(self, length: int) -> None:
        """Back to the first `length` bytes. Raises RunError if there are not so many."""
        if self.length < length:
            raise RunError(
                f"{self._path} has {self.length} bytes and had {length} when the run was stopped: it was changed; "
                "put it back, or give --fresh to begin anew"
            )
        os.ftruncate(self._file, length)
        os.lseek(self._file, length, os.SEEK_SET)
        self.length = length

    def append(self, data: bytes) -> None:
        """Add data and wait until it is on the disk. Raises OSError, as when the disk is full."""
        if not data:
            return
        view = memoryview(self._compressed(data))
        while view:
            written = os.write(self._file, view)
            self.length += written
            view = view[written:]
        os.fsync(self._file)

    def _compressed(self, data: bytes) -> bytes:
        """A member or frame of its own: files of several are files."""
        if self._compression == "gz":
            return gzip.compress(data, 6, mtime=0)
        return zstandard.compress(data, 6) if self._compression == "zst" else data

    def close(self) -> None:
        """Let another run have it."""
        os.close(self._file)


class StandardOutput:
    """Lines for a pipe: nothing is taken back, so nothing is resumed."""

    length = 0

    def append(self, data: bytes) -> None:
        """Write data. Raises OSError if nobody reads."""
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    def close(self) -> None:
        """See OutputFile."""


class StandardError(StandardOutput):
    """Errors of a run that writes to a pipe and names no file for them."""

    def append(self, data: bytes) -> None:
        """See StandardOutput."""
        sys.stderr.buffer.write(data)
        sys.stderr.buffer.flush()


def sync_folder(path: Path) -> None:
    """Wait until the names of new files in the folder are on the disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
