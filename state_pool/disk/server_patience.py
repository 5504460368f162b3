"""How long what the pool's threads were asked for waits for a server that is away."""

from __future__ import annotations

import time

SERVER_PATIENCE_S = 10.0
"""How long turns wait for a server that is away, from when it was first; then they are told at once."""
LOOK_AGAIN_S = 0.2
"""Between two looks for it."""


class ServerPatience:
    """Of one thread, for all that waits there."""

    def __init__(self) -> None:
        self._away_since: float | None = None

    @property
    def is_there(self) -> bool:
        """Whether the last attempt reached it."""
        return self._away_since is None

    def lasts(self, begun: float) -> bool:
        """Whether a server that was not reached is looked for once more.

        `begun`: monotonic time of the first attempt, which may have waited for a server that says nothing.
        """
        self._away_since = self._away_since or begun
        return time.monotonic() <= self._away_since + SERVER_PATIENCE_S

    def answered(self) -> None:
        """The server is there."""
        self._away_since = None
