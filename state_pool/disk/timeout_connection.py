"""A connection to PostgreSQL that does not wait without end for a server that is connected and says nothing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg

if TYPE_CHECKING:
    from psycopg.abc import PQGen

READ_TIMEOUT_S = 8.0
"""The kernel gives up what nobody acknowledges after as long; locks are waited for by a quarter of it."""
_CHECK_INTERVAL_S = 0.1

_Found = TypeVar("_Found")


class TimeoutConnection(psycopg.Connection[Any]):
    """Ends itself, with an OperationalError, where nothing comes for `read_timeout_s` seconds while it waits."""

    read_timeout_s = float("inf")
    read_timed_out = False

    def wait(self, gen: PQGen[_Found], interval: float = _CHECK_INTERVAL_S, timeout: float | None = None) -> _Found:
        """See psycopg.Connection; all its statements wait here."""
        return super().wait(self._with_timeout(gen), interval, timeout)

    def _with_timeout(self, steps: PQGen[_Found]) -> PQGen[_Found]:
        """The same steps, each told what the socket is ready for, if anything."""
        since = time.monotonic()
        try:
            wanted = next(steps)
            while True:
                ready = yield wanted
                now = time.monotonic()
                if ready:
                    since = now
                elif now - since >= self.read_timeout_s:
                    self.read_timed_out = True
                    self.pgconn.finish()
                    raise psycopg.OperationalError(
                        f"it is connected and has said nothing for {self.read_timeout_s:g} s"
                    )
                wanted = steps.send(ready)
        except StopIteration as end:
            found: _Found = end.value
            return found
