"""Checkpoints of SQLite's write-ahead log, on their own thread. So no turn waits for them.

Commits continue meanwhile, so the log may never be completely in the file and would grow forever. Therefore the writer
checkpoints the small rest itself, between two commits.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from state_pool.disk.state_store import Connection
from state_pool.disk.worker_threads import WorkerThreads

WAL_BYTES = 16 << 20


class WalCheckpointResult(NamedTuple):
    is_complete: bool
    """Then it survives a power loss."""
    error: str | None = None
    """The error. None if it is incomplete only because of a reader."""


class WriteAheadLog:
    """Keeps the log short, from the writer thread. Does nothing for a server."""

    def __init__(
        self,
        connection: Connection,
        checkpointer: sqlite3.Connection | None,
        changed: threading.Condition,
        on_death: Callable[[], None],
    ) -> None:
        """`connection`: the writer's. `checkpointer`: for the thread. `changed`: the writer's lock, notified after a
        checkpoint.
        """
        self.has_uncheckpointed_rest = False
        """Whether `checkpoint_if_needed` should run at once."""
        self._connection = connection
        self._changed = changed
        self._checkpointer = checkpointer
        self._thread = WorkerThreads("state-pool-wal", 0 if checkpointer is None else 1, on_death)
        self._is_checkpointing = False
        self._last_result = WalCheckpointResult(False)
        """Of the thread. Incomplete while it is checkpointing."""
        self._bytes = 0
        self._unsynced: list[Callable[[], None]] = []
        """To call when commits survive a power loss; SQLite may not have synced them yet."""
        self._syncing: list[Callable[[], None]] = []
        """The same, for commits before the running checkpoint."""

    @property
    def failure(self) -> str | None:
        return self._thread.failure

    @property
    def is_checkpointed(self) -> bool:
        return self._checkpointer is None or self._bytes == 0

    def written(self, num_bytes: int) -> None:
        """Count committed bytes, approximately."""
        self._bytes += num_bytes

    def call_when_synced(self, action: Callable[[], None]) -> None:
        """Call `action` when all current commits survive a power loss."""
        if self._checkpointer is None:
            action()
        else:
            self._unsynced.append(action)

    def checkpoint_if_needed(self, idle: bool) -> str | None:
        """Start a checkpoint if the log is long or the writer idle. Checkpoint the small rest at once.

        Returns an error or None.
        """
        if self._checkpointer is None:
            return None
        if not self.has_uncheckpointed_rest:
            if not self._is_checkpointing and self._bytes > (0 if idle else WAL_BYTES):
                self._bytes = 0
                self._syncing += self._unsynced
                self._unsynced = []
                self._is_checkpointing, self._last_result = True, WalCheckpointResult(False)
                self._thread.submit(partial(self._checkpoint, self._checkpointer))
            return None
        self.has_uncheckpointed_rest = False
        first_result = self._last_result
        rest = first_result if first_result.error else wal_checkpoint(self._connection)
        if first_result.is_complete or rest.is_complete:
            _call_all(self._syncing)
        elif self._syncing:
            self._bytes = max(1, self._bytes)  # retried when the writer is idle
        return rest.error

    def close(self) -> None:
        """End the thread and checkpoint the rest."""
        if self._checkpointer is None:
            return
        self._thread.submit(self._checkpointer.close)
        self._thread.close()
        if wal_checkpoint(self._connection).is_complete:
            _call_all(self._syncing)
            _call_all(self._unsynced)

    def _checkpoint(self, connection: sqlite3.Connection) -> None:
        """Checkpoint most of the log, and record the result. Runs on the thread."""
        self._last_result = wal_checkpoint(connection)
        self._is_checkpointing = False
        with self._changed:
            self.has_uncheckpointed_rest = True
            self._changed.notify()


def wal_checkpoint(connection: Connection) -> WalCheckpointResult:
    """Checkpoint as much as possible without waiting for readers."""
    try:
        busy, pages, moved = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    except sqlite3.Error as error:
        return WalCheckpointResult(False, f"the write-ahead log cannot be copied into the database: {error}")
    return WalCheckpointResult(not busy and moved == pages)


def _call_all(actions: list[Callable[[], None]]) -> None:
    for action in actions:
        action()
    actions.clear()
