"""PostgreSQL instead of SQLite: the same statements through a connection with the same interface.

Optional: needs psycopg (requirements-cluster.txt). Errors are raised as those of `sqlite3`, so the callers know one set
of errors. A server that is down raises `ServerUnavailable`; the next transaction reconnects. One that is connected but
silent is given up after a timeout.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sqlite3
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg

from state_pool.addresses import ServerAddress, parse_server_address
from state_pool.config import PoolConfig
from state_pool.disk import state_store
from state_pool.disk.migrations import MIGRATIONS, schema_version
from state_pool.disk.state_store import ServerUnavailable
from state_pool.errors import DatabaseUnusable

if TYPE_CHECKING:
    from psycopg.abc import PQGen

logger = logging.getLogger(__name__)

READ_TIMEOUT_S = 8.0
"""The kernel drops unacknowledged data after the same time. Lock waits get a quarter of it."""
_CHECK_INTERVAL_S = 0.1

_Found = TypeVar("_Found")


class TimeoutConnection(psycopg.Connection[Any]):
    """Closes itself with an OperationalError after `read_timeout_s` seconds of waiting without data."""

    read_timeout_s = float("inf")
    read_timed_out = False

    def wait(self, gen: PQGen[_Found], interval: float = _CHECK_INTERVAL_S, timeout: float | None = None) -> _Found:
        """See psycopg.Connection. All statements wait here."""
        return super().wait(self._with_timeout(gen), interval, timeout)

    def _with_timeout(self, steps: PQGen[_Found]) -> PQGen[_Found]:
        last_data_at = time.monotonic()
        try:
            interest = next(steps)
            while True:
                ready = yield interest
                now = time.monotonic()
                if ready:
                    last_data_at = now
                elif now - last_data_at >= self.read_timeout_s:
                    self.read_timed_out = True
                    self.pgconn.finish()
                    raise psycopg.OperationalError(
                        f"it is connected but has not answered for {self.read_timeout_s:g} s"
                    )
                interest = steps.send(ready)
        except StopIteration as stop:
            found: _Found = stop.value
            return found


CONNECT_TIMEOUT_S = 3
_SIZE_INTERVAL_S = 5.0
_SQL_REPLACEMENTS = (
    ("BEGIN IMMEDIATE", "BEGIN"),
    (" INDEXED BY sessions_by_updated", ""),
    ("(SELECT value FROM json_each(?))", "(SELECT value::bigint FROM json_array_elements_text(?::json))"),
)
_SNAPSHOT = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_TYPES = (("INTEGER", "BIGINT"), ("REAL", "DOUBLE PRECISION"), ("BLOB", "BYTEA"), (" WITHOUT ROWID", ""))
_TIMEOUT_STATEMENTS = ("SET idle_in_transaction_session_timeout = 5000", "SET lock_timeout = 2000")
"""An engine stopped within a transaction must not block the others. In ms."""
STATEMENT_TIMEOUT_SHARE = 0.75
"""Share of READ_TIMEOUT_S that a statement may take."""
_TABLES = ("sessions", "turns", "states", "state_chunks")


def _parse_address(config: PoolConfig) -> ServerAddress:
    """Parse the address in --state-db. Raises DatabaseUnusable."""
    try:
        return parse_server_address(config.state_db)
    except ValueError as error:
        raise DatabaseUnusable(f"session database: --state-db {error}") from None


class PostgresStore:
    """A PostgreSQL server as a `StateStore`. Engines of any machine may join at any time."""

    shared = True
    is_first = False

    def __init__(self, config: PoolConfig) -> None:
        """Raises DatabaseUnusable."""
        self._address = _parse_address(config)
        self.name = self._address.display_name
        self.engine = f"{socket.gethostname()}/{config.service or os.getpid()}/{config.engine}"
        """Unique among all hosts and services, stable over restarts."""
        self._measured = (0, 0.0)

    def open_writer(self) -> state_store.Connection:
        connection = Connection(self._address)
        with connection.without_timeouts():  # changing large tables takes long
            migrate(connection, self.name)
        return connection

    def before_close(self, connection: state_store.Connection) -> None: ...

    def open_reader(self) -> state_store.Connection:
        return Connection(self._address, reads_only=True)

    def open_checkpointer(self) -> None:
        """See `StateStore`: the server checkpoints by itself."""

    def allow_other_engines(self) -> None: ...

    def used_bytes(self, connection: state_store.Connection) -> int:
        """Return the size of the tables. Measured every few seconds, since it reads many files' sizes."""
        used, next_measurement = self._measured
        if time.monotonic() >= next_measurement:
            sizes = " + ".join(f"pg_total_relation_size('{table}')" for table in _TABLES)
            used = int(connection.execute(f"SELECT {sizes}").fetchone()[0])
            self._measured = (used, time.monotonic() + _SIZE_INTERVAL_S)
        return used

    def wrap_error(self, error: sqlite3.Error) -> DatabaseUnusable:
        return DatabaseUnusable(
            f"session database {self.name}: {error}; check the server, or name another database with --state-db"
        )

    def close(self) -> None: ...


