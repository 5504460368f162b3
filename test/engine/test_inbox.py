"""Commands for the engine's thread: each accepted command runs, the others are refused."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from rwkv_batch.inbox import MAX_BURST_S, Command, Inbox
from test.harness import WAIT_S


class Slow(deque[Command]):
    """A deque whose append takes as long as the test decides."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def append(self, command: Command) -> None:
        self.begun.set()
        assert self.goes_on.wait(WAIT_S)
        super().append(command)


def test_a_command_queued_during_close_is_run() -> None:
    """No check follows the last one. So the command's caller would wait for ever."""
    inbox, done, taken = Inbox(threading.Event()), list[int](), list[bool]()
    inbox._commands = slow = Slow()

    def end() -> None:
        inbox.close()
        inbox.run_all()

    putting = threading.Thread(target=lambda: taken.append(inbox.put(lambda: done.append(1))))
    ending = threading.Thread(target=end)
    putting.start()
    assert slow.begun.wait(WAIT_S)
    ending.start()
    ending.join(0.1)  # without the lock, it ends here
    slow.goes_on.set()
    for thread in (putting, ending):
        thread.join(WAIT_S)
    assert (taken, done) == ([True], [1])


def test_a_closed_inbox_refuses_commands() -> None:
    wake, done = threading.Event(), list[int]()
    inbox = Inbox(wake)
    assert inbox.put(lambda: done.append(1))
    inbox.close()
    assert not inbox.put(lambda: done.append(2))
    inbox.run_all()
    assert wake.is_set() and done == [1]


def test_within_a_step_arrivals_run_up_to_another_command() -> None:
    inbox, done = Inbox(threading.Event()), list[str]()
    for name in ("a", "b", "status", "c"):
        inbox.put(lambda name=name: done.append(name), is_arrival=name != "status")  # type: ignore[misc]
    assert inbox.run_arrivals() and done == ["a", "b"]
    assert not inbox.run_arrivals() and done == ["a", "b"]
    inbox.run_all()
    assert done == ["a", "b", "status", "c"]


class Arriving(threading.Event):
    """An event at which one more command arrives in each wait, up to `count`. No time passes."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.left, self.waits = count, 0
        self.arrive: Callable[[], object] = lambda: None

    def wait(self, timeout: float | None = None) -> bool:
        self.waits += 1
        if self.left:
            self.left -= 1
            self.arrive()
        return self.is_set()


@pytest.mark.parametrize(("first", "count", "done", "waits"), [(1, 5, 1, 0), (2, 5, 7, 6), (2, 40, 16, 14)])
def test_a_burst_is_run_to_its_end(first: int, count: int, done: int, waits: int) -> None:
    """A lone command waits for nothing. A full step waits for nothing more."""
    wake, ran = Arriving(count), list[int]()
    inbox = Inbox(wake)
    wake.arrive = lambda: inbox.put(lambda: ran.append(1))
    for _ in range(first):
        wake.arrive()
    assert inbox.run_burst(lambda: 1 < len(ran) < 16)
    assert (len(ran), wake.waits) == (done, waits)
    inbox.run_all()
    assert not inbox.run_burst(lambda: True), "nothing came"


def test_an_endless_burst_does_not_hold_up_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, wake = itertools.count(), Arriving(10**9)
    monkeypatch.setattr("rwkv_batch.inbox.time", SimpleNamespace(monotonic=lambda: MAX_BURST_S * next(clock) / 10))
    inbox = Inbox(wake)
    wake.arrive = lambda: inbox.put(lambda: None)
    wake.arrive()
    assert inbox.run_burst(lambda: True) and wake.waits < 10
