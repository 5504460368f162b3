"""Notices an engine whose loop has stopped coming round: a step that hangs in the device's driver raises nothing."""

from __future__ import annotations

from collections.abc import Callable


class Watchdog:
    """Looks at the engine's count of rounds. The engine process's main thread."""

    def __init__(self, timeout_s: float, clock: Callable[[], float], interval_s: float) -> None:
        """Seconds without a round that are too many (0: never), and between two looks; `clock` as time.monotonic."""
        self._timeout_s = timeout_s
        self._clock = clock
        self._interval_s = interval_s
        self._rounds: int | None = None
        self._seen = clock()
        self._silent_s = 0.0

    def hangs(self, rounds: int | None) -> bool:
        """Whether the loop has not come round for too long. Call it at every look.

        `rounds`: see `ManagedEngine.rounds`. Time in which nobody could look (the machine slept, the process was
        stopped) does not count: then the engine could not work either.
        """
        now = self._clock()
        elapsed, self._seen = min(now - self._seen, 2 * self._interval_s), now
        is_silent = rounds is not None and rounds == self._rounds
        self._silent_s = self._silent_s + elapsed if is_silent else 0.0
        self._rounds = rounds
        return 0 < self._timeout_s <= self._silent_s
