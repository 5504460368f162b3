"""Items for the threads that write streams: a few threads at a time are woken, first those that had none yet.

Python's lock goes to threads in the order in which they ask for it. Were all woken at once for which a step brings
items, whatever comes next (a new request, another's first token) would wait until the last of them has written.
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")

_AT_A_TIME = 2
"""One takes its items while the next one wakes."""


class _Reader(enum.Enum):
    """What the thread does that reads a box."""

    ELSEWHERE = enum.auto()
    WAITS = enum.auto()
    QUEUES = enum.auto()
    """waits, and its items are there"""
    CALLED = enum.auto()
    """is woken to take them"""


class Box(Generic[Item]):
    """Items for one reader. Its fields belong to `WakeUps`."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.reader = _Reader.ELSEWHERE
        self.has_read = False
        self.bell = threading.Lock()
        self.bell.acquire()

    @property
    def is_awaited(self) -> bool:
        """Whether its reader waits for items or for its turn to take them. Any thread."""
        return self.reader is not _Reader.ELSEWHERE


class WakeUps:
    """Puts items into boxes and calls their readers by turns. Any thread."""

    def __init__(self, at_a_time: int = _AT_A_TIME) -> None:
        self._lock = threading.Lock()
        self._free = at_a_time
        self._queue: deque[Box] = deque()

    def put(self, box: Box[Item], item: Item) -> None:
        """Returns at once."""
        with self._lock:
            box.items.append(item)
            if box.reader is not _Reader.WAITS:
                return
            if self._free:
                self._free -= 1
                self._call(box)
                return
            box.reader = _Reader.QUEUES
            if box.has_read:
                self._queue.append(box)
            else:
                self._queue.appendleft(box)

    def take(self, box: Box[Item], timeout_s: float) -> list[Item]:
        """Everything that waits; waits for at most `timeout_s` seconds, then []. Only the box's reader."""
        with self._lock:
            if box.items:
                return self._empty(box)
            box.reader = _Reader.WAITS
        heard = box.bell.acquire(timeout=timeout_s)
        with self._lock:
            if box.reader is _Reader.CALLED:
                if not heard:
                    box.bell.acquire()  # it rang a moment after
                self._call_next()
            box.reader = _Reader.ELSEWHERE
            return self._empty(box)

    @staticmethod
    def _empty(box: Box[Item]) -> list[Item]:
        items, box.items = box.items, []
        box.has_read = box.has_read or bool(items)
        return items

    @staticmethod
    def _call(box: Box) -> None:
        box.reader = _Reader.CALLED
        box.bell.release()

    def _call_next(self) -> None:
        while self._queue:
            box = self._queue.popleft()
            if box.reader is _Reader.QUEUES:  # else its reader has tired of waiting and has taken them
                self._call(box)
                return
        self._free += 1
