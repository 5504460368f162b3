"""Passes items to the threads that write streams.

Wakes only a few of them at a time. Python's interpreter lock serves threads in the order of their requests. If a step
woke all writers at once, everything else (a new request, another stream's first token) would wait until the last one
has written. Streams without any item so far come first.
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
    IDLE = enum.auto()
    WAITING = enum.auto()
    QUEUED = enum.auto()
    """Waits, and has items."""
    WOKEN = enum.auto()
    """Woken, and about to take its items."""


class Mailbox(Generic[Item]):
    """Items for one reader. Only `ReaderWakeups` uses its fields."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.reader = _ReaderState.IDLE
        self.has_read = False
        self.wake_lock = threading.Lock()
        self.wake_lock.acquire()

    @property
    def has_waiting_reader(self) -> bool:
        """Whether the reader waits for items or for its wake-up. Thread-safe."""
        return self.reader is not _ReaderState.IDLE


class ReaderWakeups:
    """Puts items into mailboxes and wakes their readers in order. Thread-safe."""

    def __init__(self, max_woken: int = _MAX_WOKEN) -> None:
        self._lock = threading.Lock()
        self._free = max_woken
        self._queue: deque[Mailbox] = deque()

    def put(self, mailbox: Mailbox[Item], item: Item) -> None:
        """Add an item without blocking."""
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
        """Take all items; wait at most `timeout_s` seconds, then return []. Only for the mailbox's reader."""
        with self._lock:
            if mailbox.items:
                return self._take_items(mailbox)
            mailbox.reader = _ReaderState.WAITING
        woken = mailbox.wake_lock.acquire(timeout=timeout_s)
        with self._lock:
            if mailbox.reader is _ReaderState.WOKEN:
                if not woken:
                    mailbox.wake_lock.acquire()  # it was released just after the timeout
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
            if mailbox.reader is _ReaderState.QUEUED:  # else its reader timed out and has taken the items
                self._wake(mailbox)
                return
        self._free += 1
