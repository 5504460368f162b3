"""The database schema as numbered migrations. Each is one transaction with its own record."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable

from state_pool.disk.state_store import Connection
from state_pool.errors import DatabaseUnusable

logger = logging.getLogger(__name__)

_SESSIONS = """
CREATE TABLE sessions(
  id INTEGER PRIMARY KEY,
  session_id TEXT NOT NULL,
  dialogue INTEGER NOT NULL,
  parent INTEGER,
  fingerprint TEXT NOT NULL,
  turn INTEGER NOT NULL,
  num_tokens INTEGER NOT NULL,
  created REAL NOT NULL,
  updated REAL NOT NULL,
  hidden INTEGER NOT NULL DEFAULT 0,
  quarantined TEXT)
"""
_TURNS = """
CREATE TABLE turns(
  session INTEGER NOT NULL,
  turn INTEGER NOT NULL,
  num_tokens INTEGER NOT NULL,
  tokens BLOB NOT NULL,
  checksum BLOB NOT NULL,
  created REAL NOT NULL,
  PRIMARY KEY(session, turn)) WITHOUT ROWID
"""
_STATES = """
CREATE TABLE states(
  id INTEGER PRIMARY KEY,
  session INTEGER NOT NULL UNIQUE,
  turn INTEGER NOT NULL,
  num_tokens INTEGER NOT NULL,
  fingerprint TEXT NOT NULL,
  layout_version INTEGER NOT NULL,
  layout TEXT NOT NULL,
  bytes INTEGER NOT NULL,
  checksum BLOB NOT NULL,
  created REAL NOT NULL)
"""
_CHUNKS = "CREATE TABLE state_chunks(id INTEGER PRIMARY KEY, checksum INTEGER NOT NULL, data BLOB NOT NULL)"
_DIRECTORY = """
CREATE TABLE directory(
  session_id TEXT NOT NULL,
  dialogue INTEGER NOT NULL,
  holder INTEGER NOT NULL,
  epoch INTEGER NOT NULL,
  busy INTEGER NOT NULL,
  PRIMARY KEY(session_id, dialogue)) WITHOUT ROWID
"""

MIGRATIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "sessions, their turns and their states",
        (
            _SESSIONS,
            "CREATE UNIQUE INDEX sessions_by_name ON sessions(session_id, dialogue) WHERE hidden = 0",
            "CREATE INDEX sessions_by_parent ON sessions(parent) WHERE parent IS NOT NULL",
            _TURNS,
            _STATES,
            _CHUNKS,
        ),
    ),
    (
        "the largest dialogue number that a session has ever had, so that none is given twice",
        (
            "CREATE TABLE dialogue_numbers(session_id TEXT PRIMARY KEY, largest INTEGER NOT NULL) WITHOUT ROWID",
            "INSERT INTO dialogue_numbers SELECT session_id, max(dialogue) FROM sessions WHERE dialogue > 0 "
            "GROUP BY session_id",
        ),
    ),
    (
        "sessions by their last turn, so that a page of the list is read without reading all of them",
        ("CREATE INDEX sessions_by_updated ON sessions(updated) WHERE hidden = 0",),
    ),
    (
        "the tuned state that a session began from: its name, and the digest of its numbers",
        ("ALTER TABLE sessions ADD COLUMN origin_name TEXT", "ALTER TABLE sessions ADD COLUMN origin_digest TEXT"),
    ),
    (
        "engines that share the database, and which of them has a session",
        (
            "CREATE TABLE engines(id INTEGER PRIMARY KEY, name TEXT NOT NULL, beat INTEGER NOT NULL)",
            "CREATE TABLE engine_numbers(last INTEGER NOT NULL)",
            "INSERT INTO engine_numbers(last) VALUES (0)",
            _DIRECTORY,
        ),
    ),
    (
        "states that are objects of a checkpoint store, and what the keys of this database's objects begin with",
        (
            "ALTER TABLE states ADD COLUMN object_key TEXT",
            "ALTER TABLE states ADD COLUMN object_checksum BLOB",
            "CREATE INDEX states_in_objects ON states(bytes) WHERE object_key IS NOT NULL",
            "CREATE TABLE checkpoint_home(id INTEGER PRIMARY KEY, name TEXT NOT NULL)",
        ),
    ),
    (
        "settings of the database, models that wrote it, and sessions whose log is kept",
        (
            "CREATE TABLE pool_settings(name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
            # Sessions of earlier schemas were stored without an expiry.
            "INSERT INTO pool_settings SELECT 'session_ttl', '0' WHERE EXISTS (SELECT 1 FROM sessions)",
            "CREATE TABLE models(fingerprint TEXT PRIMARY KEY, name TEXT NOT NULL) WITHOUT ROWID",
            "ALTER TABLE sessions ADD COLUMN keeps_log INTEGER NOT NULL DEFAULT 0",
        ),
    ),
)
"""(name, statements) in order; the first is version 1. Never change a released one: append another."""

SCHEMA_VERSION = len(MIGRATIONS)


def schema_version(connection: Connection, display_name: str, translate: Callable[[str], str] = str) -> int:
    """Return the database's version; 0: it is new. Raises DatabaseUnusable if a newer program wrote it.

    `translate`: a schema statement to the database's own SQL.
    """
    connection.execute(
        translate(
            "CREATE TABLE IF NOT EXISTS schema_migrations("
            "version INTEGER PRIMARY KEY, name TEXT NOT NULL, applied REAL NOT NULL)"
        )
    )
    found = int(connection.execute("SELECT coalesce(max(version), 0) FROM schema_migrations").fetchone()[0])
    if found > SCHEMA_VERSION:
        raise DatabaseUnusable(
            f"session database {display_name} has schema {found}, this version knows up to {SCHEMA_VERSION}: "
            "start the newer version, or name another database with --state-db"
        )
    if 0 < found < SCHEMA_VERSION:
        logger.info("session database %s has schema %d: migrating it to %d", display_name, found, SCHEMA_VERSION)
    return found


def migrate(connection: sqlite3.Connection, path: str, keep_copy: Callable[[int], None] | None = None) -> None:
    """Migrate an SQLite file to SCHEMA_VERSION. Raises DatabaseUnusable if a newer program wrote it.

    `keep_copy`: called before a migration with the version so far.
    """
    found = schema_version(connection, path)
    started_at = time.monotonic()
    if 0 < found < SCHEMA_VERSION and keep_copy is not None:
        keep_copy(found)
    for version in range(found + 1, SCHEMA_VERSION + 1):
        _apply(connection, version)
    if 0 < found < SCHEMA_VERSION:
        logger.info("migrated %s to schema %d in %.1f s", path, SCHEMA_VERSION, time.monotonic() - started_at)


def _apply(connection: sqlite3.Connection, version: int) -> None:
    name, statements = MIGRATIONS[version - 1]
    connection.execute("BEGIN IMMEDIATE")
    try:
        for statement in statements:
            connection.execute(statement)
        connection.execute(
            "INSERT INTO schema_migrations(version, name, applied) VALUES (?, ?, ?)", (version, name, time.time())
        )
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
