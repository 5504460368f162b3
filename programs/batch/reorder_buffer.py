"""Reorders finished records: they start in order, finish in any order, and are written as --order says."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from programs.batch.sidecar import Progress


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


class ReorderBuffer:
    """Used on the event loop. `is_done` may be called from any thread."""

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
        """Finishes a record."""
        if not self._keeps_order:
            self._beyond.add(index)
            self._write(record)
            while self._open and self._open[0] in self._beyond:
                self._open.popleft()
            return
        self._finished[index] = record
        while self._open and self._open[0] in self._finished:
            self._write(self._finished.pop(self._open.popleft()))

    def _write(self, record: FinishedRecord) -> None:
        self._uncommitted.append(record)
        self.uncommitted += len(record.output) + len(record.error)
        self.unfinished -= 1

    @property
    def has_output(self) -> bool:
        """Whether there is output since the last commit."""
        return bool(self._uncommitted)

    def take(self) -> CommitBatch:
        """Returns the output since the last commit."""
        pieces, self._uncommitted, self.uncommitted = self._uncommitted, [], 0
        next_index = self._open[0] if self._open else self._end_index
        self._beyond = {index for index in self._beyond if index > next_index}
        return CommitBatch(
            output="".join(piece.output for piece in pieces).encode(),
            errors="".join(piece.error for piece in pieces).encode(),
            answers={piece.key: piece.answer for piece in pieces if piece.key is not None and piece.answer is not None},
            next_index=next_index,
            beyond=sorted(self._beyond),
            answered=sum(not piece.error for piece in pieces),
            failed=sum(bool(piece.error) for piece in pieces),
        )