class Connection:
    """A connection with sqlite3's interface. One thread at a time."""

    def __init__(self, address: ServerAddress, *, reads_only: bool = False) -> None:
        """Raises DatabaseUnusable, ServerUnavailable."""
        self._schema = f"rwkv_{address.schema}" if address.schema else ""
        self._address = address
        self._reads_only = reads_only
        self._connection: Any = None
        self._has_timeouts = True
        self._connect()

    def _connect(self) -> None:
        self.close()
        try:
            connection = TimeoutConnection.connect(
                self._address.dsn,
                autocommit=True,
                connect_timeout=CONNECT_TIMEOUT_S,
                prepare_threshold=2,
                keepalives_idle=5,
                keepalives_interval=2,
                keepalives_count=2,
                tcp_user_timeout=8000,
                application_name="rwkv-batch",
            )
        except psycopg.ProgrammingError:  # its message repeats the password or a part of it
            raise DatabaseUnusable(
                f"session database {self._address.display_name}: PostgreSQL cannot parse the user, the password or the "
                "options of this address; write all characters but letters and digits in them as %XX"
            ) from None
        except (psycopg.Error, OSError) as error:
            raise ServerUnavailable(str(error).strip()) from None
        self._connection = connection
        with self._translate_errors():
            self._set_timeouts()
            for statement in _TIMEOUT_STATEMENTS:
                connection.execute(statement)
            if self._schema:
                name = psycopg.sql.Identifier(self._schema)
                connection.execute(psycopg.sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(name))
                connection.execute(psycopg.sql.SQL("SET search_path TO {}").format(name))

    def execute(self, statement: str, parameters: Sequence[Any] = (), /) -> Any:
        """See `sqlite3.Connection.execute`. Reconnects a lost connection, unless a transaction is open."""
        if self.in_transaction or statement in ("COMMIT", "ROLLBACK"):
            return self._execute(statement, parameters)
        try:
            if self._connection.closed:
                self._connect()
            return self._execute(statement, parameters)
        except ServerUnavailable:
            if self._connection.read_timed_out:
                raise  # the server may still be running the statement
            self._connect()  # the server may be back, or only the connection was lost
            return self._execute(statement, parameters)

    def _execute(self, statement: str, parameters: Sequence[Any]) -> Any:
        with self._translate_errors():
            return self._connection.execute(self._translate(statement), [_value(one) for one in parameters] or None)

    def _translate(self, statement: str) -> str:
        if self._reads_only and statement == "BEGIN":
            return _SNAPSHOT
        for ours, theirs in _SQL_REPLACEMENTS:
            statement = statement.replace(ours, theirs)
        return statement.replace("?", "%s")

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Raise errors as those of sqlite3. After an error in a transaction, the caller must roll back."""
        try:
            yield
        except psycopg.IntegrityError as error:
            raise sqlite3.IntegrityError(str(error)) from None
        except (psycopg.OperationalError, psycopg.InterfaceError) as error:
            if self._connection.closed or isinstance(error, psycopg.errors.AdminShutdown):
                raise ServerUnavailable(str(error).strip()) from None
            raise sqlite3.OperationalError(str(error)) from None
        except (psycopg.DataError, psycopg.errors.DataCorrupted, psycopg.errors.IndexCorrupted) as error:
            raise sqlite3.DatabaseError(str(error)) from None
        except psycopg.Error as error:  # e.g. a missing right or a changed table: no row is damaged
            raise sqlite3.OperationalError(str(error)) from None

    @contextlib.contextmanager
    def without_timeouts(self) -> Iterator[None]:
        self._has_timeouts = False
        self._set_timeouts()
        try:
            yield
        finally:
            self._has_timeouts = True
            with contextlib.suppress(psycopg.Error):  # the first error counts; a new connection has timeouts
                self._set_timeouts()

    def _set_timeouts(self) -> None:
        """Set the server's timeout below the connection's. No statement then runs on after it is given up."""
        self._connection.read_timeout_s = READ_TIMEOUT_S if self._has_timeouts else float("inf")
        statement_timeout_ms = round(1000 * STATEMENT_TIMEOUT_SHARE * READ_TIMEOUT_S) if self._has_timeouts else 0
        self._connection.execute(f"SET statement_timeout = {statement_timeout_ms}")

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open. A failed one must be rolled back too."""
        if self._connection.closed:
            return False
        return bool(self._connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


def _value(parameter: Any) -> Any:
    return bytes(parameter) if isinstance(parameter, memoryview) else parameter


def migrate(connection: Connection, display_name: str) -> None:
    """Migrate the tables to this schema, one engine at a time. Raises DatabaseUnusable for a newer schema."""
    connection.execute("BEGIN")
    connection.execute("SELECT pg_advisory_xact_lock(7294)")
    try:
        found = schema_version(connection, display_name, _to_postgres)
    except DatabaseUnusable:
        connection.execute("ROLLBACK")
        raise
    for version, (name, statements) in enumerate(MIGRATIONS[found:], found + 1):
        for statement in statements:
            connection.execute(_to_postgres(statement))
        connection.execute("INSERT INTO schema_migrations VALUES (?, ?, ?)", (version, name, time.time()))
    connection.execute("COMMIT")


def _to_postgres(statement: str) -> str:
    """Translate a schema statement to PostgreSQL's types. Names sort by bytes, as in SQLite."""
    for ours, theirs in _TYPES:
        statement = statement.replace(ours, theirs)
    return statement.replace("session_id TEXT", 'session_id TEXT COLLATE "C"')
