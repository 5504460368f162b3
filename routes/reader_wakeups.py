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

_MAX_WOKEN = 2
"""One takes its items while the next one wakes."""


class _ReaderState(enum.Enum):
    """What the thread does that reads a box."""

    IDLE = enum.auto()
    WAITING = enum.auto()
    QUEUED = enum.auto()
    """waits, and its items are there"""
    WOKEN = enum.auto()
    """is woken to take them"""


class Mailbox(Generic[Item]):
    """Items for one reader. Its fields belong to `ReaderWakeups`."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.reader = _ReaderState.IDLE
        self.has_read = False
        self.wake_lock = threading.Lock()
        self.wake_lock.acquire()

    @property
    def has_waiting_reader(self) -> bool:
        """Whether its reader waits for items or for its turn to take them. Any thread."""
        return self.reader is not _ReaderState.IDLE


class ReaderWakeups:
    """Puts items into boxes and calls their readers by turns. Any thread."""

    def __init__(self, max_woken: int = _MAX_WOKEN) -> None:
        self._lock = threading.Lock()
        self._free = max_woken
        self._queue: deque[Mailbox] = deque()

    def put(self, mailbox: Mailbox[Item], item: Item) -> None:
        """Returns at once."""
        with self._lock:
            mailbox.items.append(item)
            if mailbox.reader is not _ReaderState.WAITING:
                return
            if self._free:
                self._free -= 1
                self._wake(mailbox)
                return
            mailbox.reader = _ReaderState.QUEUED
            if mailbox.has_read:
                self._queue.append(mailbox)
            else:
                self._queue.appendleft(mailbox)

    def take(self, mailbox: Mailbox[Item], timeout_s: float) -> list[Item]:
        """Everything that waits; waits for at most `timeout_s` seconds, then []. Only the box's reader."""
        with self._lock:
            if mailbox.items:
                return self._take_items(mailbox)
            mailbox.reader = _ReaderState.WAITING
        woken = mailbox.wake_lock.acquire(timeout=timeout_s)
        with self._lock:
            if mailbox.reader is _ReaderState.WOKEN:
                if not woken:
                    mailbox.wake_lock.acquire()  # it rang a moment after
                self._wake_next()
            mailbox.reader = _ReaderState.IDLE
            return self._take_items(mailbox)

    @staticmethod
    def _take_items(mailbox: Mailbox[Item]) -> list[Item]:
        items, mailbox.items = mailbox.items, []
        mailbox.has_read = mailbox.has_read or bool(items)
        return items

    @staticmethod
    def _wake(mailbox: Mailbox) -> None:
        mailbox.reader = _ReaderState.WOKEN
        mailbox.wake_lock.release()

    def _wake_next(self) -> None:
        while self._queue:
            mailbox = self._queue.popleft()
            if mailbox.reader is _ReaderState.QUEUED:  # else its reader has tired of waiting and has taken them
                self._wake(mailbox)
                return
        self._free += 1
