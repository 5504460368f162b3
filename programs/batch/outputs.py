"""The output and error files. They are append-only, and truncated to their durable part on resume."""

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
    """One file, locked by this run. Each append is a complete block, compressed or not."""

    def __init__(self, path: Path, compression: str) -> None:
        """Opens or creates the file. Raises RunError."""
        self._path = path
        self._compression = compression
        if path.exists() and not path.is_file():
            raise RunError(f"{path} is not a regular file, so it cannot be resumed; give - for a pipe")
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
        """Truncates the file to `length` bytes. Raises RunError if it is shorter."""
        if self.length < length:
            raise RunError(
                f"{self._path} has {self.length} bytes and had {length} when the run was stopped: it was changed; "
                "restore it, or give --fresh to start over"
            )
        os.ftruncate(self._file, length)
        os.lseek(self._file, length, os.SEEK_SET)
        self.length = length

    def append(self, data: bytes) -> None:
        """Appends data and syncs it. Raises OSError, for example on a full disk."""
        if not data:
            return
        view = memoryview(self._compressed(data))
        while view:
            written = os.write(self._file, view)
            self.length += written
            view = view[written:]
        os.fsync(self._file)

    def _compressed(self, data: bytes) -> bytes:
        """Compresses data as its own member or frame."""
        if self._compression == "gz":
            return gzip.compress(data, 6, mtime=0)
        return zstandard.compress(data, 6) if self._compression == "zst" else data

    def close(self) -> None:
        """Closes and unlocks the file."""
        os.close(self._file)


class StandardOutput:
    """Output to a pipe, which cannot be resumed."""

    length = 0

    def append(self, data: bytes) -> None:
        """Writes data. Raises OSError if the reader is gone."""
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    def close(self) -> None:
        """See OutputFile."""


class StandardError(StandardOutput):
    """Error lines of a run that writes to a pipe without an error file."""

    def append(self, data: bytes) -> None:
        """See StandardOutput."""
        sys.stderr.buffer.write(data)
        sys.stderr.buffer.flush()


def sync_folder(path: Path) -> None:
    """Syncs the folder, so that names of new files are durable."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
