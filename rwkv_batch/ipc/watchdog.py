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
        self._loop_count: int | None = None
        self._last_check = clock()
        self._silent_s = 0.0

    def hangs(self, loop_count: int | None) -> bool:
        """Whether the loop has not come round for too long. Call it at every look.

        `loop_count`: see `ManagedEngine.loop_count`. Time in which nobody could look (the machine slept, the process was
        stopped) does not count: then the engine could not work either.
        """
        now = self._clock()
        elapsed, self._last_check = min(now - self._last_check, 2 * self._interval_s), now
        is_silent = loop_count is not None and loop_count == self._loop_count
        self._silent_s = self._silent_s + elapsed if is_silent else 0.0
        self._loop_count = loop_count
        return 0 < self._timeout_s <= self._silent_s
