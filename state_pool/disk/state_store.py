"""What the pool's threads need of a session database. A file of SQLite (`database.SqliteStore`) and a server
(`postgres.PostgresStore`) fulfil it; what is asked of either is the same statements (`statements.py`, `directory.py`).
"""

from __future__ import annotations

import sqlite3
from typing import Any, Protocol

from state_pool.errors import DatabaseUnusable


class ServerUnavailable(sqlite3.OperationalError):
    """The server cannot be reached, or has ended the connection; whether a commit under way was kept is not known."""


class CommitInDoubt(ServerUnavailable):
    """The server was lost after a COMMIT was sent."""


class Connection(Protocol):
    """As sqlite3's: statements in SQLite's words, with `?` for values, and its errors. One thread at a time."""

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open."""
        ...

    def execute(self, statement: str, parameters: Any = ..., /) -> Any:
        """A cursor over the rows. Raises sqlite3.Error; ServerAway among them."""
        ...

    def close(self) -> None:
        """Let go of the database."""
        ...


class StateStore(Protocol):
    """A database of sessions, open for one engine. Its methods raise sqlite3.Error and DatabaseUnusable."""

    name: str
    """What it is called in messages and in /status; nothing secret."""
    is_server: bool
    """Whether it is reached over a network, and may be away for a while."""
    shared: bool
    """Whether other engines may write: then the database says what there is, and memory may be behind it."""
    engine: str
    """Name of this engine among them."""

    @property
    def is_first(self) -> bool:
        """Whether no other engine has the database open, or will before `allow_other_engines`."""
        ...

    def open_writer(self) -> Connection:
        """The one connection that writes, with the schema up to date."""
        ...

    def open_reader(self) -> Connection:
        """A connection that only reads; its transactions see one moment."""
        ...

    def open_checkpointer(self) -> sqlite3.Connection | None:
        """A connection that moves what was committed to where it stays; None: that is not the program's affair."""
        ...

    def allow_other_engines(self) -> None:
        """The database is in order: other engines of the service may come."""
        ...

    def used_bytes(self, connection: Connection) -> int:
        """Bytes in use, free pages not counted."""
        ...

    def wrap_error(self, error: sqlite3.Error) -> DatabaseUnusable:
        """The same failure in words that name the database and the remedy."""
        ...

    def close(self) -> None:
        """Let another process have the database; connections are closed by who opened them."""
        ...
