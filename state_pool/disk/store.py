"""L3 as the engine thread sees it: jobs are queued, callbacks return through `deliver`."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import sqlite3
import time
from collections.abc import Callable
from typing import Any

from state_pool.config import DEFAULT_SESSION_TTL_S, PoolConfig
from state_pool.disk.checkpoint_objects import CheckpointObjects, load_key_prefix, open_checkpoint_store
from state_pool.disk.database import SqliteStore
from state_pool.disk.directory import read_usage_times, stored_sessions
from state_pool.disk.membership import Membership, begin_with_retry, remove_all_engines
from state_pool.disk.operations import Checkpoint, Delete, Done, ListQuery, SmallJob, StoredSession
from state_pool.disk.reader import OnListed, Reader
from state_pool.disk.state_store import Connection, StateStore
from state_pool.disk.statements import model_name, put_model, read_setting, sessions_of_other_models
from state_pool.disk.writer import Writer
from state_pool.errors import DatabaseUnusable
from state_pool.expiry import UsageTimes
from state_pool.layout import Arena, part_sizes
from state_pool.sessions import Session, SessionIndex

logger = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 3600.0


class CompletionQueue:
    """Callbacks from other threads to the engine thread: a call queues one, `run` runs them."""

    def __init__(self, wake: Callable[[], None] | None = None) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = wake

    def __call__(self, callback: Callable[[], None]) -> None:
        """Queue a callback for the next `run`. Any thread."""
        self._queue.put(callback)
        self.wake()

    def wake(self) -> None:
        """Wake the engine thread. Any thread."""
        if self._wake is not None:
            self._wake()

    @property
    def waiting(self) -> bool:
        return not self._queue.empty()

    def run(self) -> None:
        """Run the queued callbacks. Engine thread only."""
        while not self._queue.empty():
            self._queue.get_nowait()()


class Store:
    """The database and its threads. Raises DatabaseUnusable if it cannot be opened."""

    def __init__(self, config: PoolConfig, arena: Arena, deliver: CompletionQueue) -> None:
        self._stored: list[StoredSession] = []
        self._numbers: list[tuple[str, int]] = []
        self.other_models: list[dict[str, Any]] = []
        """Models that sessions had at the start, other than this one."""
        self.session_ttl = 0.0
        """0: never"""
        self.usage_times = UsageTimes()
        """Of the sessions found at the start, if sessions expire."""
        self._limit_bytes = int(config.state_db_max_gb * 1e9)
        self._database = _open_database(config)
        self.path, self.shared = self._database.name, self._database.shared
        self._objects: CheckpointObjects | None = None
        self._next_sweep = 0.0
        with contextlib.ExitStack() as opened:
            opened.callback(self._database.close)
            try:
                self._open(opened, config, arena, deliver)
            except sqlite3.Error as error:
                raise self._database.wrap_error(error) from None
            opened.pop_all()
        self._next_row = self.writer.next_row
        self._deleted: set[int] = set()
        """Rows whose delete is not on disk yet."""
        self.pending = 0
        """jobs without a delivered result"""

    def _open(self, opened: contextlib.ExitStack, config: PoolConfig, arena: Arena, deliver: CompletionQueue) -> None:
        """Open the database alone or as one of several engines. The first of those cleans up."""
        database = self._database
        connection = database.open_writer()
        opened.callback(connection.close)
        opened.callback(_record_close, database, connection)
        if database.is_first:
            remove_all_engines(connection)
        if not database.shared:
            self._stored = stored_sessions(connection, "s.hidden = 0")
            self._numbers = connection.execute("SELECT session_id, largest FROM dialogue_numbers").fetchall()
        self._find_other_models(config, connection, arena.fingerprint)
        self.session_ttl = _session_ttl(config, connection, database.name)
        if self.session_ttl > 0:
            self.usage_times = read_usage_times(connection, self.session_ttl)
        member = Membership(connection, database.engine) if database.shared else None
        reader = database.open_reader()
        opened.callback(reader.close)
        if config.checkpoint_store:
            self._objects = _open_objects(config, connection, deliver)
            opened.callback(self._objects.close)
        self.writer = Writer(
            database,
            connection,
            layout=arena.layout,
            fingerprint=arena.fingerprint,
            retain=config.retain_tokens,
            queue=config.transfer_states,
            deliver=deliver,
            on_death=deliver.wake,
            member=member,
            sweep=database.is_first,
            objects=self._objects,
            stores_objects=sum(part_sizes(arena.layout).values()) >= config.checkpoint_store_min_mb * (1 << 20),
        )
        database.allow_other_engines()
        self.reader = Reader(reader, arena, deliver, deliver.wake, self._objects)

    def _find_other_models(self, config: PoolConfig, connection: Connection, fingerprint: str) -> None:
        """Store this model's name, and report the sessions of other models."""
        if config.model_file:
            begin_with_retry(connection)
            put_model(connection, fingerprint, config.model_file)
            connection.execute("COMMIT")
        for other, count in sessions_of_other_models(connection, fingerprint):
            name = model_name(connection, other)
            self.other_models.append({"model": name, "fingerprint": other, "sessions": count})
            logger.warning(
                "%d sessions of %s belong to another model (%s, fingerprint %s): those whose tokens are all kept are "
                "rebuilt at their next turn, the others answer 409 until that model is started",
                count,
                self.path,
                name,
                other,
            )

    def load_sessions(self, index: SessionIndex) -> None:
        """Add every stored session to the index, oldest first. A shared database is queried per session instead."""
        by_row = {stored.session.row_id: build_session(stored) for stored in self._stored}
        for stored in self._stored:
            by_row[stored.session.row_id].parent = (
                by_row.get(stored.session.parent) if stored.session.parent is not None else None
            )
        for session in sorted(by_row.values(), key=lambda s: s.updated):
            index.add(session)
        for session_id, largest in self._numbers:
            index.retire_number(session_id, largest)
        self._stored, self._numbers = [], []

    def next_row(self) -> int:
        self._next_row += 1
        return self._next_row - 1

    @property
    def failure(self) -> str | None:
        """The error of a dead thread, or None. Its jobs never finish."""
        objects_failure = None if self._objects is None else self._objects.failure
        return self.writer.failure or self.reader.failure or objects_failure

    @property
    def num_queued_states(self) -> int:
        return self.writer.queued[1]

    @property
    def degraded(self) -> str | None:
        """The last error of the writer or of the checkpoint store; None after a success."""
        return self.writer.stats.degraded or (None if self._objects is None else self._objects.stats.trouble)

    @property
    def over_limit(self) -> bool:
        return bool(self._limit_bytes) and self.excess_bytes > 0

    @property
    def excess_bytes(self) -> int:
        return self.writer.stats.used_bytes + self.writer.stats.object_bytes - self._limit_bytes

    @property
    def has_pending_deletes(self) -> bool:
        """Whether deleted sessions may still take space in the file."""
        return self.writer.is_collecting_garbage or self.writer.queued[0] > 0

    def submit(self, job: SmallJob, done: Done) -> None:
        if isinstance(job, Delete):
            self._deleted.update(job.row_ids)
            done = self._until_deleted(job, done)
        self.writer.submit(job, self._count_pending(done))

    def submit_state(self, job: Checkpoint, done: Done) -> None:
        """Queue a state. Check `has_room_for_state` first."""
        self.writer.submit_state(job, self._count_pending(done))

    @property
    def engines(self) -> list[str]:
        return [] if self.writer.member is None else list(self.writer.member.names)

    @property
    def is_cleanup_leader(self) -> bool:
        """Whether this engine deletes expired sessions for all engines."""
        return self.writer.member is not None and self.writer.member.is_first

    def list_sessions(self, query: ListQuery, on_listed: OnListed) -> None:
        """Queue a page of the list. Leaves out sessions whose delete is not on disk yet."""
        self.reader.list_sessions(dataclasses.replace(query, deleted=frozenset(self._deleted)), on_listed)

    @property
    def checkpoint_store(self) -> dict[str, Any] | None:
        """Return the checkpoint store's name and counters; None: there is none."""
        objects = self._objects
        return None if objects is None else {"name": objects.name, **dataclasses.asdict(objects.stats)}

    def sweep_objects(self) -> None:
        """Once an hour, on one engine, delete the unused objects."""
        now, is_leader = time.monotonic(), self.writer.member is None or self.is_cleanup_leader
        if self._objects is not None and is_leader and now >= self._next_sweep:
            self._next_sweep = now + SWEEP_INTERVAL_S
            self._objects.sweep(self.reader.find_used_keys)

    def close(self) -> None:
        """Write the queued jobs and close the database. Blocks."""
        self.reader.close()
        self.writer.close()
        if self._objects is not None:
            self._objects.close()
        self._database.close()

    def _until_deleted(self, job: Delete, done: Done) -> Done:
        def outcome(error: Exception | None) -> None:
            if error is None:
                self._deleted.difference_update(job.row_ids)
            done(error)

        return outcome

    def _count_pending(self, done: Done) -> Done:
        self.pending += 1

        def outcome(error: Exception | None) -> None:
            self.pending -= 1
            done(error)

        return outcome


