"""News for readers on threads of their own: nothing is lost, few are woken at a time, those without any yet first."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from routes.response.wakeups import Box, Turns, _Reader

LONG_S = 30.0


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Reading:
    """A box and a thread that takes from it."""

    def __init__(self, turns: Turns, timeout_s: float = LONG_S, read_before: bool = False) -> None:
        self.box: Box[int] = Box()
        self.got: list[int] = []
        if read_before:
            turns.put(self.box, 0)
            assert turns.take(self.box, 0) == [0]
        self.thread = threading.Thread(target=lambda: self.got.extend(turns.take(self.box, timeout_s)))
        self.thread.start()
        wait_until(lambda: self.box.reader is _Reader.WAITS or not self.thread.is_alive())

    def result(self) -> list[int]:
        self.thread.join(LONG_S)
        assert not self.thread.is_alive()
        return self.got


def test_what_is_there_is_taken_at_once_and_together() -> None:
    turns, box = Turns(), Box[int]()
    turns.put(box, 1)
    turns.put(box, 2)
    assert turns.take(box, 0) == [1, 2]
    assert turns.take(box, 0) == []


def test_a_reader_that_waits_is_called() -> None:
    turns = Turns()
    readings = [Reading(turns) for _ in range(20)]
    for number, reading in enumerate(readings):
        turns.put(reading.box, number)
    assert [reading.result() for reading in readings] == [[number] for number in range(20)]


def test_those_without_news_yet_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(at_a_time=0)
    order: list[int] = []
    plain = Turns._empty

    def noted(box: Box[int]) -> list[int]:
        news = plain(box)
        order.extend(news)
        return news

    readings = [Reading(turns, read_before=number < 3) for number in range(5)]
    monkeypatch.setattr(Turns, "_empty", staticmethod(noted))
    for number, reading in enumerate(readings):
        turns.put(reading.box, number)
    time.sleep(0.01)
    assert not order, "nobody's turn yet"
    with turns._lock:
        turns._call_next()
    for reading in readings:
        reading.result()
    assert order == [4, 3, 0, 1, 2]


def test_who_has_tired_of_waiting_takes_its_news_and_no_turn() -> None:
    turns = Turns(at_a_time=0)
    tired = Reading(turns, timeout_s=0.05)
    turns.put(tired.box, 1)
    assert tired.result() == [1]
    patient = Reading(turns)
    turns.put(patient.box, 2)
    with turns._lock:
        turns._call_next()  # not lost to the one that is gone
    assert patient.result() == [2]
    assert turns._free == 1


class LateBell:
    """Rings when the reader has just stopped listening."""

    def __init__(self, turns: Turns, box: Box[int]) -> None:
        self.turns, self.box, self.rings = turns, box, 0

    def acquire(self, timeout: float = -1) -> bool:
        if timeout >= 0:
            self.turns.put(self.box, 7)
            return False
        self.rings -= 1
        return True

    def release(self) -> None:
        self.rings += 1


def test_a_turn_given_just_when_the_reader_tires_is_its_own() -> None:
    turns, box = Turns(at_a_time=1), Box[int]()
    bell = LateBell(turns, box)
    box.bell = bell  # type: ignore[assignment]
    assert turns.take(box, 1) == [7]
    assert bell.rings == 0 and turns._free == 1


def test_whatever_happens_when_nothing_is_lost_and_all_turns_come_back() -> None:
    turns = Turns(at_a_time=1)
    boxes: list[Box[int]] = [Box() for _ in range(8)]
    got = [0] * len(boxes)
    ended = threading.Event()

    def read(index: int) -> None:
        while not ended.is_set() or boxes[index].news:
            got[index] += len(turns.take(boxes[index], 0.0002 * index))

    threads = [threading.Thread(target=read, args=(index,)) for index in range(len(boxes))]
    for thread in threads:
        thread.start()
    for number in range(4000):
        turns.put(boxes[number % len(boxes)], number)
        if number % 16 == 0:
            time.sleep(0.0003)
    ended.set()
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()
    assert got == [500] * len(boxes)
    assert turns._free == 1
