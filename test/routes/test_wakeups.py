"""Items for readers on threads of their own: nothing is lost, few are woken at a time, those without any yet first."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from routes.wakeups import Box, WakeUps, _Reader

LONG_S = 60.0


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Reading:
    """A box and a thread that takes from it."""

    def __init__(self, wake_ups: WakeUps, read_before: bool = False, bell: Any = None) -> None:
        self.box: Box[int] = Box()
        self.box.bell = bell or self.box.bell
        self.got: list[int] = []
        if read_before:
            wake_ups.put(self.box, 0)
            assert wake_ups.take(self.box, 0) == [0]
        self.thread = threading.Thread(target=lambda: self.got.extend(wake_ups.take(self.box, LONG_S)))
        self.thread.start()
        wait_until(lambda: self.box.reader is _Reader.WAITS or not self.thread.is_alive())

    def result(self) -> list[int]:
        self.thread.join(LONG_S)
        assert not self.thread.is_alive()
        return self.got


def test_what_is_there_is_taken_at_once_and_together() -> None:
    wake_ups, box = WakeUps(), Box[int]()
    wake_ups.put(box, 1)
    wake_ups.put(box, 2)
    assert wake_ups.take(box, 0) == [1, 2]
    assert wake_ups.take(box, 0) == []


def test_a_reader_that_waits_is_called() -> None:
    wake_ups = WakeUps()
    readings = [Reading(wake_ups) for _ in range(20)]
    for number, reading in enumerate(readings):
        wake_ups.put(reading.box, number)
    assert [reading.result() for reading in readings] == [[number] for number in range(20)]


def test_those_without_news_yet_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    wake_ups = WakeUps(at_a_time=0)
    order: list[int] = []
    plain = WakeUps._empty

    def noted(box: Box[int]) -> list[int]:
        items = plain(box)
        order.extend(items)
        return items

    readings = [Reading(wake_ups, read_before=number < 3) for number in range(5)]
    monkeypatch.setattr(WakeUps, "_empty", staticmethod(noted))
    for number, reading in enumerate(readings):
        wake_ups.put(reading.box, number)
    time.sleep(0.01)
    assert not order, "nobody's turn yet"
    with wake_ups._lock:
        wake_ups._call_next()
    for reading in readings:
        reading.result()
    assert order == [4, 3, 0, 1, 2]


class MuffledBell:
    """Nobody hears it; its reader tires when it is told to."""

    def __init__(self) -> None:
        self.tires = threading.Event()

    def acquire(self, timeout: float = -1) -> bool:
        assert self.tires.wait(LONG_S)
        return False

    def release(self) -> None:
        raise AssertionError("its turn never comes")


def test_who_has_tired_of_waiting_takes_its_news_and_no_turn() -> None:
    wake_ups = WakeUps(at_a_time=0)
    bell = MuffledBell()
    tired = Reading(wake_ups, bell=bell)
    wake_ups.put(tired.box, 1)
    bell.tires.set()
    assert tired.result() == [1]
    patient = Reading(wake_ups)
    wake_ups.put(patient.box, 2)
    with wake_ups._lock:
        wake_ups._call_next()  # not lost to the one that is gone
    assert patient.result() == [2]
    assert wake_ups._free == 1


class LateBell:
    """Rings when the reader has just stopped listening."""

    def __init__(self, wake_ups: WakeUps, box: Box[int]) -> None:
        self.wake_ups, self.box, self.rings = wake_ups, box, 0

    def acquire(self, timeout: float = -1) -> bool:
        if timeout >= 0:
            self.wake_ups.put(self.box, 7)
            return False
        self.rings -= 1
        return True

    def release(self) -> None:
        self.rings += 1


def test_a_turn_given_just_when_the_reader_tires_is_its_own() -> None:
    wake_ups, box = WakeUps(at_a_time=1), Box[int]()
    bell = LateBell(wake_ups, box)
    box.bell = bell  # type: ignore[assignment]
    assert wake_ups.take(box, 1) == [7]
    assert bell.rings == 0 and wake_ups._free == 1


def test_whatever_happens_when_nothing_is_lost_and_all_turns_come_back() -> None:
    wake_ups = WakeUps(at_a_time=1)
    boxes: list[Box[int]] = [Box() for _ in range(8)]
    got = [0] * len(boxes)
    ended = threading.Event()

    def read(index: int) -> None:
        while not ended.is_set() or boxes[index].items:
            got[index] += len(wake_ups.take(boxes[index], 0.0002 * index))

    threads = [threading.Thread(target=read, args=(index,)) for index in range(len(boxes))]
    for thread in threads:
        thread.start()
    for number in range(4000):
        wake_ups.put(boxes[number % len(boxes)], number)
        if number % 16 == 0:
            time.sleep(0.0003)
    ended.set()
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()
    assert got == [500] * len(boxes)
    assert wake_ups._free == 1