def _open_database(config: PoolConfig) -> StateStore:
    """Open the file or server of --state-db. Raises DatabaseUnusable."""
    if config.on_server:
        try:
            from state_pool.disk.postgres import PostgresStore  # its driver is slow to import, and optional
        except ImportError as error:
            raise DatabaseUnusable(
                f"session database: PostgreSQL needs psycopg, which cannot be imported ({error}); "
                "pip install -r requirements-cluster.txt"
            ) from None
        database: StateStore = PostgresStore(config)
    else:
        database = SqliteStore(config)
    if database.shared and config.durability == "lazy":
        database.close()
        raise DatabaseUnusable(
            f"session database {database.name}: several engines share it, and with --durability lazy no engine sees "
            "the turns that another has not written yet; use log or turn"
        )
    return database


def _record_close(database: StateStore, connection: Connection) -> None:
    """Record a close after a failed start. The error of the start counts, not one of closing."""
    with contextlib.suppress(sqlite3.Error):
        database.before_close(connection)


def _session_ttl(config: PoolConfig, connection: Connection, database: str) -> float:
    """Return the setting, or else the default of this database."""
    if config.session_ttl is not None:
        return config.session_ttl
    stored = read_setting(connection, "session_ttl")
    if stored is None:
        return DEFAULT_SESSION_TTL_S
    logger.info(
        "session database %s has sessions of an earlier version, which never expire; --session-ttl %d deletes those "
        "without a turn for 30 days",
        database,
        DEFAULT_SESSION_TTL_S,
    )
    return float(stored)


def _open_objects(config: PoolConfig, connection: Connection, deliver: CompletionQueue) -> CheckpointObjects:
    """Open the objects in the checkpoint store. Raises DatabaseUnusable."""
    store = open_checkpoint_store(config.checkpoint_store)
    key_prefix = load_key_prefix(store, connection)
    return CheckpointObjects(store, key_prefix, config.transfer_states, deliver.wake)


def build_session(stored: StoredSession) -> Session:
    """Build a session from its row, without its parent."""
    row = stored.session
    session = Session(row.key, row.row_id, row.created, row.updated)
    session.origin, session.adapter = row.origin, row.adapter
    session.turn, session.num_tokens = row.turn, row.num_tokens
    session.disk_turn, session.disk_tokens = stored.disk_turn, stored.disk_tokens
    session.unusable = stored.quarantined
    return session
