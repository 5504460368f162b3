"""The thread that loads and lists stored sessions. It writes nothing."""

from __future__ import annotations

import contextlib
import logging
import queue
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from state_pool.crash_points import reach
from state_pool.disk.checkpoint_objects import CheckpointObjects, ObjectUnusable
from state_pool.disk.directory import find_session
from state_pool.disk.operations import (
    Deliver,
    ListQuery,
    Loaded,
    LoadResult,
    ObjectLocation,
    StoredParts,
    StoredSession,
    describe_error,
)
from state_pool.disk.state_store import Connection, ServerUnavailable
from state_pool.disk.statements import count_sessions, first_stored, keys_used, list_sessions
from state_pool.disk.verify import Loader
from state_pool.disk.worker_threads import RECONNECT_INTERVAL_S, PoolThread, ReconnectTimeout
from state_pool.errors import (
    DatabaseReadFailed,
    DirectoryUnreachable,
    SessionCorrupted,
    SessionReadFailed,
    SessionUnusable,
)
from state_pool.layout import Arena, InvalidStateValues, reshard_state
from state_pool.session_key import SessionEntry, SessionKey

logger = logging.getLogger(__name__)

ListResult = tuple[list[SessionEntry], int | None]
"""(a page of the list, the number of all sessions if requested)"""
LookupFailed = DatabaseReadFailed | DirectoryUnreachable
OnLoaded = Callable[[LoadResult], None]
OnListed = Callable[[ListResult | LookupFailed], None]
OnFirst = Callable[[str | LookupFailed | None], None]
OnFound = Callable[[list[StoredSession] | LookupFailed], None]
"""Called with the session, then those that it is rebuilt from, nearest first; empty: there is none."""


@dataclass(frozen=True, slots=True)
class _ReadRequest:
    row_id: int
    on_loaded: OnLoaded
    unusable_states: dict[int, SessionUnusable]
    """with the reasons"""
    started_at: float
    """monotonic time"""

    def without(self, state: int, error: Exception) -> _ReadRequest:
        logger.error("the stored state of the session with row %d cannot be used: %s", self.row_id, error)
        return replace(self, unusable_states={**self.unusable_states, state: _unavailable_error(error)})


@dataclass(frozen=True, slots=True)
class _StateInStore:
    location: ObjectLocation
    replay: list[int]
    num_tokens: int


class _InvalidStoredState(SessionUnusable):
    def __init__(self, state: int, message: str) -> None:
        super().__init__(message)
        self.state = state


_Found = TypeVar("_Found")
_Job = Callable[[], Callable[[], None] | None]
"""Runs on the reader thread. Its result runs on the engine thread."""


