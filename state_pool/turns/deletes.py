"""Deletes sessions on disk. In a shared database, one engine deletes expired and excess sessions for all.

Engine thread only.
"""

from __future__ import annotations

import time

from state_pool.cache.tiers import Tiers
from state_pool.config import PoolConfig
from state_pool.crash_points import reach
from state_pool.disk.operations import Delete, DeleteOldest
from state_pool.disk.store import CompletionQueue, Store
from state_pool.expiry import Expiry
from state_pool.sessions import OnDurable, Session, SessionIndex

_MAX_DELETES_PER_JOB = 256
_MAX_IDLE_SESSIONS = 4096
"""Sessions of a shared database that stay in the index although no memory holds their state.

Their next turn queries the database in any case.
"""


class SharedCleanup:
    """Deletes through the database. Other engines notice at the session's next turn."""

    def __init__(self, config: PoolConfig, index: SessionIndex, tiers: Tiers, store: Store, expiry: Expiry) -> None:
        self._config = config
        self._index = index
        self._counters = tiers.counters
        self._state_bytes = max(1, tiers.arena.state_bytes)
        self._store = store
        self._expiry = expiry
        self._is_deleting = False

    def run(self) -> None:
        """Delete expired sessions and those above the limit. Called each second."""
        self._shrink_index()
        planned = time.time()
        cutoff = self._expiry.cutoff()
        if self._is_deleting or not self._store.is_cleanup_leader:
            return
        expired = None if cutoff is None else DeleteOldest(_MAX_DELETES_PER_JOB, cutoff, planned)
        job = self._over_limit_job() or expired
        if job is not None:
            self._is_deleting = True
            self._store.submit(job, lambda error: self._done(job, error))

    def _done(self, job: DeleteOldest, error: Exception | None) -> None:
        """Count the deleted sessions, which the store has written into the job."""
        self._is_deleting = False
        if error is None and job.count:
            self._counters.count_removed(job.count, job.last_use, is_expired=job.cutoff is not None)

    def _over_limit_job(self) -> DeleteOldest | None:
        """Return a job, without a cutoff, that frees the bytes above `state_db_max_gb`."""
        store = self._store
        if not store.over_limit or store.has_pending_deletes or self._config.state_db_full != "evict":
            return None
        return DeleteOldest(min(_MAX_DELETES_PER_JOB, 1 + store.excess_bytes // self._state_bytes), None)

    def _shrink_index(self) -> None:
        """Remove the oldest sessions from the index that only the database has."""
        excess = len(self._index) - len(self._index.l1) - len(self._index.l2) - _MAX_IDLE_SESSIONS
        if excess > 0:
            idle = [session for session in self._index if self._may_forget(session)]
            for session in idle[:excess]:
                self._index.remove(session)

    @staticmethod
    def _may_forget(session: Session) -> bool:
        in_memory = session.slot is not None or session.host is not None
        return not (in_memory or session.busy or session.loading or session.moving or session.unlogged)


class SessionDeletes:
    def __init__(self, store: Store | None, deliver: CompletionQueue) -> None:
        self._store = store
        self._deliver = deliver
        self._undeleted: list[tuple[int, ...]] = []
        """to be retried"""

    def delete(self, row_ids: tuple[int, ...], on_durable: OnDurable | None = None) -> None:
        """Delete sessions by the ids of their database rows. Failed deletes are retried, also at shutdown."""
        if self._store is None or not row_ids:
            if on_durable is not None:
                self._deliver(lambda: on_durable(None))
            return

        def done(error: Exception | None) -> None:
            if error is None:
                reach("after_delete")
            else:
                self._undeleted.append(row_ids)
            if on_durable is not None:
                on_durable(error)

        self._store.submit(Delete(row_ids), done)

    def retry(self) -> None:
        undeleted, self._undeleted = self._undeleted, []
        for row_ids in undeleted:
            self.delete(row_ids)
