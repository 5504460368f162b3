"""How long what the pool's threads were asked for waits for a server that is away."""

from __future__ import annotations

import time

RECONNECT_TIMEOUT_S = 10.0
"""How long turns wait for a server that is away, from when it was first; then they are told at once."""
RECONNECT_INTERVAL_S = 0.2
"""Between two looks for it."""


class ReconnectTimeout:
    """Of one thread, for all that waits there."""

    def __init__(self) -> None:
        self._lost_at: float | None = None

    @property
    def is_connected(self) -> bool:
        """Whether the last attempt reached it."""
        return self._lost_at is None

    def may_retry(self, started_at: float) -> bool:
        """Whether a server that was not reached is looked for once more.

        `started_at`: monotonic time of the first attempt, which may have waited for a server that says nothing.
        """
        self._lost_at = self._lost_at or started_at
        return time.monotonic() <= self._lost_at + RECONNECT_TIMEOUT_S

    def reset(self) -> None:
        """The server is there."""
        self._lost_at = None
