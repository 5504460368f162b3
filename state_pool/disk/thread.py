"""A thread of the pool: nobody waits for one that has died without anybody noticing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class PoolThread:
    """Runs `work` once on a thread of its own; if that raises, `failure` says what.

    What a job raises is the job's own failure, and its waiter's: `work` catches that. Whatever else happens is a fault
    of this program after which jobs wait for ever, so the engine's thread looks at `failure` at every step.
    """

    def __init__(self, name: str, work: Callable[[], None], on_death: Callable[[], None]) -> None:
        """`on_death` is called on the dying thread, so that somebody looks."""
        self.failure: str | None = None
        self._work = work
        self._on_death = on_death
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for its end; whether it came."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # SystemExit too: however it ends, nobody does its work any more
            name = self._thread.name
            logger.critical("the thread %s has died", name, exc_info=True)
            self.failure = f"the thread {name} has died ({type(error).__name__}: {error})"
            self._on_death()
