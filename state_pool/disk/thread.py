"""A thread of the pool that reports its own death."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class PoolThread:
    """Runs `work` once on a new thread. If that raises, `failure` has the error.

    `work` must catch the errors of single jobs. Any other error is a bug: jobs would wait forever. So the engine thread
    checks `failure` at every step.
    """

    def __init__(self, name: str, work: Callable[[], None], on_death: Callable[[], None]) -> None:
        """`on_death` is called on the dying thread, to wake the engine."""
        self.failure: str | None = None
        self._work = work
        self._on_death = on_death
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread. Returns whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # SystemExit too: without the thread, jobs wait forever
            name = self._thread.name
            logger.critical("the thread %s has died", name, exc_info=True)
            self.failure = f"the thread {name} has died ({type(error).__name__}: {error})"
            self._on_death()
