"""Session expiry by unused time. A wrong clock deletes nothing.

A session's age counts only time in which it could be used. Forward jumps of the clock while the service runs are left
out. So are gaps longer than the TTL in which no session was used. Such a gap is found only at a start.
Either the service was off or the clock is wrong; the two look the same.

A clock that is set back shows some times twice. A later start cannot know which sessions were used in which of them.
So the database keeps these times, and they do not count at a start after them.
"""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

logger = logging.getLogger(__name__)

_MIN_CLOCK_JUMP_S = 60.0
"""A clock ahead of elapsed time by this much, or by a shorter TTL, counts as set."""
_MAX_GAPS = 1000
_DAY_S = 86400.0


class Gap(NamedTuple):
    """A span of time that does not count. Unix time, in s."""

    begin: float
    end: float


class UsageTimes(NamedTuple):
    """The last uses of the sessions in a database. Unix time, in s."""

    last: float | None = None
    """None: there is no session"""
    gaps: tuple[Gap, ...] = ()
    """Times longer than the TTL without any use, earliest first."""
    shown_twice: tuple[Gap, ...] = ()
    """Times that the clock showed twice, because it was set back."""


class Expiry:
    """Counts the TTL in usable time only. Engine thread only."""

    def __init__(self, ttl: float, usage_times: UsageTimes) -> None:
        """`ttl`: seconds, 0: nothing expires. `usage_times`: of the sessions found at the start."""
        self.ttl = ttl
        self._unix_s, self._monotonic_s = time.time(), time.monotonic()
        self._min_jump_s = min(_MIN_CLOCK_JUMP_S, ttl)
        shown_twice = [gap for gap in usage_times.shown_twice if gap.end <= self._unix_s + self._min_jump_s]
        self._gaps = sorted([*usage_times.gaps, *shown_twice], key=lambda gap: gap.end)
        """In the order found. Each ends after those before it, unless the clock was set back."""
        self.unstored: list[Gap] = []
        """Times that the clock showed twice, which the database does not know yet."""
        if usage_times.last is not None and usage_times.last - self._unix_s > self._min_jump_s:
            self.unstored.append(Gap(self._unix_s, usage_times.last))
        if ttl > 0 and usage_times.last is not None and self._unix_s - usage_times.last > ttl:
            self._gaps.append(Gap(usage_times.last, self._unix_s))
            logger.warning(
                "no session was used in the %.1f days before this start, by this machine's clock: more than "
                "--session-ttl, so all would expire at once. That time is not counted; if the clock is ahead, "
                "set it right",
                (self._unix_s - usage_times.last) / _DAY_S,
            )

    def cutoff(self) -> float | None:
        """Return the Unix time before which unused sessions have expired; None: none. Call it regularly."""
        if self.ttl <= 0:
            return None
        now = self._read_clock()
        left, cutoff = self.ttl, now
        for gap in reversed(self._gaps):
            if gap.begin >= cutoff:
                continue
            counted = max(0.0, cutoff - gap.end)
            if counted >= left:
                break
            left, cutoff = left - counted, gap.begin
        return cutoff - left

    def _read_clock(self) -> float:
        """Return the Unix time. Records jumps of the clock since the last call."""
        unix_s, monotonic_s = time.time(), time.monotonic()
        ahead = (unix_s - self._unix_s) - (monotonic_s - self._monotonic_s)
        if ahead > self._min_jump_s:
            self._gaps.append(Gap(unix_s - ahead, unix_s))
            if len(self._gaps) > _MAX_GAPS:  # join the oldest two: no session that is older than both ages faster
                first, second = self._gaps[:2]
                self._gaps[:2] = [Gap(second.begin - (first.end - first.begin), second.end)]
            logger.error(
                "this machine's clock was set ahead by %.0f s, or the machine was suspended: sessions do not "
                "age by that; if the clock is wrong, set it right before the next start",
                ahead,
            )
        elif ahead < -self._min_jump_s:
            self.unstored.append(Gap(unix_s, unix_s - ahead))
            logger.warning(
                "this machine's clock was set back by %.0f s: the times that it shows again do not age sessions", -ahead
            )
        self._unix_s, self._monotonic_s = unix_s, monotonic_s
        return unix_s
