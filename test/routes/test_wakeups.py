"""Mailboxes of reader threads: nothing is lost, few wake at a time, and new readers come first."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from routes.reader_wakeups import Mailbox, ReaderWakeups, _ReaderState

LONG_S = 60.0


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Reading:
    def __init__(self, wakeups: ReaderWakeups, read_before: bool = False, wake_lock: Any = None) -> None:
        self.mailbox: Mailbox[int] = Mailbox()
        self.mailbox.wake_lock = wake_lock or self.mailbox.wake_lock
        self.got: list[int] = []
        if read_before:
            wakeups.put(self.mailbox, 0)
            assert wakeups.take(self.mailbox, 0) == [0]
        self.thread = threading.Thread(target=lambda: self.got.extend(wakeups.take(self.mailbox, LONG_S)))
        self.thread.start()
        wait_until(lambda: self.mailbox.reader is _ReaderState.WAITING or not self.thread.is_alive())

    def result(self) -> list[int]:
        self.thread.join(LONG_S)
        assert not self.thread.is_alive()
        return self.got


def test_waiting_items_are_taken_together() -> None:
    wakeups, mailbox = ReaderWakeups(), Mailbox[int]()
    wakeups.put(mailbox, 1)
    wakeups.put(mailbox, 2)
    assert wakeups.take(mailbox, 0) == [1, 2]
    assert wakeups.take(mailbox, 0) == []


def test_a_waiting_reader_is_woken() -> None:
    wakeups = ReaderWakeups()
    readings = [Reading(wakeups) for _ in range(20)]
    for number, reading in enumerate(readings):
        wakeups.put(reading.mailbox, number)
    assert [reading.result() for reading in readings] == [[number] for number in range(20)]


def test_new_readers_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    wakeups = ReaderWakeups(max_woken=0)
    order: list[int] = []
    plain = ReaderWakeups._take_items

    def recording(mailbox: Mailbox[int]) -> list[int]:
        items = plain(mailbox)
        order.extend(items)
        return items

    readings = [Reading(wakeups, read_before=number < 3) for number in range(5)]
    monkeypatch.setattr(ReaderWakeups, "_take_items", staticmethod(recording))
    for number, reading in enumerate(readings):
        wakeups.put(reading.mailbox, number)
    time.sleep(0.01)
    assert not order, "nobody is woken yet"
    with wakeups._lock:
        wakeups._wake_next()
    for reading in readings:
        reading.result()
    assert order == [4, 3, 0, 1, 2]


class TimingOutLock:
    """A wake lock whose reader times out on command."""

    def __init__(self) -> None:
        self.times_out = threading.Event()

    def acquire(self, timeout: float = -1) -> bool:
        assert self.times_out.wait(LONG_S)
        return False

    def release(self) -> None:
        raise AssertionError("it is never woken")


def test_a_timed_out_reader_takes_its_items_without_a_wakeup() -> None:
    wakeups = ReaderWakeups(max_woken=0)
    wake_lock = TimingOutLock()
    timed_out = Reading(wakeups, wake_lock=wake_lock)
    wakeups.put(timed_out.mailbox, 1)
    wake_lock.times_out.set()
    assert timed_out.result() == [1]
    waiting = Reading(wakeups)
    wakeups.put(waiting.mailbox, 2)
    with wakeups._lock:
        wakeups._wake_next()  # not lost to the reader that timed out
    assert waiting.result() == [2]
    assert wakeups._free == 1


class LateLock:
    """A wake lock that is released just after the reader's timeout."""

    def __init__(self, wakeups: ReaderWakeups, mailbox: Mailbox[int]) -> None:
        self.wakeups, self.mailbox, self.releases = wakeups, mailbox, 0

    def acquire(self, timeout: float = -1) -> bool:
        if timeout >= 0:
            self.wakeups.put(self.mailbox, 7)
            return False
        self.releases -= 1
        return True

    def release(self) -> None:
        self.releases += 1


def test_a_wakeup_just_after_the_timeout_is_consumed() -> None:
    wakeups, mailbox = ReaderWakeups(max_woken=1), Mailbox[int]()
    wake_lock = LateLock(wakeups, mailbox)
    mailbox.wake_lock = wake_lock  # type: ignore[assignment]
    assert wakeups.take(mailbox, 1) == [7]
    assert wake_lock.releases == 0 and wakeups._free == 1


def test_no_item_and_no_wakeup_is_lost() -> None:
    wakeups = ReaderWakeups(max_woken=1)
    boxes: list[Mailbox[int]] = [Mailbox() for _ in range(8)]
    actual = [0] * len(boxes)
    ended = threading.Event()

    def read(index: int) -> None:
        while not ended.is_set() or boxes[index].items:
            actual[index] += len(wakeups.take(boxes[index], 0.0002 * index))

    threads = [threading.Thread(target=read, args=(index,)) for index in range(len(boxes))]
    for thread in threads:
        thread.start()
    for number in range(4000):
        wakeups.put(boxes[number % len(boxes)], number)
        if number % 16 == 0:
            time.sleep(0.0003)
    ended.set()
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()
    assert actual == [500] * len(boxes)
    assert wakeups._free == 1
