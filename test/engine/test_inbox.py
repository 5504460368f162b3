"""Commands for the engine's thread: each accepted command runs, the others are refused."""

from __future__ import annotations

import threading
from collections import deque

from rwkv_batch.inbox import Command, Inbox
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
    inbox, done, taken = Inbox(lambda: None), list[int](), list[bool]()
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
    woken, done = list[int](), list[int]()
    inbox = Inbox(lambda: woken.append(1))
    assert inbox.put(lambda: done.append(1))
    inbox.close()
    assert not inbox.put(lambda: done.append(2))
    inbox.run_all()
    assert (woken, done) == ([1], [1])


def test_within_a_step_arrivals_run_up_to_another_command() -> None:
    inbox, done = Inbox(lambda: None), list[str]()
    for name in ("a", "b", "status", "c"):
        inbox.put(lambda name=name: done.append(name), is_arrival=name != "status")  # type: ignore[misc]
    assert inbox.run_arrivals() and done == ["a", "b"]
    assert not inbox.run_arrivals() and done == ["a", "b"]
    inbox.run_all()
    assert done == ["a", "b", "status", "c"]
