"""The thread that reads stored sessions back. It writes nothing."""

from __future__ import annotations

import logging
import queue
import sqlite3
from collections.abc import Callable

from state_pool.arena import Arena
from state_pool.crash_points import reach
from state_pool.disk.operations import Loaded
from state_pool.disk.thread import PoolThread
from state_pool.disk.verify import Damaged, Loader
from state_pool.disk.writer import Deliver
from state_pool.errors import SessionUnusable

logger = logging.getLogger(__name__)

LoadResult = Loaded | SessionUnusable
OnLoaded = Callable[[LoadResult], None]


class Reader:
    """Loads sessions one after another; outcomes come back through `deliver`, on the engine thread."""

    def __init__(
        self, connection: sqlite3.Connection, arena: Arena, deliver: Deliver, on_death: Callable[[], None]
    ) -> None:
        self._connection = connection
        self._arena = arena
        self._loader = Loader(connection, arena.layout, arena.fingerprint, arena.vocab)
        self._deliver = deliver
        self._jobs: queue.SimpleQueue[tuple[int, OnLoaded] | None] = queue.SimpleQueue()
        self._thread = PoolThread("state-pool-reader", self._run, on_death)

    @property
    def failure(self) -> str | None:
        """Why its thread is gone."""
        return self._thread.failure

    def load(self, row: int, on_loaded: OnLoaded) -> None:
        """Ask for a session; the pool bounds how many are asked for at once."""
        self._jobs.put((row, on_loaded))

    def close(self) -> None:
        """Finish what was asked, end the thread, close the connection. Blocks."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            row, on_loaded = job
            result = self._try(row)
            reach("before_promotion")
            self._deliver(_bound(on_loaded, result))
        self._connection.close()

    def _try(self, row: int) -> LoadResult:
        try:
            self._connection.execute("BEGIN")
            try:
                parts, replay = self._loader.read(row)
            finally:
                self._connection.execute("ROLLBACK")
            return self._loaded(parts, replay)
        except SessionUnusable as error:
            return error
        except sqlite3.OperationalError as error:
            return SessionUnusable(f"the session could not be read ({error}); try again")
        except (sqlite3.DatabaseError, ValueError, OverflowError) as error:
            return Damaged(f"the session's rows in the database are damaged ({error}); delete it to begin anew")
        except Exception as error:  # out of memory, say: this session's failure, and the thread goes on
            logger.exception("a session could not be read")
            return SessionUnusable(f"the session could not be read ({type(error).__name__}: {error}); try again")

    def _loaded(self, parts: dict[str, bytes] | None, replay: list[int]) -> LoadResult:
        """Into (pinned) host memory here, since that takes its time."""
        if parts is None:
            return Loaded(None, replay, 4 * len(replay))
        try:
            host = self._arena.host_state(parts)
        except ValueError as error:
            return SessionUnusable(f"the stored state does not fit this model ({error})")
        return Loaded(host, replay, sum(map(len, parts.values())) + 4 * len(replay))


def _bound(on_loaded: OnLoaded, result: LoadResult) -> Callable[[], None]:
    return lambda: on_loaded(result)
