"""Pages of the session list, read by the database's reader. Engine thread only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from state_pool.disk.operations import ListQuery
from state_pool.disk.reader import ListResult, LookupFailed
from state_pool.disk.store import CompletionQueue, Store
from state_pool.errors import DatabaseTimeout, PoolFull
from state_pool.session_key import SessionEntry, SessionPage
from state_pool.sessions import Session, SessionIndex

MAX_PENDING_LISTS = 16
"""Limit of unanswered lists."""
TIMEOUT_S = 5.0
"""How long a list may take: the disk may hang."""

OnListed = Callable[[SessionPage | Exception], None]
"""Called once, on the engine thread, from `StatePool.poll`."""
Unlogged = Callable[[], Iterable[Session]]


@dataclass(eq=False, slots=True)
class _Request:
    """A caller that waits for a page."""

    on_listed: OnListed
    deadline: float
    is_answered: bool = False

    def answer(self, outcome: SessionPage | Exception) -> None:
        """Report the first outcome; ignore later ones."""
        if not self.is_answered:
            self.is_answered = True
            self.on_listed(outcome)


class SessionListing:
    """Queries pages and adds what only memory has: tiers and turns not yet written."""

    def __init__(self, index: SessionIndex, store: Store | None, deliver: CompletionQueue, unlogged: Unlogged) -> None:
        """`unlogged`: sessions with turns on their way to the log."""
        self._index = index
        self._store = store
        self._deliver = deliver
        self._unlogged = unlogged
        self._requests: dict[_Request, None] = {}

    @property
    def pending(self) -> bool:
        return any(not request.is_answered for request in self._requests)

    def request(self, on_listed: OnListed, limit: int = 100, offset: int = 0) -> None:
        """List a page of sessions, newest first, with counts by tier.

        `on_listed` is called once from `StatePool.poll` with a `SessionPage`, DatabaseReadFailed,
        DirectoryUnreachable, or DatabaseTimeout after `TIMEOUT_S`. Raises PoolFull when too many lists are being read.
        """
        if self._store is None:  # every session is in memory, and the sizes of L1 and L2 bound their number
            existing = (session for session in reversed(self._index) if session.exists)
            entries = [_entry_of(session) for session in islice(existing, offset, offset + limit)]
            self._deliver(lambda: on_listed(self._page(entries)))
            return
        if len(self._requests) >= MAX_PENDING_LISTS:
            raise PoolFull(f"{MAX_PENDING_LISTS} lists of sessions are being read already; try again in a moment")
        request = _Request(on_listed, time.monotonic() + TIMEOUT_S)
        self._requests[request] = None
        tiers = {session.row: session.tier for session in self._in_memory()}
        query = ListQuery(limit, offset, tiers, self._newer_than_disk(), counted=self._store.shared)
        self._store.list_sessions(query, lambda outcome: self._listed(request, outcome))

    def expire(self, now: float) -> None:
        """Fail requests past their deadline. They count as pending until the reader answers them."""
        for request in self._requests:
            if now > request.deadline:
                request.answer(
                    DatabaseTimeout(
                        f"the session database has not listed its sessions within {TIMEOUT_S:g} s; "
                        "its disk is slow or busy: try again later"
                    )
                )

    def _listed(self, request: _Request, outcome: ListResult | LookupFailed) -> None:
        del self._requests[request]
        request.answer(outcome if isinstance(outcome, Exception) else self._page(*outcome))

    def _page(self, entries: list[SessionEntry], counted: int | None = None) -> SessionPage:
        """`counted`: sessions in a shared database. L1 and L2 count this engine's only."""
        total = self._index.num_existing if counted is None else counted
        l1 = sum(session.exists for session in self._index.l1)
        l2 = sum(session.exists for session in self._index.l2)
        return SessionPage(
            total=total, in_slots=l1, in_host_memory=l2, on_disk=max(0, total - l1 - l2), sessions=entries
        )

    def _in_memory(self) -> Iterator[Session]:
        yield from self._index.l1
        yield from self._index.l2

    def _newer_than_disk(self) -> dict[int, SessionEntry]:
        """Sessions by row whose newest turn may not be in the database. All are in memory or being logged.

        The index has no others: a session leaves memory only once it is stored completely, or it is refused as lost.
        """
        behind = [session for session in self._in_memory() if session.log_broken and session.dirty]
        return {session.row: _entry_of(session) for session in (*behind, *self._unlogged()) if session.exists}


def _entry_of(session: Session) -> SessionEntry:
    return SessionEntry(session.key.display_name, session.tier, session.updated)
