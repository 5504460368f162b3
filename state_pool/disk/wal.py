"""The thread that moves SQLite's write-ahead log into the file, so that no turn waits for it."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from typing import NamedTuple

from state_pool.disk.state_store import Connection
from state_pool.disk.thread import PoolThread


class Moved(NamedTuple):
    """What came of a move."""

    whole: bool
    """Whether all of the log that was there is in the file, and so survives a loss of power."""
    error: str | None = None
    """Why it failed; None too when it is not whole only because somebody reads what was there before."""


class WalMover:
    """Moves on request what has been committed so far; `on_done` is called on its thread.

    Commits go on meanwhile. What they add is left for the next time, and a log that is never whole in the file
    would grow for ever: so the writer, when told, moves that small rest itself, between two commits.
    """

    def __init__(
        self, connection: sqlite3.Connection, on_done: Callable[[], None], on_death: Callable[[], None]
    ) -> None:
        self.busy = False
        self.last = Moved(False)
        """What came of the last move."""
        self._connection = connection
        self._on_done = on_done
        self._wanted = threading.Semaphore(0)
        self._stopping = False
        self._thread = PoolThread("state-pool-wal", self._run, on_death)

    @property
    def failure(self) -> str | None:
        """Why its thread is gone."""
        return self._thread.failure

    def start(self) -> None:
        """Begin to move; from the writer's thread, while not `busy`."""
        self.busy = True
        self._wanted.release()

    def close(self) -> None:
        """Finish, end the thread, close the connection. Blocks."""
        self._stopping = True
        self._wanted.release()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._wanted.acquire()
            if self._stopping:
                break
            self.last = move(self._connection)
            self.busy = False
            self._on_done()
        self._connection.close()


def move(connection: Connection) -> Moved:
    """Move what can be moved without waiting for anybody."""
    try:
        busy, pages, moved = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    except sqlite3.Error as error:
        return Moved(False, f"the write-ahead log cannot be moved into the database: {error}")
    return Moved(not busy and moved == pages)
