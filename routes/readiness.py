"""Whether this worker can take work, and waiting for an engine that is not connected."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable


class Readiness:
    """An HTTP worker's knowledge of its engine and the other workers. Thread-safe."""

    def __init__(self, wait_s: float, all_workers_ready: bool = False) -> None:
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self._waiters: set[Callable[[], object]] = set()
        self._has_engine = False
        self.all_workers_ready = all_workers_ready
        """Whether all HTTP workers take work, from the supervisor."""

    def engine_changed(self, is_connected: bool) -> None:
        """Record that the engine has connected or disconnected."""
        with self._lock:
            self._has_engine = is_connected
            waiting, self._waiters = (self._waiters, set()) if is_connected else (set(), self._waiters)
        for wake in waiting:
            wake()

    def release_all(self) -> None:
        """Wake all waiters for the shutdown, and let nobody wait."""
        with self._lock:
            waiting, self._waiters = self._waiters, set()
            self._wait_s = 0.0
        for wake in waiting:
            wake()

    async def wait_for_engine(self) -> None:
        """Wait until the engine is connected, at most --engine-wait-s."""
        loop, connected = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(connected.set)

        with self._lock:
            if self._has_engine or not self._wait_s:
                return
            self._waiters.add(wake)
        try:
            await asyncio.wait_for(connected.wait(), self._wait_s)
        except TimeoutError:
            pass
        finally:
            with self._lock:
                self._waiters.discard(wake)
