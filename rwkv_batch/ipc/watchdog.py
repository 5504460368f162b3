"""Detects a hanging engine loop. A step that hangs in the device's driver raises nothing."""

from __future__ import annotations

from collections.abc import Callable


class Watchdog:
    """Detects an engine that hangs. Runs on the main thread of the engine's process."""

    def __init__(self, timeout_s: float, clock: Callable[[], float], interval_s: float) -> None:
        """
        timeout_s: seconds without an iteration that count as hanging; 0: never
        clock: as time.monotonic
        interval_s: seconds between two checks
        """
        self._timeout_s = timeout_s
        self._clock = clock
        self._interval_s = interval_s
        self._loop_count: int | None = None
        self._last_check = clock()
        self._silent_s = 0.0

    def hangs(self, loop_count: int | None) -> bool:
        """Return whether the loop has hung for too long. Call it at every check.

        Time in which no check could run does not count: if the machine slept, the engine did not run either.

        loop_count: see `ManagedEngine.loop_count`
        """
        now = self._clock()
        elapsed, self._last_check = min(now - self._last_check, 2 * self._interval_s), now
        is_silent = loop_count is not None and loop_count == self._loop_count
        self._silent_s = self._silent_s + elapsed if is_silent else 0.0
        self._loop_count = loop_count
        return 0 < self._timeout_s <= self._silent_s
