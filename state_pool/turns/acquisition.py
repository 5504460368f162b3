"""Turns in a shared database: each first acquires its session there. Engine thread only.

A plain session belongs to one engine at a time. A new turn takes it over. If a live engine runs a turn of it, the new
turn retries until that one ends. A state in memory is valid only if the database has the same row and turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from state_pool.cache.tiers import Tiers
from state_pool.disk.operations import Acquire, Release, StoredSession
from state_pool.disk.store import Store, build_session
from state_pool.errors import DialogueNotFound, DirectoryUnreachable, PoolError, SessionBusy
from state_pool.session_key import ROOT, Fence, SessionKey
from state_pool.sessions import Lease, LeaseState, Session, SessionIndex

POLL_INTERVAL_S = 0.03
"""Time between two attempts for a session that another engine runs a turn of."""
DATABASE_TIMEOUT_S = 10.0
"""How long a turn waits for a database that does not answer."""
OTHER_ENGINES_TIMEOUT_S = 600.0
"""How long a turn waits for other engines' turns: longer than most answers take."""
_RETRY_DELAY_S = 0.25


@dataclass(frozen=True, slots=True)
class _AcquireRequest:
    lease: Lease
    branch_from: int | None
    deadline: float
    """monotonic; until then database errors are retried"""
    others_deadline: float
    """monotonic; until then the lease waits for other engines"""


