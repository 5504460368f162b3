"""Pages of the session list, read by the database's reader. Engine thread only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from state_pool.disk.operations import ListQuery
from state_pool.disk.reader import ListResult, LookupFailed
from state_pool.disk.store import CompletionQueue, Store
from state_pool.errors import DatabaseTimeout, PoolFull
from state_pool.session_key import SessionEntry, SessionPage, is_visible
from state_pool.sessions import Session, SessionIndex

MAX_PENDING_LISTS = 16
TIMEOUT_S = 5.0
"""How long a list may take: the disk may hang."""

OnListed = Callable[[SessionPage | Exception], None]
"""Called once, on the engine thread, from `StatePool.poll`."""
_Outcome = TypeVar("_Outcome")
Unlogged = Callable[[], Iterable[Session]]


OnFound = Callable[[str | Exception | None], None]
"""Called once, on the engine thread."""


@dataclass(eq=False, slots=True)
class _Request(Generic[_Outcome]):
    on_outcome: Callable[[_Outcome | Exception], None]
    deadline: float
    is_answered: bool = False

    def answer(self, outcome: _Outcome | Exception) -> None:
        """Report the first outcome. Later ones are ignored."""
        if not self.is_answered:
            self.is_answered = True
            self.on_outcome(outcome)


class SessionListing:
    """Queries pages, and adds tiers and turns that are in memory only."""

    def __init__(self, index: SessionIndex, store: Store | None, deliver: CompletionQueue, unlogged: Unlogged) -> None:
        """`unlogged`: sessions with turns on their way to the log."""
        self._index = index
        self._store = store
        self._deliver = deliver
        self._unlogged = unlogged
        self._requests: dict[_Request[SessionPage], None] = {}
        self._lookups: dict[_Request[str | None], None] = {}

    @property
    def pending(self) -> bool:
        requests: Iterable[_Request[Any]] = (*self._requests, *self._lookups)
        return any(not request.is_answered for request in requests)

    def find_first(self, session_ids: Sequence[str], on_found: OnFound) -> None:
        """Find the first of these ids that a session has.

        `on_found` is called once with the id or None, or with an error as of `request`. Callers bound the number.
        """
        if self._store is None or not self._store.shared:
            on_found(next(filter(self._index.has_id, session_ids), None))
            return
        request: _Request[str | None] = _Request(on_found, time.monotonic() + TIMEOUT_S)
        self._lookups[request] = None

        def found(outcome: str | LookupFailed | None) -> None:
            del self._lookups[request]
            request.answer(outcome)

        self._store.reader.find_first(session_ids, found)

    def request(self, on_listed: OnListed, limit: int = 100, offset: int = 0, owner: str = "") -> None:
        """List a page of the sessions that `owner` sees, newest first.

        Adds counts by tier. The owner "" sees all.

        `on_listed` is called once from `StatePool.poll` with a `SessionPage`, DatabaseReadFailed,
        DirectoryUnreachable, or DatabaseTimeout after `TIMEOUT_S`. Raises PoolFull when too many lists are being read.
        """
        if self._store is None:  # every session is in memory, and the sizes of L1 and L2 bound their number
            entries = [_entry_of(session) for session in self._visible(reversed(self._index), owner)]
            self._deliver(lambda: on_listed(self._page(entries[offset : offset + limit], owner, len(entries))))
            return
        if len(self._requests) >= MAX_PENDING_LISTS:
            raise PoolFull(f"{MAX_PENDING_LISTS} lists of sessions are being read already; try again in a moment")
        request: _Request[SessionPage] = _Request(on_listed, time.monotonic() + TIMEOUT_S)
        self._requests[request] = None
        is_counted = self._store.shared or bool(owner)
        tiers = {session.row_id: session.tier for session in self._in_memory()}
        query = ListQuery(limit, offset, tiers, self._newer_than_disk(owner), counted=is_counted, owner=owner)
        self._store.list_sessions(query, lambda outcome: self._listed(request, owner, outcome))

    def expire(self, now: float) -> None:
        """Fail requests past their deadline. They count as pending until the reader answers them."""
        requests: Iterable[_Request[Any]] = (*self._requests, *self._lookups)
        for request in requests:
            if now > request.deadline:
                request.answer(
                    DatabaseTimeout(
                        f"the session database has not looked up its sessions within {TIMEOUT_S:g} s; "
                        "its disk is slow or busy: try again later"
                    )
                )

    def _listed(self, request: _Request[SessionPage], owner: str, outcome: ListResult | LookupFailed) -> None:
        del self._requests[request]
        if isinstance(outcome, Exception):
            request.answer(outcome)
        else:
            entries, counted = outcome
            request.answer(self._page(entries, owner, counted))

    def _page(self, entries: list[SessionEntry], owner: str, counted: int | None) -> SessionPage:
        """Make a page of the list. L1 and L2 count this engine's sessions only.

        `counted`: the owner's sessions, or those in a shared database.
        """
        total = self._index.num_existing if counted is None else counted
        l1 = sum(1 for _ in self._visible(self._index.l1, owner))
        l2 = sum(1 for _ in self._visible(self._index.l2, owner))
        return SessionPage(
            total=total, in_slots=l1, in_host_memory=l2, on_disk=max(0, total - l1 - l2), sessions=entries
        )

    def _in_memory(self) -> Iterator[Session]:
        yield from self._index.l1
        yield from self._index.l2

    @staticmethod
    def _visible(sessions: Iterable[Session], owner: str) -> Iterator[Session]:
        return (session for session in sessions if session.exists and is_visible(session.key.session_id, owner))

    def _newer_than_disk(self, owner: str) -> dict[int, SessionEntry]:
        """Sessions by row whose newest turn may not be in the database. All are in memory or being logged.

        The index has no others: a session leaves memory only once it is stored completely, or it is refused as lost.
        """
        behind = [session for session in self._in_memory() if session.log_broken and session.dirty]
        return {session.row_id: _entry_of(session) for session in self._visible((*behind, *self._unlogged()), owner)}


def _entry_of(session: Session) -> SessionEntry:
    return session.key.entry(session.tier, session.updated)
