"""What is done and what is written: records come in order, end in any, and are written as --order says."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from bulk.sidecar import Progress


@dataclass(slots=True)
class Ended:
    """A record's share of both files."""

    output: str
    error: str = ""
    key: bytes | None = None
    answer: str | None = None
    """For equal lines, under that key."""


@dataclass(slots=True)
class Batch:
    """What is to be made durable together."""

    output: bytes
    errors: bytes
    answers: dict[bytes, str]
    next_index: int
    beyond: list[int]
    answered: int
    failed: int


class Ledger:
    """Owned by the event loop; `is_done` any thread may ask."""

    def __init__(self, keeps_order: bool, before: Progress) -> None:
        self._keeps_order = keeps_order
        self._before = before
        self._done_before = frozenset(before.beyond)
        self._open: deque[int] = deque()
        """Records that were begun, in order; the first of them has not been written."""
        self._waiting: dict[int, Ended] = {}
        """Records that ended and wait for those before them."""
        self._beyond = set(before.beyond)
        """Records behind the first open one that are written."""
        self._pieces: list[Ended] = []
        self._end = before.next_index
        self.unwritten = 0
        """Records under way, or waiting for those before them."""
        self.unkept = 0
        """Characters written since the last batch."""

    def is_done(self, index: int) -> bool:
        """Whether an earlier run has written the record."""
        return index < self._before.next_index or index in self._done_before

    def begin(self, indexes: list[int], end: int) -> None:
        """These records are under way; all others before `end` are done or another's."""
        self._open.extend(indexes)
        self.unwritten += len(indexes)
        self._end = max(self._end, end)

    def end(self, index: int, ended: Ended) -> None:
        """A record has ended."""
        if not self._keeps_order:
            self._beyond.add(index)
            self._write(ended)
            while self._open and self._open[0] in self._beyond:
                self._open.popleft()
            return
        self._waiting[index] = ended
        while self._open and self._open[0] in self._waiting:
            self._write(self._waiting.pop(self._open.popleft()))

    def _write(self, ended: Ended) -> None:
        self._pieces.append(ended)
        self.unkept += len(ended.output) + len(ended.error)
        self.unwritten -= 1

    @property
    def has_news(self) -> bool:
        """Whether anything was written since the last batch."""
        return bool(self._pieces)

    def take(self) -> Batch:
        """What was written since the last batch."""
        pieces, self._pieces, self.unkept = self._pieces, [], 0
        next_index = self._open[0] if self._open else self._end
        self._beyond = {index for index in self._beyond if index > next_index}
        return Batch(
            output="".join(piece.output for piece in pieces).encode(),
            errors="".join(piece.error for piece in pieces).encode(),
            answers={piece.key: piece.answer for piece in pieces if piece.key is not None and piece.answer is not None},
            next_index=next_index,
            beyond=sorted(self._beyond),
            answered=sum(not piece.error for piece in pieces),
            failed=sum(bool(piece.error) for piece in pieces),
        )
