"""Checkpoints of SQLite's write-ahead log, on their own thread. So no turn waits for them."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from typing import NamedTuple

from state_pool.disk.state_store import Connection
from state_pool.disk.worker_threads import PoolThread

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
        self._checkpointer = (
            None if checkpointer is None else WalCheckpointer(checkpointer, self._on_checkpoint, on_death)
        )
        self._bytes = 0
        self._unsynced: list[Callable[[], None]] = []
        """To call when commits survive a power loss; SQLite may not have synced them yet."""
        self._syncing: list[Callable[[], None]] = []
        """The same, for commits before the running checkpoint."""

    @property
    def failure(self) -> str | None:
        return None if self._checkpointer is None else self._checkpointer.failure

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
            self._bytes = max(1, self._bytes)  # retried when the writer is idle
        return rest.error

    def close(self) -> None:
        """End the thread and checkpoint the rest."""
        if self._checkpointer is None:
            return
        self._checkpointer.close()
        if wal_checkpoint(self._connection).is_complete:
            _call_all(self._syncing)
            _call_all(self._unsynced)

    def _on_checkpoint(self) -> None:
        """Record a finished checkpoint. Runs on the checkpointer's thread."""
        with self._changed:
            self.has_uncheckpointed_rest = True
            self._changed.notify()


class WalCheckpointer:
    """Checkpoints on its own thread, and calls `on_done` there.

    Commits continue meanwhile, so the log may never be completely in the file and would grow forever. Therefore the
    writer checkpoints the small rest itself, between two commits.
    """

    def __init__(
        self, connection: sqlite3.Connection, on_done: Callable[[], None], on_death: Callable[[], None]
    ) -> None:
        self.busy = False
        self.last_result = WalCheckpointResult(False)
        """incomplete while a checkpoint is running"""
        self._connection = connection
        self._on_done = on_done
        self._requests = threading.Semaphore(0)
        self._stopping = False
        self._thread = PoolThread("state-pool-wal", self._run, on_death)

    @property
    def failure(self) -> str | None:
        return self._thread.failure

    def start(self) -> None:
        """Start a checkpoint. Called by the writer thread while not `busy`."""
        self.busy = True
        self.last_result = WalCheckpointResult(False)
        self._requests.release()

    def close(self) -> None:
        """End the thread after the running checkpoint. Blocks."""
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
