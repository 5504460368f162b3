"""SQLite's write-ahead log: moved into the file by a thread of its own, so that no turn waits for it."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from typing import NamedTuple

from state_pool.disk.state_store import Connection
from state_pool.disk.thread import PoolThread

WAL_BYTES = 16 << 20
"""Written bytes after which the log is moved, between jobs."""


class Moved(NamedTuple):
    """What came of a move."""

    whole: bool
    """Whether all of the log that was there is in the file, and so survives a loss of power."""
    error: str | None = None
    """Why it failed; None too when it is not whole only because somebody reads what was there before."""


class WriteAheadLog:
    """The log as the writer's thread keeps it short; of a server, which has no mover, nothing."""

    def __init__(
        self,
        connection: Connection,
        mover: sqlite3.Connection | None,
        changed: threading.Condition,
        on_death: Callable[[], None],
    ) -> None:
        """`connection`: the writer's; `mover`: one that moves; `changed`: the writer's lock, notified after a move."""
        self.rest_to_move = False
        """Whether there is something to do for `keep_short` at once."""
        self._connection = connection
        self._changed = changed
        self._mover = None if mover is None else WalMover(mover, self._moved, on_death)
        self._bytes = 0
        self._unsynced: list[Callable[[], None]] = []
        """What is to be done when commits survive a loss of power that SQLite may not have synced yet."""
        self._syncing: list[Callable[[], None]] = []
        """The same, of commits before the move that is under way."""

    @property
    def failure(self) -> str | None:
        """Why the mover's thread is gone."""
        return None if self._mover is None else self._mover.failure

    @property
    def is_short(self) -> bool:
        """Whether there is nothing to move."""
        return self._mover is None or self._bytes == 0

    def written(self, num_bytes: int) -> None:
        """So much was committed, about."""
        self._bytes += num_bytes

    def when_synced(self, action: Callable[[], None]) -> None:
        """Do it when all that is committed now survives a loss of power."""
        if self._mover is None:
            action()
        else:
            self._unsynced.append(action)

    def keep_short(self, idle: bool) -> str | None:
        """Have it moved when it is long or nothing else is to do; the little that came meanwhile, at once.

        Returns what went wrong.
        """
        if self._mover is None:
            return None
        if not self.rest_to_move:
            if not self._mover.busy and self._bytes > (0 if idle else WAL_BYTES):
                self._bytes = 0
                self._syncing += self._unsynced
                self._unsynced = []
                self._mover.start()
            return None
        self.rest_to_move = False
        most = self._mover.last
        rest = most if most.error else move(self._connection)
        if most.whole or rest.whole:
            _do(self._syncing)
        elif self._syncing:
            self._bytes = max(1, self._bytes)  # it is tried again when nothing else is to do
        return rest.error

    def close(self) -> None:
        """End the thread; move what is left."""
        if self._mover is None:
            return
        self._mover.close()
        if move(self._connection).whole:
            _do(self._syncing)
            _do(self._unsynced)

    def _moved(self) -> None:
        """On the mover's thread."""
        with self._changed:
            self.rest_to_move = True
            self._changed.notify()


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
        """What came of the last move; not whole while one is under way."""
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
        self.last = Moved(False)
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


def _do(actions: list[Callable[[], None]]) -> None:
    for action in actions:
        action()
    actions.clear()
