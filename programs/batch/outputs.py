"""The order of finished records, and the output and error files.

The files are append-only, and truncated to their durable part on resume.
"""

from __future__ import annotations

import fcntl
import gzip
import os
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import zstandard

from programs.batch.sidecar import Progress
from programs.record import RunError


@dataclass(slots=True)
class FinishedRecord:
    """A record's lines for both files."""

    output: str
    error: str = ""
    key: bytes | None = None
    answer: str | None = None
    """Answer to keep for equal lines under `key`."""


@dataclass(slots=True)
class CommitBatch:
    """Lines that one commit makes durable."""

    output: bytes
    errors: bytes
    answers: dict[bytes, str]
    next_index: int
    beyond: list[int]
    answered: int
    failed: int
    waiting: dict[int, tuple[str, str]]
    """Output and error of records that finished, and wait for earlier ones, by index."""


class ReorderBuffer:
    """Puts finished records in order. Used on the event loop; any thread may call `is_done`."""

    def __init__(self, keeps_order: bool, previous: Progress) -> None:
        self._keeps_order = keeps_order
        self._previous = previous
        self._already_done = frozenset(previous.beyond)
        self._open: deque[int] = deque()
        """Started records in order. The first one is not written yet."""
        self._finished: dict[int, FinishedRecord] = {}
        """Finished records that wait for earlier ones."""
        self._beyond = set(previous.beyond)
        """Written records after the first open one."""
        self._newly_finished: set[int] = set()
        """Those that no commit has."""
        self._uncommitted: list[FinishedRecord] = []
        self._end_index = previous.next_index
        self.unfinished = 0
        """Number of records in flight or waiting for earlier ones."""
        self.uncommitted = 0
        """Characters written since the last commit."""

    def is_done(self, index: int) -> bool:
        """Whether an earlier run wrote the record."""
        return index < self._previous.next_index or index in self._already_done

    def begin(self, indexes: list[int], end: int) -> None:
        """Starts these records. All others before `end` are done or belong to another shard."""
        self._open.extend(indexes)
        self.unfinished += len(indexes)
        self._end_index = max(self._end_index, end)

    def end(self, index: int, record: FinishedRecord) -> None:
        if not self._keeps_order:
            self._beyond.add(index)
            self._write(record)
            while self._open and self._open[0] in self._beyond:
                self._open.popleft()
            return
        self._finished[index] = record
        self._newly_finished.add(index)
        while self._open and self._open[0] in self._finished:
            self._write(self._finished.pop(self._open.popleft()))

    def _write(self, record: FinishedRecord) -> None:
        self._uncommitted.append(record)
        self.uncommitted += len(record.output) + len(record.error)
        self.unfinished -= 1

    @property
    def has_output(self) -> bool:
        """Whether a record has finished since the last commit."""
        return bool(self._uncommitted or self._newly_finished)

    def take(self) -> CommitBatch:
        """Returns the output since the last commit."""
        pieces, self._uncommitted, self.uncommitted = self._uncommitted, [], 0
        next_index = self._open[0] if self._open else self._end_index
        self._beyond = {index for index in self._beyond if index > next_index}
        new, self._newly_finished = self._newly_finished & self._finished.keys(), set()
        return CommitBatch(
            output="".join(piece.output for piece in pieces).encode(),
            errors="".join(piece.error for piece in pieces).encode(),
            answers={piece.key: piece.answer for piece in pieces if piece.key is not None and piece.answer is not None},
            next_index=next_index,
            beyond=sorted(self._beyond),
            answered=sum(not piece.error for piece in pieces),
            failed=sum(bool(piece.error) for piece in pieces),
            waiting={index: (self._finished[index].output, self._finished[index].error) for index in new},
        )


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
    """Error lines of a run to a pipe without an error file."""

    def append(self, data: bytes) -> None:
        sys.stderr.buffer.write(data)
        sys.stderr.buffer.flush()
