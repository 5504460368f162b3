"""Whether this worker and all others take work, and the wait of work for an engine that is not there yet."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable


class Readiness:
    """What an HTTP worker knows of the engine and of the other workers. Any thread may tell, loops may wait."""

    def __init__(self, wait_s: float, all_workers_ready: bool = False) -> None:
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self._waiters: set[Callable[[], object]] = set()
        self._has_engine = False
        self.all_workers_ready = all_workers_ready
        """Every HTTP worker takes work, says the supervisor."""

    def engine_changed(self, is_connected: bool) -> None:
        """The engine is there, or is lost."""
        with self._lock:
            self._has_engine = is_connected
            waiting, self._waiters = (self._waiters, set()) if is_connected else (set(), self._waiters)
        for wake in waiting:
            wake()

    def release_all(self) -> None:
        """Let nobody wait any longer: the service ends."""
        with self._lock:
            waiting, self._waiters = self._waiters, set()
            self._wait_s = 0.0
        for wake in waiting:
            wake()

    async def wait_for_engine(self) -> None:
        """Return when the engine is there, or after --engine-wait-s without it."""
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
