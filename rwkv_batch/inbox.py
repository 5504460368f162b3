"""Commands for the engine's thread, from any thread: each is taken and done, or refused."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple


class Command(NamedTuple):
    """What the engine's thread is to do."""

    action: Callable[[], None]
    is_arrival: bool = False
    """whether it only adds a job, so that it may be done within a step"""


class Inbox:
    """In the order in which they come. One thread does them; it closes the inbox before it does the last ones."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` has the engine's thread look."""
        self._wake = wake
        self._commands: deque[Command] = deque()
        self._put_lock = threading.Lock()
        """held from when a command may come until it is there, so that none comes behind the last look"""
        self._is_closed = False

    def put(self, action: Callable[[], None], is_arrival: bool = False) -> bool:
        """Any thread. Have the engine's thread call `action`; False: it never will."""
        with self._put_lock:
            if self._is_closed:
                return False
            self._commands.append(Command(action, is_arrival))
        self._wake()
        return True

    def close(self) -> None:
        """Take no more; what was taken is done by the next `run_all`."""
        with self._put_lock:
            self._is_closed = True

    def run_all(self) -> None:
        """Do what is there."""
        while self._commands:
            self._commands.popleft().action()

    def run_arrivals(self) -> bool:
        """Do what only adds jobs, up to a command that may not be done within a step; whether there was any."""
        taken = False
        while self._commands and self._commands[0].is_arrival:
            self._commands.popleft().action()
            taken = True
        return taken
