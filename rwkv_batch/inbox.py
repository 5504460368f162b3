"""Commands for the engine's thread, from any thread. Each is run or refused."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

MAX_GAP_S, MAX_BURST_S = 0.001, 0.02
"""Seconds in which a burst's next command must come, and that a burst may take."""


class Command(NamedTuple):
    action: Callable[[], None]
    is_arrival: bool = False
    """whether it only adds a job or confirms its turn, so that it may run within a step"""


class Inbox:
    """A queue of commands. One thread runs them, and closes the inbox before it runs the last ones."""

    def __init__(self, wake: threading.Event) -> None:
        """wake: set by `put`; the engine's thread waits for it"""
        self._wake = wake
        self._commands: deque[Command] = deque()
        self._put_lock = threading.Lock()
        """makes `put` and `close` exclusive, so that no command is queued after the last `run_all`"""
        self._is_closed = False

    def put(self, action: Callable[[], None], is_arrival: bool = False) -> bool:
        """Queue a command. Returns False if the inbox is closed. Any thread."""
        with self._put_lock:
            if self._is_closed:
                return False
            self._commands.append(Command(action, is_arrival))
        self._wake.set()
        return True

    def close(self) -> None:
        """Refuse new commands. The next `run_all` runs the queued ones."""
        with self._put_lock:
            self._is_closed = True

    def run_all(self) -> bool:
        """Run the commands that are queued now. Returns whether there were any."""
        count = len(self._commands)  # not those that are put meanwhile: they might never end
        for _ in range(count):
            self._commands.popleft().action()
        return count > 0

    def run_burst(self, is_burst: Callable[[], bool]) -> bool:
        """Run the queued commands. While `is_burst`, also run those that follow closely.

        Returns whether there were any. Waits without Python's lock, which the threads that put commands need.
        """
        had_commands, until = self.run_all(), time.monotonic() + MAX_BURST_S
        while had_commands and is_burst() and time.monotonic() < until:
            self._wake.clear()
            if not self.run_all() and not self._wake.wait(MAX_GAP_S):
                break
        return had_commands

    def run_arrivals(self) -> bool:
        """Run queued arrivals. Returns whether there were any. Stops at the first other command."""
        had_arrivals = False
        while self._commands and self._commands[0].is_arrival:
            self._commands.popleft().action()
            had_arrivals = True
        return had_arrivals
