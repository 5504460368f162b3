"""Protocol of a session database: an SQLite file (`database.SqliteStore`) or a server (`postgres.PostgresStore`).

Both run the same statements (`statements.py`, `directory.py`).
"""

from __future__ import annotations

import sqlite3
from typing import Any, Protocol

from state_pool.errors import DatabaseUnusable


class ServerUnavailable(sqlite3.OperationalError):
    """The server is unreachable or closed the connection. A running commit may or may not be stored."""


class CommitInDoubt(ServerUnavailable):
    """The server was lost after a COMMIT was sent."""


class Connection(Protocol):
    """The interface of sqlite3: SQLite's SQL with `?` for values, and its errors. One thread at a time."""

    @property
    def in_transaction(self) -> bool: ...

    def execute(self, statement: str, parameters: Any = ..., /) -> Any:
        """Return a cursor over the rows. Raises sqlite3.Error, ServerUnavailable."""

    def close(self) -> None: ...


class StateStore(Protocol):
    """A session database, open for one engine. Methods raise sqlite3.Error and DatabaseUnusable."""

    name: str
    """in messages and in /status, without secrets"""
    shared: bool
    """Whether other engines may write. Then memory may be older than the database."""
    engine: str
    """this engine's name among those that share the database"""

    @property
    def is_first(self) -> bool:
        """Whether no other engine has it open. None can open it before `allow_other_engines`."""

    def open_writer(self) -> Connection:
        """Open the only connection that writes, with the schema up to date."""

    def before_close(self, connection: Connection) -> None:
        """Record that this engine closes the database. Call after the writer's last transaction."""

    def open_reader(self) -> Connection:
        """Open a connection that only reads. Its transactions see one snapshot."""

    def open_checkpointer(self) -> sqlite3.Connection | None:
        """Open a connection that checkpoints the write-ahead log; None: the database does that itself."""

    def allow_other_engines(self) -> None: ...

    def used_bytes(self, connection: Connection) -> int:
        """Bytes in use, without free pages."""

    def wrap_error(self, error: sqlite3.Error) -> DatabaseUnusable:
        """Return the error with the database's name and a remedy."""

    def close(self) -> None:
        """Release the database for other processes. Connections are closed by those who opened them."""
