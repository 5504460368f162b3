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

_STEP_S = 60.0
"""A clock that is ahead of the time that has passed by so much, or by the TTL if that is less, was set."""
_DAY_S = 86400.0


class Gap(NamedTuple):
    """Time by the clock (Unix time, s) that does not count."""

    begin: float
    end: float


class Uses(NamedTuple):
    """When the sessions of a database were used last."""

    last: float | None = None
    """Of all of them (Unix time, s); None: there is none."""
    gaps: tuple[Gap, ...] = ()
    """Times longer than the TTL between two of them, the earliest first."""


class Expiry:
    """The TTL, counted in time that sessions could be used in. Engine thread."""

    def __init__(self, ttl: float, uses: Uses) -> None:
        """`ttl` in seconds, 0: nothing expires. `uses`: of the sessions that were found at the start."""
        self._ttl = ttl
        self._wall, self._running = time.time(), time.monotonic()
        self._gaps = list(uses.gaps)
        """In the order in which they were found: each ends behind those before it, unless the clock was set back."""
        if ttl > 0 and uses.last is not None and self._wall - uses.last > ttl:
            self._gaps.append(Gap(uses.last, self._wall))
            logger.warning(
                "no session was used in the %.1f days before this start, by this machine's clock: more than "
                "--session-ttl, so that all would expire at once. That time is not counted; if the clock is ahead, "
                "set it right",
                (self._wall - uses.last) / _DAY_S,
            )

    def before(self) -> float | None:
        """Sessions used last before this (Unix time, s) have expired; None: none has. To be asked all the time."""
        if self._ttl <= 0:
            return None
        now = self._look()
        left, before = self._ttl, now
        for gap in reversed(self._gaps):
            if gap.begin >= before:
                continue
            counted = max(0.0, before - gap.end)
            if counted >= left:
                break
            left, before = left - counted, gap.begin
        return before - left

    def _look(self) -> float:
        """The clock; notes by how much it was set ahead since the last look."""
        wall, running = time.time(), time.monotonic()
        ahead = (wall - self._wall) - (running - self._running)
        if ahead > min(_STEP_S, self._ttl):
            self._gaps.append(Gap(wall - ahead, wall))
            logger.error(
                "this machine's clock was set ahead by %.0f s, or the machine stood still for so long: sessions do not "
                "age by that; if the clock is wrong, set it right before the next start",
                ahead,
            )
        self._wall, self._running = wall, running
        return wall