class Acquisition:
    """Acquires leases' sessions in the database. Then queues the leases for their states."""

    def __init__(
        self,
        store: Store,
        index: SessionIndex,
        tiers: Tiers,
        enqueue: Callable[[Lease], None],
        start_next_turn: Callable[[Session], None],
        refuse_when_full: Callable[[], None],
    ) -> None:
        """- `enqueue`: queues an acquired lease for its state
        - `start_next_turn`: starts the session's next turn
        - `refuse_when_full`: raises PoolFull for a new session
        """
        self._store = store
        self._index = index
        self._tiers = tiers
        self._enqueue = enqueue
        self._start_next_turn = start_next_turn
        self._refuse_when_full = refuse_when_full
        self._retries: list[tuple[float, Callable[[], None]]] = []

    @property
    def pending(self) -> bool:
        return bool(self._retries)

    def poll(self) -> None:
        if not self._retries:
            return
        now = time.monotonic()
        due = [retry for at, retry in self._retries if at <= now]
        self._retries = [(at, retry) for at, retry in self._retries if at > now]
        for retry in due:
            retry()

    def begin(self, lease: Lease, branch_from: int | None = None) -> None:
        now = time.monotonic()
        self._send_request(_AcquireRequest(lease, branch_from, now + DATABASE_TIMEOUT_S, now + OTHER_ENGINES_TIMEOUT_S))

    def release(self, session: Session) -> None:
        """Release the session. Call when no turn of it runs here any more."""
        if not session.acquired or session.fence is None:
            return
        session.acquired = False
        current = self._index.get(session.key)
        if current is None or current is session or not current.busy:
            self._release_fence(session.fence)

    def _release_fence(self, fence: Fence) -> None:
        """Record in the database that a turn has ended. Other engines wait for this."""

        def answered(error: Exception | None) -> None:
            if error is not None:
                self._release_fence_later(fence)

        self._store.submit(Release(fence), answered)

    def _release_fence_later(self, fence: Fence) -> None:
        def retry() -> None:
            current = self._index.get(SessionKey(fence.session_id, fence.dialogue))
            if current is not None and current.busy:  # a turn runs here under the same fence
                self._release_fence_later(fence)
            else:
                self._release_fence(fence)

        self._retries.append((time.monotonic() + _RETRY_DELAY_S, retry))

    def _send_request(self, request: _AcquireRequest) -> None:
        lease = request.lease
        if lease.state is not LeaseState.WAITING:
            return
        job = Acquire(lease.session.key.session_id, request.branch_from)

        def answered(error: Exception | None) -> None:
            if error is not None:
                if job.fence is not None and not lease.branch:
                    self._release_fence_later(job.fence)  # the commit may have succeeded without an answer
                self._failed(request, error)
            elif job.fence is None:
                self._wait_for_others(request)
            else:
                self._acquired(lease, job)

        self._store.submit(job, answered)

    def _failed(self, request: _AcquireRequest, error: Exception) -> None:
        now = time.monotonic()
        if isinstance(error, DirectoryUnreachable):
            self._fail(request.lease, error)
        elif now < request.deadline:
            self._retries.append((now + _RETRY_DELAY_S, lambda: self._send_request(request)))
        else:
            timeout = f"the session database has not answered within {DATABASE_TIMEOUT_S:g} s"
            self._fail(request.lease, DirectoryUnreachable(f"{timeout} ({error}); try again in a moment"))

    def _wait_for_others(self, request: _AcquireRequest) -> None:
        lease, now = request.lease, time.monotonic()
        busy = f"session {lease.session.key.display_name!r} is busy with a turn of another engine"
        if not lease.wait:
            self._fail(lease, SessionBusy(f"{busy}; wait for it, or send wait: true"))
        elif now >= request.others_deadline:
            waited = f"and has been for {OTHER_ENGINES_TIMEOUT_S:g} s, the longest that a turn waits"
            self._fail(lease, SessionBusy(f"{busy}, {waited}; send the turn again later"))
        else:
            retry = replace(request, deadline=now + DATABASE_TIMEOUT_S)
            self._retries.append((now + POLL_INTERVAL_S, lambda: self._send_request(retry)))

    def _acquired(self, lease: Lease, job: Acquire) -> None:
        session = lease.session
        if lease.state is not LeaseState.WAITING:  # cancelled or deleted meanwhile
            # Memory was not compared with the database. With this fence, a deleted session's state could be stored.
            current = self._index.get(session.key) or session
            if not lease.branch and job.fence is not None and current.active is None:
                self._release_fence(job.fence)
            return
        session.fence = job.fence
        session.acquired = not lease.branch
        try:
            if lease.branch:
                self._begin_branch(lease, job)
            else:
                self._refresh(session, job.stored)
        except PoolError as error:
            self._fail(lease, error)
            return
        self._enqueue(lease)

    def _begin_branch(self, lease: Lease, job: Acquire) -> None:
        """Set the parent of a new dialogue. Raises DialogueNotFound, SessionUnusable, PoolFull."""
        session_id = lease.session.key.session_id
        if job.branch_from is not None and job.branch_from != ROOT and not job.stored:
            raise DialogueNotFound(session_id, job.branch_from)
        self._refuse_when_full()
        lease.reserved_dialogue = job.dialogue
        if job.stored:
            source = self._cached_dialogue(job.stored)
            source.check_usable()
            lease.source = lease.session.parent = source

    def _cached_dialogue(self, stored: list[StoredSession]) -> Session:
        """Return the dialogue from memory, or add it. Dialogues never change."""
        session = self._index.get(stored[0].session.key)
        if session is None or session.row_id != stored[0].session.row_id:
            if session is not None:
                self.drop(session)
            session = build_session(stored[0])
            self._index.add(session)
        descendant = session
        for ancestor in stored[1:]:
            descendant.parent = descendant.parent or build_session(ancestor)
            descendant = descendant.parent
        return session

    def _refresh(self, session: Session, stored: list[StoredSession]) -> None:
        """Update the session in memory from the database. Raises SessionUnusable, PoolFull."""
        if not stored:
            self._reset(session)
            return
        row = stored[0].session
        if (session.row_id, session.turn) != (row.row_id, row.turn):
            self._tiers.forget(session)
            self._index.num_existing += not session.exists
            session.row_id, session.turn, session.num_tokens = row.row_id, row.turn, row.num_tokens
            session.created = row.created
            session.origin, session.adapter = row.origin, row.adapter
        session.disk_turn, session.disk_tokens = stored[0].disk_turn, stored[0].disk_tokens
        if stored[0].quarantined is not None:
            self._index.mark_unusable(session, stored[0].quarantined)
        elif session.unusable is not None:
            self._index.mark_usable(session)
        session.check_usable()

    def _reset(self, session: Session) -> None:
        """Make the session new: the database has none."""
        self._refuse_when_full()
        if not session.exists:
            return
        self._tiers.forget(session)
        self._index.num_existing -= 1
        session.row_id, session.turn, session.num_tokens = self._store.next_row(), 0, 0
        session.disk_turn, session.disk_tokens = -1, 0
        session.origin = session.adapter = None
        session.created = time.time()
        self._index.mark_usable(session)

    def drop(self, session: Session) -> None:
        self._tiers.forget(session)
        self._index.remove(session)

    def _fail(self, lease: Lease, error: Exception) -> None:
        session = lease.session
        lease.state, lease.error = LeaseState.FAILED, error
        if session.active is lease and not lease.branch:
            session.active = None
            self._start_next_turn(session)
