"""Turns of sessions that other engines may have: each begins with a question to the database they share.

A plain session belongs to one engine at a time. Whoever begins a turn takes it over, unless a turn of it runs elsewhere
on an engine that lives; then he asks again until that is over. What memory has of a session counts only if the database
has the same turn of the same row. Engine thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from state_pool.cache.tiers import Tiers
from state_pool.disk.operations import Acquire, Release, StoredSession
from state_pool.disk.store import Store, build_session
from state_pool.errors import (
    DialogueNotFound,
    DirectoryUnreachable,
    PoolError,
    SessionBusy,
    SessionUnusable,
)
from state_pool.sessions import ROOT, Fence, Lease, LeaseState, Session, SessionIndex, SessionKey
from state_pool.turns.lease_queue import LeaseQueue

POLL_INTERVAL_S = 0.03
"""Between two questions for a session that another engine runs a turn of."""
DATABASE_TIMEOUT_S = 10.0
"""How long a turn waits for a database that does not answer."""
OTHER_ENGINES_TIMEOUT_S = 600.0
"""How long a turn waits for those of other engines: longer than most answers take."""
_RETRY_DELAY_S = 0.25


@dataclass(frozen=True, slots=True)
class _AcquireRequest:
    """Who has the session of a lease, or which dialogue it branches from."""

    lease: Lease
    branch_from: int | None
    deadline: float
    """Monotonic time until which the database may fail to answer."""
    others_deadline: float
    """Monotonic time until which turns of other engines are waited for."""


class Acquisition:
    """Brings leases from the database to the queue for their states."""

    def __init__(
        self,
        store: Store,
        index: SessionIndex,
        tiers: Tiers,
        lease_queue: LeaseQueue,
        start_next_turn: Callable[[Session], None],
        refuse_when_full: Callable[[], None],
    ) -> None:
        """`start_next_turn`: the session's next turn may begin; `refuse_when_full`: raises PoolFull for a new session."""
        self._store = store
        self._index = index
        self._tiers = tiers
        self._supply = lease_queue
        self._start_next_turn = start_next_turn
        self._refuse_when_full = refuse_when_full
        self._retries: list[tuple[float, Callable[[], None]]] = []

    @property
    def pending(self) -> bool:
        """Whether somebody asks again soon."""
        return bool(self._retries)

    def poll(self) -> None:
        """Ask again where it is time."""
        if not self._retries:
            return
        now = time.monotonic()
        due = [retry for at, retry in self._retries if at <= now]
        self._retries = [(at, retry) for at, retry in self._retries if at > now]
        for retry in due:
            retry()

    def begin(self, lease: Lease, branch_from: int | None = None) -> None:
        """Acquire the lease's session, or read the dialogue that a new one begins from; then its state is fetched."""
        now = time.monotonic()
        self._send_request(_AcquireRequest(lease, branch_from, now + DATABASE_TIMEOUT_S, now + OTHER_ENGINES_TIMEOUT_S))

    def release(self, session: Session) -> None:
        """No turn of the session runs here any more: another engine's may."""
        if not session.acquired or session.fence is None:
            return
        session.acquired = False
        current = self._index.get(session.key)
        if current is None or current is session or not current.busy:
            self._release_fence(session.fence)

    def _release_fence(self, fence: Fence) -> None:
        """Tell the database that a turn is over; engines that ask wait until it knows."""

        def answered(error: Exception | None) -> None:
            if error is not None:
                self._release_fence_later(fence)

        self._store.submit(Release(fence), answered)

    def _release_fence_later(self, fence: Fence) -> None:
        def retry() -> None:
            current = self._index.get(SessionKey(fence.session_id, fence.dialogue))
            if current is not None and current.busy:  # a turn runs here, under the same fence
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
                    self._release_fence_later(job.fence)  # its commit may have been kept though nobody heard
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
            message = f"the session database has not answered within {DATABASE_TIMEOUT_S:g} s ({error}); try again in a moment"
            self._fail(request.lease, DirectoryUnreachable(message))

    def _wait_for_others(self, request: _AcquireRequest) -> None:
        lease, now = request.lease, time.monotonic()
        busy = f"session {lease.session.key.display_name!r} is busy with a turn of another engine"
        if not lease.wait:
            self._fail(lease, SessionBusy(f"{busy}; wait for it, or send wait: true"))
        elif now >= request.others_deadline:
            waited = f"and has been for {OTHER_ENGINES_TIMEOUT_S:g} s, as long as a turn waits"
            self._fail(lease, SessionBusy(f"{busy}, {waited}; send it again when that is over"))
        else:
            retry = replace(request, deadline=now + DATABASE_TIMEOUT_S)
            self._retries.append((now + POLL_INTERVAL_S, lambda: self._send_request(retry)))

    def _acquired(self, lease: Lease, job: Acquire) -> None:
        session = lease.session
        session.fence = job.fence
        session.acquired = not lease.branch
        if lease.state is not LeaseState.WAITING:  # cancelled, or deleted, meanwhile
            if session.active is None:
                self.release(session)
            return
        try:
            if lease.branch:
                self._begin_branch(lease, job)
            else:
                self._refresh(session, job.stored)
        except PoolError as error:
            self._fail(lease, error)
            return
        self._supply.enqueue(lease)

    def _begin_branch(self, lease: Lease, job: Acquire) -> None:
        """Raises DialogueNotFound, SessionUnusable, PoolFull."""
        session_id = lease.session.key.session_id
        if job.branch_from is not None and job.branch_from != ROOT and not job.stored:
            raise DialogueNotFound(session_id, job.branch_from)
        self._refuse_when_full()
        lease.reserved_dialogue = job.dialogue
        if job.stored:
            source = self._cached_dialogue(job.stored)
            _check_usable(source)
            lease.source = lease.session.parent = source

    def _cached_dialogue(self, stored: list[StoredSession]) -> Session:
        """The dialogue as memory has it, which is as good as stored since it never changes; entered if it is new."""
        session = self._index.get(stored[0].row.key)
        if session is None or session.row != stored[0].row.row:
            if session is not None:
                self.drop(session)
            session = build_session(stored[0])
            self._index.add(session)
        at = session
        for ancestor in stored[1:]:
            at.parent = at.parent or build_session(ancestor)
            at = at.parent
        return session

    def _refresh(self, session: Session, stored: list[StoredSession]) -> None:
        """Have the session in memory be what is stored. Raises SessionUnusable, PoolFull."""
        if not stored:
            self._reset(session)
            return
        row = stored[0].row
        if (session.row, session.turn) != (row.row, row.turn):
            self._tiers.forget(session)
            self._index.num_existing += not session.exists
            session.row, session.turn, session.num_tokens = row.row, row.turn, row.num_tokens
            session.created = row.created
            session.origin, session.adapter = row.origin, row.adapter
        session.disk_turn, session.disk_tokens = stored[0].disk_turn, stored[0].disk_tokens
        if stored[0].quarantined is not None:
            self._index.mark_unusable(session, stored[0].quarantined)
        elif session.unusable is not None:
            self._index.mark_usable(session)
        _check_usable(session)

    def _reset(self, session: Session) -> None:
        """There is no such session, or no more."""
        self._refuse_when_full()
        if not session.exists:
            return
        self._tiers.forget(session)
        self._index.num_existing -= 1
        session.row, session.turn, session.num_tokens = self._store.next_row(), 0, 0
        session.disk_turn, session.disk_tokens = -1, 0
        session.origin = session.adapter = None
        session.created = time.time()
        self._index.mark_usable(session)

    def drop(self, session: Session) -> None:
        """Memory has what the database has no more."""
        self._tiers.forget(session)
        self._index.remove(session)

    def _fail(self, lease: Lease, error: Exception) -> None:
        session = lease.session
        lease.state, lease.error = LeaseState.FAILED, error
        if session.active is lease and not lease.branch:
            session.active = None
            self._start_next_turn(session)


def _check_usable(session: Session) -> None:
    if session.unusable is not None:
        raise SessionUnusable(f"session {session.key.display_name!r}: {session.unusable}")