class Reader:
    """Runs one query after another. Results go through `deliver` to the engine thread."""

    def __init__(
        self,
        connection: Connection,
        arena: Arena,
        deliver: Deliver,
        on_death: Callable[[], None],
        objects: CheckpointObjects | None = None,
    ) -> None:
        """`objects`: the checkpoint store, if there is one."""
        self._objects = objects
        self._connection = connection
        self._arena = arena
        self._loader = Loader(connection, arena.layout, arena.fingerprint, arena.vocab)
        self._deliver = deliver
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._server = ReconnectTimeout()
        self._waiting: list[_ReadRequest] = []
        """For a server that is down."""
        self._retry_at = 0.0
        self._thread = PoolThread("state-pool-reader", self._run, on_death)

    @property
    def failure(self) -> str | None:
        return self._thread.failure

    def load(self, row_id: int, on_loaded: OnLoaded) -> None:
        """Queue a session to load. The pool bounds the number."""
        self._jobs.put(lambda: self._load(_ReadRequest(row_id, on_loaded, {}, time.monotonic())))

    def list_sessions(self, query: ListQuery, on_listed: OnListed) -> None:
        """Queue a page of the list. The pool bounds the number."""
        self._jobs.put(lambda: self._list(query, on_listed))

    def find_first(self, session_ids: Sequence[str], on_found: OnFirst) -> None:
        """Queue a search. The result is the first of these ids that a session has."""
        self._jobs.put(lambda: self._find_first(session_ids, on_found))

    def find(self, key: SessionKey, on_found: OnFound) -> None:
        self._jobs.put(lambda: self._find(key, on_found))

    def close(self) -> None:
        """Finish the queued work and end the thread. Blocks."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._next_job()) is not None:
            self._do(job)
        if self._waiting:
            self._deliver(
                self._fail_waiting(SessionReadFailed("the session could not be read before the service stopped"))
            )
        self._connection.close()

    def _do(self, job: _Job) -> None:
        if (outcome := job()) is not None:
            self._deliver(outcome)

    def _next_job(self) -> _Job | None:
        """Return the next job. While loads wait for the server, it may be an attempt to reconnect."""
        if not self._waiting:
            return self._jobs.get()
        with contextlib.suppress(queue.Empty):
            if (left := self._retry_at - time.monotonic()) > 0:
                return self._jobs.get(timeout=left)
        return self._retry_waiting

    def _retry_waiting(self) -> None:
        """Retry one waiting load. If the server answers, retry the others."""
        self._do(partial(self._load, self._waiting.pop(0)))
        while self._waiting and self._server.is_connected:
            self._do(partial(self._load, self._waiting.pop(0)))

    def _server_lost(self, read: _ReadRequest, error: ServerUnavailable) -> Callable[[], None] | None:
        """Queue the load for a retry. After the timeout, fail all waiting loads."""
        self._waiting.append(read)
        self._retry_at = time.monotonic() + RECONNECT_INTERVAL_S
        if self._server.may_retry(read.started_at):
            return None
        return self._fail_waiting(
            SessionReadFailed(f"the session could not be read: {describe_error(error)}; try again")
        )

    def _fail_waiting(self, failure: SessionReadFailed) -> Callable[[], None]:
        reads, self._waiting = self._waiting, []

        def report() -> None:
            for read in reads:
                read.on_loaded(failure)

        return report

    def find_used_keys(self, states: list[int], on_used_keys: Callable[[set[str] | None], None]) -> None:
        """Queue a query for these states' object keys. Calls back on the reader thread, with None after an error."""
        self._jobs.put(lambda: self._find_used_keys(states, on_used_keys))

    def _find_used_keys(self, states: list[int], on_used_keys: Callable[[set[str] | None], None]) -> None:
        try:
            used = keys_used(self._connection, states)
        except sqlite3.Error as error:  # e.g. the server is down: a later sweep asks again
            logger.warning("the objects that are in use could not be looked up: %s", error)
            on_used_keys(None)
        else:
            on_used_keys(used)

    def _load(self, read: _ReadRequest) -> Callable[[], None] | None:
        try:
            result = self._catch_errors(lambda: self._read(read))
        except ServerUnavailable as error:
            return self._server_lost(read, error)
        self._server.reset()
        if isinstance(result, _StateInStore):
            self._fetch(read, result)
            return None
        if isinstance(result, _InvalidStoredState):
            return self._load(read.without(result.state, result))
        reach("before_promotion")
        return lambda: read.on_loaded(result)

    def _fetch(self, read: _ReadRequest, found: _StateInStore) -> None:
        """Fetch the state's object. If that fails, load the session again without this state.

        By then the database may have a later state, whose commit deleted this object, or the whole log.
        """
        assert self._objects is not None

        def fetched(outcome: dict[str, bytes] | Exception) -> None:
            if not isinstance(outcome, Exception):
                stored = StoredParts(found.location.state, outcome, found.location.layout)
                result = self._catch_errors(lambda: self._loaded(stored, found.replay, found.num_tokens))
                if not isinstance(result, _InvalidStoredState):
                    reach("before_promotion")
                    self._deliver(lambda: read.on_loaded(result))
                    return
                outcome = result
            retry = replace(read.without(found.location.state, outcome), started_at=time.monotonic())
            self._jobs.put(lambda: self._load(retry))

        self._objects.get(found.location, fetched)

    def _list(self, query: ListQuery, on_listed: OnListed) -> Callable[[], None]:
        def listed() -> ListResult:
            sessions = list_sessions(self._connection, query)
            return sessions, count_sessions(self._connection, query) if query.counted else None

        page = _lookup(listed, "list its sessions")
        return lambda: on_listed(page)

    def _find_first(self, session_ids: Sequence[str], on_found: OnFirst) -> Callable[[], None]:
        found = _lookup(lambda: first_stored(self._connection, session_ids), "look a session up")
        return lambda: on_found(found)

    def _find(self, key: SessionKey, on_found: OnFound) -> Callable[[], None]:
        found = _lookup(lambda: find_session(self._connection, key), "look a session up")
        return lambda: on_found(found)

    def _read(self, read: _ReadRequest) -> LoadResult | _StateInStore:
        stored, replay, num_tokens = self._rows(read.row_id, read.unusable_states)
        if not isinstance(stored, ObjectLocation):
            return self._loaded(stored, replay, num_tokens)
        if self._objects is None:
            return SessionUnusable("its state is in a checkpoint store; start with --checkpoint-store to read it")
        return _StateInStore(stored, replay, num_tokens)

    def _rows(
        self, row_id: int, unusable_states: dict[int, SessionUnusable]
    ) -> tuple[StoredParts | ObjectLocation | None, list[int], int]:
        """See `Loader.read`. Also returns the session's token count from the same snapshot."""
        self._connection.execute("BEGIN")
        try:
            stored, replay = self._loader.read(row_id, unusable_states)
            found = self._connection.execute("SELECT num_tokens FROM sessions WHERE id = ?", (row_id,)).fetchone()
        finally:
            with contextlib.suppress(sqlite3.Error):  # the first error counts, e.g. of a lost connection
                self._connection.execute("ROLLBACK")
        return stored, replay, int(found[0])

    def _catch_errors(self, read: Callable[[], _Found]) -> _Found | SessionUnusable:
        """Run a read, and return its error as SessionUnusable. Raises ServerUnavailable."""
        try:
            return read()
        except SessionUnusable as error:
            return error
        except ServerUnavailable:
            raise
        except sqlite3.OperationalError as error:
            return SessionReadFailed(f"the session could not be read ({error}); try again")
        except sqlite3.DatabaseError as error:  # SQLite calls one failed read "malformed": it proves no damage
            return SessionReadFailed(
                f"the session could not be read ({error}); try again, and restore a backup if it stays so"
            )
        except (ValueError, OverflowError) as error:
            return SessionCorrupted(f"the session's rows in the database are damaged ({error})")
        except Exception as error:  # e.g. out of memory: fails this session, not the thread
            logger.exception("a session could not be read")
            return SessionReadFailed(f"the session could not be read ({type(error).__name__}: {error}); try again")

    def _loaded(self, stored: StoredParts | None, replay: list[int], num_tokens: int) -> LoadResult:
        """Copy the state to host memory; on this thread, because it is slow. Raises _InvalidStoredState."""
        if stored is None:
            return Loaded(None, replay, 4 * len(replay), num_tokens)
        try:
            host = self._arena.host_state(reshard_state(stored.parts, stored.layout, self._arena.layout))
        except InvalidStateValues as error:
            raise _InvalidStoredState(stored.state, str(error)) from None
        except ValueError as error:
            return SessionUnusable(f"the stored state does not fit this model ({error})")
        return Loaded(host, replay, sum(map(len, stored.parts.values())) + 4 * len(replay), num_tokens)


def _unavailable_error(error: Exception) -> SessionUnusable:
    if isinstance(error, (ObjectUnusable, _InvalidStoredState)):
        return SessionCorrupted(str(error))
    return SessionReadFailed(f"the session could not be read ({error}); try again")


def _lookup(query_database: Callable[[], _Found], action: str) -> _Found | LookupFailed:
    """Run a query. Returns an error that names the `action` if it fails."""
    try:
        return query_database()
    except ServerUnavailable as error:
        return DirectoryUnreachable(
            f"the session database could not {action}: {describe_error(error)}; try again in a moment"
        )
    except Exception as error:  # e.g. a damaged page or no memory: fails this query, not the thread
        logger.exception("the session database could not %s", action)
        failure = f"{type(error).__name__}: {error}"
        return DatabaseReadFailed(f"the session database could not {action} ({failure}); check its disk")
