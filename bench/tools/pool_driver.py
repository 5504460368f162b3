"""Drives a state pool in place of the engine. For programs and tests of the pool alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from state_pool.config import PoolConfig
from state_pool.layout import Arena
from state_pool.pool import StatePool
from state_pool.session_key import SessionPage
from state_pool.sessions import Lease, LeaseState


class PoolDriver:
    """Polls a pool until a condition holds. Sleeps until the pool wakes it."""

    timeout_s = 60.0
    poll_interval_s = 0.0005
    """Maximum sleep if the pool does not wake it: spinning would slow the pool's threads."""

    def __init__(self, arena: Arena, config: PoolConfig) -> None:
        self._woken = threading.Event()
        self.pool = StatePool(arena, config, self._woken.set)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self.timeout_s
        while not condition():
            assert time.monotonic() < deadline, "the pool did not get there"
            self.pool.poll()
            self._woken.wait(self.poll_interval_s)
            self._woken.clear()

    def ready(self, lease: Lease) -> Lease:
        """Wait for a lease. Raises the lease's error."""
        self.until(lambda: lease.state is not LeaseState.WAITING)
        if lease.error is not None:
            raise lease.error
        return lease

    def slot(self) -> int:
        """Wait for a free slot to write to."""
        found: list[int] = []

        def take() -> bool:
            slot = self.pool.tiers.allocate()
            if slot is not None:
                found.append(slot)
            return bool(found)

        self.until(take)
        return found[0]

    def list_sessions(self, limit: int = 100, offset: int = 0, owner: str = "") -> SessionPage:
        """Wait for a page of the session list. Raises its error."""
        pages: list[SessionPage | Exception] = []
        self.pool.listing.request(pages.append, limit, offset, owner)
        self.until(lambda: bool(pages))
        if isinstance(pages[0], Exception):
            raise pages[0]
        return pages[0]

    def close_unsaved(self) -> None:
        """Close the pool, but do not store the states in memory: the next start reads them from the log."""
        self.pool._flush = lambda store: None  # type: ignore[method-assign]
        self.pool.close()

    def settle(self) -> None:
        """Poll until nothing is pending."""
        self.until(lambda: not self.pool.pending)
