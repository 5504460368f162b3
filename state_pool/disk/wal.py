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


class WalCheckpointResult(NamedTuple):
    """What came of a move."""

    is_complete: bool
    """Whether all of the log that was there is in the file, and so survives a loss of power."""
    error: str | None = None
    """Why it failed; None too when it is not whole only because somebody reads what was there before."""


class WriteAheadLog:
    """The log as the writer's thread keeps it short; of a server, which has no mover, nothing."""

    def __init__(
        self,
        connection: Connection,
        checkpointer: sqlite3.Connection | None,
        changed: threading.Condition,
        on_death: Callable[[], None],
    ) -> None:
        """`connection`: the writer's; `checkpointer`: one that moves; `changed`: the writer's lock, notified after a move."""
        self.has_uncheckpointed_rest = False
        """Whether there is something to do for `checkpoint_if_needed` at once."""
        self._connection = connection
        self._changed = changed
        self._checkpointer = (
            None if checkpointer is None else WalCheckpointer(checkpointer, self._on_checkpoint, on_death)
        )
        self._bytes = 0
        self._unsynced: list[Callable[[], None]] = []
        """What is to be done when commits survive a loss of power that SQLite may not have synced yet."""
        self._syncing: list[Callable[[], None]] = []
        """The same, of commits before the move that is under way."""

    @property
    def failure(self) -> str | None:
        """Why the mover's thread is gone."""
        return None if self._checkpointer is None else self._checkpointer.failure

    @property
    def is_checkpointed(self) -> bool:
        """Whether there is nothing to move."""
        return self._checkpointer is None or self._bytes == 0

    def written(self, num_bytes: int) -> None:
        """So much was committed, about."""
        self._bytes += num_bytes

    def call_when_synced(self, action: Callable[[], None]) -> None:
        """Do it when all that is committed now survives a loss of power."""
        if self._checkpointer is None:
            action()
        else:
            self._unsynced.append(action)

    def checkpoint_if_needed(self, idle: bool) -> str | None:
        """Have it moved when it is long or nothing else is to do; the little that came meanwhile, at once.

        Returns what went wrong.
        """
        if self._checkpointer is None:
            return None
        if not self.has_uncheckpointed_rest:
            if not self._checkpointer.busy and self._bytes > (0 if idle else WAL_BYTES):
                self._bytes = 0
                self._syncing += self._unsynced
                self._unsynced = []
                self._checkpointer.start()
            return None
        self.has_uncheckpointed_rest = False
        first_result = self._checkpointer.last_result
        rest = first_result if first_result.error else wal_checkpoint(self._connection)
        if first_result.is_complete or rest.is_complete:
            _call_all(self._syncing)
        elif self._syncing:
            self._bytes = max(1, self._bytes)  # it is tried again when nothing else is to do
        return rest.error

    def close(self) -> None:
        """End the thread; move what is left."""
        if self._checkpointer is None:
            return
        self._checkpointer.close()
        if wal_checkpoint(self._connection).is_complete:
            _call_all(self._syncing)
            _call_all(self._unsynced)

    def _on_checkpoint(self) -> None:
        """On the mover's thread."""
        with self._changed:
            self.has_uncheckpointed_rest = True
            self._changed.notify()


class WalCheckpointer:
    """Moves on request what has been committed so far; `on_done` is called on its thread.

    Commits go on meanwhile. What they add is left for the next time, and a log that is never whole in the file
    would grow for ever: so the writer, when told, moves that small rest itself, between two commits.
    """

    def __init__(
        self, connection: sqlite3.Connection, on_done: Callable[[], None], on_death: Callable[[], None]
    ) -> None:
        self.busy = False
        self.last_result = WalCheckpointResult(False)
        """What came of the last move; not whole while one is under way."""
        self._connection = connection
        self._on_done = on_done
        self._requests = threading.Semaphore(0)
        self._stopping = False
        self._thread = PoolThread("state-pool-wal", self._run, on_death)

    @property
    def failure(self) -> str | None:
        """Why its thread is gone."""
        return self._thread.failure

    def start(self) -> None:
        """Begin to move; from the writer's thread, while not `busy`."""
        self.busy = True
        self.last_result = WalCheckpointResult(False)
        self._requests.release()

    def close(self) -> None:
        """Finish, end the thread, close the connection. Blocks."""
        self._stopping = True
        self._requests.release()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._requests.acquire()
            if self._stopping:
                break
            self.last_result = wal_checkpoint(self._connection)
            self.busy = False
            self._on_done()
        self._connection.close()


def wal_checkpoint(connection: Connection) -> WalCheckpointResult:
    """Move what can be moved without waiting for anybody."""
    try:
        busy, pages, moved = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    except sqlite3.Error as error:
        return WalCheckpointResult(False, f"the write-ahead log cannot be moved into the database: {error}")
    return WalCheckpointResult(not busy and moved == pages)


def _call_all(actions: list[Callable[[], None]]) -> None:
    for action in actions:
        action()
    actions.clear()
