"""The thread that reads stored sessions back, and lists them. It writes nothing."""

from __future__ import annotations

import logging
import queue
import sqlite3
from collections.abc import Callable

from state_pool.arena import Arena
from state_pool.crash_points import reach
from state_pool.disk.directory import find_session
from state_pool.disk.operations import ListQuery, Loaded, StoredSession
from state_pool.disk.state_store import Connection
from state_pool.disk.statements import count_sessions, list_sessions
from state_pool.disk.thread import PoolThread
from state_pool.disk.verify import Damaged, Loader
from state_pool.disk.writer import Deliver
from state_pool.errors import DatabaseUnreadable, SessionUnusable
from state_pool.session_page import SessionEntry
from state_pool.sessions import SessionKey

logger = logging.getLogger(__name__)

LoadResult = Loaded | SessionUnusable
OnLoaded = Callable[[LoadResult], None]
Listed = tuple[list[SessionEntry], int | None]
"""A page of the list, and how many sessions there are in all if that was asked."""
OnListed = Callable[[Listed | DatabaseUnreadable], None]
OnFound = Callable[[list[StoredSession] | DatabaseUnreadable], None]
"""Called with the session and those that it is rebuilt from, nearest first; empty: there is none."""


class Reader:
    """Answers one question after another; outcomes come back through `deliver`, on the engine thread."""

    def __init__(self, connection: Connection, arena: Arena, deliver: Deliver, on_death: Callable[[], None]) -> None:
        self._connection = connection
        self._arena = arena
        self._loader = Loader(connection, arena.layout, arena.fingerprint, arena.vocab)
        self._deliver = deliver
        self._jobs: queue.SimpleQueue[Callable[[], Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = PoolThread("state-pool-reader", self._run, on_death)

    @property
    def failure(self) -> str | None:
        """Why its thread is gone."""
        return self._thread.failure

    def load(self, row: int, on_loaded: OnLoaded) -> None:
        """Ask for a session; the pool bounds how many are asked for at once."""
        self._jobs.put(lambda: self._load(row, on_loaded))

    def list_sessions(self, query: ListQuery, on_listed: OnListed) -> None:
        """Ask for a page of the list of sessions; the pool bounds how many are asked for at once."""
        self._jobs.put(lambda: self._list(query, on_listed))

    def find(self, key: SessionKey, on_found: OnFound) -> None:
        """Ask whether there is such a session."""
        self._jobs.put(lambda: self._find(key, on_found))

    def close(self) -> None:
        """Finish what was asked, end the thread, close the connection. Blocks."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._deliver(job())
        self._connection.close()

    def _load(self, row: int, on_loaded: OnLoaded) -> Callable[[], None]:
        result = self._try(row)
        reach("before_promotion")
        return lambda: on_loaded(result)

    def _list(self, query: ListQuery, on_listed: OnListed) -> Callable[[], None]:
        page: Listed | DatabaseUnreadable
        try:
            page = (
                list_sessions(self._connection, query),
                count_sessions(self._connection) if query.counted else None,
            )
        except Exception as error:  # a damaged page, out of memory: this list's failure, and the thread goes on
            logger.exception("the sessions could not be listed")
            page = _unreadable("list its sessions", error)
        return lambda: on_listed(page)

    def _find(self, key: SessionKey, on_found: OnFound) -> Callable[[], None]:
        found: list[StoredSession] | DatabaseUnreadable
        try:
            found = find_session(self._connection, key)
        except Exception as error:  # likewise: this look's failure
            logger.exception("a session could not be looked up")
            found = _unreadable("look a session up", error)
        return lambda: on_found(found)

    def _try(self, row: int) -> LoadResult:
        try:
            self._connection.execute("BEGIN")
            try:
                parts, replay = self._loader.read(row)
                found = self._connection.execute("SELECT num_tokens FROM sessions WHERE id = ?", (row,)).fetchone()
            finally:
                self._connection.execute("ROLLBACK")
            return self._loaded(parts, replay, int(found[0]))
        except SessionUnusable as error:
            return error
        except sqlite3.OperationalError as error:
            return SessionUnusable(f"the session could not be read ({error}); try again")
        except (sqlite3.DatabaseError, ValueError, OverflowError) as error:
            return Damaged(f"the session's rows in the database are damaged ({error}); delete it to begin anew")
        except Exception as error:  # out of memory, say: this session's failure, and the thread goes on
            logger.exception("a session could not be read")
            return SessionUnusable(f"the session could not be read ({type(error).__name__}: {error}); try again")

    def _loaded(self, parts: dict[str, bytes] | None, replay: list[int], num_tokens: int) -> LoadResult:
        """Into (pinned) host memory here, since that takes its time."""
        if parts is None:
            return Loaded(None, replay, 4 * len(replay), num_tokens)
        try:
            host = self._arena.host_state(parts)
        except ValueError as error:
            return SessionUnusable(f"the stored state does not fit this model ({error})")
        return Loaded(host, replay, sum(map(len, parts.values())) + 4 * len(replay), num_tokens)


def _unreadable(what: str, error: Exception) -> DatabaseUnreadable:
    failure = f"{type(error).__name__}: {error}"
    return DatabaseUnreadable(f"the session database could not {what} ({failure}); check its disk")
