"""Since when sessions must be unused to have expired. What a clock says that may be wrong deletes nothing.

A session's age is the time in which it could have been used. Two kinds of time are none of it: a clock that is set
ahead while the service runs, and a time longer than the TTL in which nobody used any session. While the service runs
such a time leaves no session behind, so that it is found only at a start: the service was off, or its clock is wrong,
and which of the two cannot be told.
"""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

logger = logging.getLogger(__name__)

_MIN_CLOCK_JUMP_S = 60.0
"""A clock that is ahead of the time that has passed by so much, or by the TTL if that is less, was set."""
_DAY_S = 86400.0


class Gap(NamedTuple):
    """Time by the clock (Unix time, s) that does not count."""

    begin: float
    end: float


class UsageTimes(NamedTuple):
    """When the sessions of a database were used last."""

    last: float | None = None
    """Of all of them (Unix time, s); None: there is none."""
    gaps: tuple[Gap, ...] = ()
    """Times longer than the TTL between two of them, the earliest first."""


class Expiry:
    """The TTL, counted in time that sessions could be used in. Engine thread."""

    def __init__(self, ttl: float, usage_times: UsageTimes) -> None:
        """`ttl` in seconds, 0: nothing expires. `usage_times`: of the sessions that were found at the start."""
        self._ttl = ttl
        self._unix_s, self._monotonic_s = time.time(), time.monotonic()
        self._gaps = list(usage_times.gaps)
        """In the order in which they were found: each ends behind those before it, unless the clock was set back."""
        if ttl > 0 and usage_times.last is not None and self._unix_s - usage_times.last > ttl:
            self._gaps.append(Gap(usage_times.last, self._unix_s))
            logger.warning(
                "no session was used in the %.1f days before this start, by this machine's clock: more than "
                "--session-ttl, so that all would expire at once. That time is not counted; if the clock is ahead, "
                "set it right",
                (self._unix_s - usage_times.last) / _DAY_S,
            )

    def cutoff(self) -> float | None:
        """Sessions used last before this (Unix time, s) have expired; None: none has. To be asked all the time."""
        if self._ttl <= 0:
            return None
        now = self._read_clock()
        left, cutoff = self._ttl, now
        for gap in reversed(self._gaps):
            if gap.begin >= cutoff:
                continue
            counted = max(0.0, cutoff - gap.end)
            if counted >= left:
                break
            left, cutoff = left - counted, gap.begin
        return cutoff - left

    def _read_clock(self) -> float:
        """The clock; notes by how much it was set ahead since the last look."""
        unix_s, monotonic_s = time.time(), time.monotonic()
        ahead = (unix_s - self._unix_s) - (monotonic_s - self._monotonic_s)
        if ahead > min(_MIN_CLOCK_JUMP_S, self._ttl):
            self._gaps.append(Gap(unix_s - ahead, unix_s))
            logger.error(
                "this machine's clock was set ahead by %.0f s, or the machine stood still for so long: sessions do not "
                "age by that; if the clock is wrong, set it right before the next start",
                ahead,
            )
        self._unix_s, self._monotonic_s = unix_s, monotonic_s
        return unix_s
