"""What is done and what is written: records come in order, end in any, and are written as --order says."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from programs.batch.sidecar import Progress


@dataclass(slots=True)
class FinishedRecord:
    """A record's share of both files."""

    output: str
    error: str = ""
    key: bytes | None = None
    answer: str | None = None
    """For equal lines, under that key."""


@dataclass(slots=True)
class CommitBatch:
    """What is to be made durable together."""

    output: bytes
    errors: bytes
    answers: dict[bytes, str]
    next_index: int
    beyond: list[int]
    answered: int
    failed: int


class ReorderBuffer:
    """Owned by the event loop; `is_done` any thread may ask."""

    def __init__(self, keeps_order: bool, previous: Progress) -> None:
        self._keeps_order = keeps_order
        self._previous = previous
        self._already_done = frozenset(previous.beyond)
        self._open: deque[int] = deque()
        """Records that were begun, in order; the first of them has not been written."""
        self._finished: dict[int, FinishedRecord] = {}
        """Records that ended and wait for those before them."""
        self._beyond = set(previous.beyond)
        """Records behind the first open one that are written."""
        self._uncommitted: list[FinishedRecord] = []
        self._end_index = previous.next_index
        self.unfinished = 0
        """Records under way, or waiting for those before them."""
        self.uncommitted = 0
        """Characters written since the last batch."""

    def is_done(self, index: int) -> bool:
        """Whether an earlier run has written the record."""
        return index < self._previous.next_index or index in self._already_done

    def begin(self, indexes: list[int], end: int) -> None:
        """These records are under way; all others before `end` are done or another's."""
        self._open.extend(indexes)
        self.unfinished += len(indexes)
        self._end_index = max(self._end_index, end)

    def end(self, index: int, record: FinishedRecord) -> None:
        """A record has ended."""
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
        """Whether anything was written since the last batch."""
        return bool(self._uncommitted)

    def take(self) -> CommitBatch:
        """What was written since the last batch."""
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
