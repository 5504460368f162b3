"""A PostgreSQL connection with a timeout for servers that are connected but silent."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg

if TYPE_CHECKING:
    from psycopg.abc import PQGen

READ_TIMEOUT_S = 8.0
"""The kernel drops unacknowledged data after the same time. Lock waits get a quarter of it."""
_CHECK_INTERVAL_S = 0.1

_Found = TypeVar("_Found")


class TimeoutConnection(psycopg.Connection[Any]):
    """Closes itself with an OperationalError after `read_timeout_s` seconds of waiting without data."""

    read_timeout_s = float("inf")
    read_timed_out = False

    def wait(self, gen: PQGen[_Found], interval: float = _CHECK_INTERVAL_S, timeout: float | None = None) -> _Found:
        """See psycopg.Connection. All statements wait here."""
        return super().wait(self._with_timeout(gen), interval, timeout)

    def _with_timeout(self, steps: PQGen[_Found]) -> PQGen[_Found]:
        """Run the steps, passing each the socket's readiness, with the timeout."""
        last_data_at = time.monotonic()
        try:
            interest = next(steps)
            while True:
                ready = yield interest
                now = time.monotonic()
                if ready:
                    last_data_at = now
                elif now - last_data_at >= self.read_timeout_s:
                    self.read_timed_out = True
                    self.pgconn.finish()
                    raise psycopg.OperationalError(
                        f"it is connected but has not answered for {self.read_timeout_s:g} s"
                    )
                interest = steps.send(ready)
        except StopIteration as stop:
            found: _Found = stop.value
            return found
