"""How long the pool's threads wait for a database server that is down."""

from __future__ import annotations

import time

RECONNECT_TIMEOUT_S = 10.0
"""How long turns wait for a server from its first failure. After that they fail at once."""
RECONNECT_INTERVAL_S = 0.2


class ReconnectTimeout:
    """Retry state of one thread, shared by all its pending jobs."""

    def __init__(self) -> None:
        self._lost_at: float | None = None

    @property
    def is_connected(self) -> bool:
        """Whether the last attempt reached the server."""
        return self._lost_at is None

    def may_retry(self, started_at: float) -> bool:
        """Whether to try the server once more.

        `started_at`: monotonic time of the first attempt. That attempt may have waited for a server that does not
        answer.
        """
        self._lost_at = self._lost_at or started_at
        return time.monotonic() <= self._lost_at + RECONNECT_TIMEOUT_S

    def reset(self) -> None:
        """The server has answered."""
        self._lost_at = None
