"""States as objects of a checkpoint store.

Threads put, get and delete them. A checkpoint is a session's stored state. The store is a folder or an S3 bucket
(--checkpoint-store); each database has its own key prefix in it.

Storing a state takes three steps:
1. Put the object under a new key.
2. Commit the row with its key, in the transaction that checks the session's fence (`statements.put_state`).
3. Delete the object that it replaces.

A crash in between leaves an object without a row. A sweep deletes such objects after an hour.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from state_pool.addresses import FolderAddress, parse_checkpoint_address
from state_pool.disk.checkpoint_store import (
    CheckpointStore,
    CheckpointStoreUnavailable,
    FolderStore,
    ListedObject,
    ObjectNotFound,
)
from state_pool.disk.membership import begin_with_retry
from state_pool.disk.operations import ObjectLocation, StoredObject
from state_pool.disk.state_store import Connection
from state_pool.disk.worker_threads import HUNG_CHECK_INTERVAL_S, JOB_TIMEOUT_S, OnceCallback, PoolThread, WorkerThreads
from state_pool.errors import DatabaseUnusable
from state_pool.layout import HostState, checksum_pieces, part_sizes, split_chunks

logger = logging.getLogger(__name__)

ORPHAN_AGE_S = 3600.0
"""Much longer than the time between put and commit, and than the clocks' difference."""
_MARKER = "of-this-database"
_MARKER_TEXT = (
    b"The objects next to this one are states of sessions; the database that they belong to names this folder.\n"
)
_MAX_PENDING_DELETES = 10_000
"""Limit of queued deletes. The next sweep finds the rest."""
_STATE_DIGITS = 16


@dataclass(slots=True)
class ObjectStats:
    """Counters of the object threads. Other threads only read them."""

    puts: int = 0
    put_bytes: int = 0
    gets: int = 0
    deletes: int = 0
    orphans: int = 0
    """Deleted objects that no database row named."""
    missing: int = 0
    """Objects that a database row names but that were missing or damaged."""
    trouble: str | None = None
    """None after a success."""


class ObjectUnusable(Exception):  # noqa: N818 - names what happened
    """The object is missing, or differs from the one that was put."""


OnPut = Callable[[StoredObject | Exception], None]
OnFetched = Callable[[dict[str, bytes] | Exception], None]
"""Callback with the outcome. Runs on one of the object threads."""
FindUsedKeys = Callable[[list[int], Callable[[set[str] | None], None]], None]
"""Looks up the object keys in the rows of these states, and passes them to a callback; None if they cannot be read."""


class CheckpointObjects:
    """The objects of one database. Any thread may call; callbacks run on the object threads."""

    def __init__(self, store: CheckpointStore, key_prefix: str, threads: int, on_death: Callable[[], None]) -> None:
        """`key_prefix`: of this database's keys. `threads`: concurrent transfers."""
        self.stats = ObjectStats()
        self.name = store.name
        self._store = store
        self._key_prefix = key_prefix
        self._transfers = WorkerThreads("state-pool-objects", threads, on_death)
        self._cleaner = WorkerThreads("state-pool-object-cleaner", 1, on_death)
        self._sweeping: Iterator[list[ListedObject]] | None = None
        self._closing = threading.Event()
        self._watch = PoolThread("state-pool-object-watch", self._watch_for_hung_jobs, on_death)

    @property
    def failure(self) -> str | None:
        return self._transfers.failure or self._cleaner.failure or self._watch.failure

    def put(self, state_number: int, session: int, host: HostState, part_names: Sequence[str], done: OnPut) -> None:
        """Put a state's bytes under a new key: the parts of `host` in this order.

        session: the session's row id. The caller, the database's writer thread, bounds the number of states.
        """
        key = f"{self._key_prefix}/{state_number:0{_STATE_DIGITS}x}-{secrets.token_hex(8)}"
        report: OnceCallback[StoredObject | Exception] = OnceCallback(done)

        def work() -> None:
            outcome = self._try_put(key, state_number, session, host, part_names)
            if not report(lambda: outcome) and isinstance(outcome, StoredObject):
                self.delete(key)

        self._transfers.submit(work, lambda: report(self._timeout_error))

    def get(self, location: ObjectLocation, done: OnFetched) -> None:
        """Fetch and verify a state. The pool bounds the number of loads."""
        report: OnceCallback[dict[str, bytes] | Exception] = OnceCallback(done)

        def work() -> None:
            outcome = self._try_get(location)
            report(lambda: outcome)

        self._transfers.submit(work, lambda: report(self._timeout_error))

    def delete(self, key: str) -> None:
        if self._cleaner.waiting < _MAX_PENDING_DELETES:
            self._cleaner.submit(lambda: self._delete([key]))

    def sweep(self, find_used_keys: FindUsedKeys) -> None:
        """Delete all objects without a row, batch by batch. Does nothing while a sweep is running."""
        if self._sweeping is None:
            self._sweeping = self._store.list(self._key_prefix)
            self._cleaner.submit(lambda: self._sweep(find_used_keys))

    def close(self) -> None:
        """Finish the queued work and end the threads. Blocks, but not for threads that hang in the store."""
        self._transfers.close()
        self._cleaner.close()
        self._closing.set()
        self._watch.join()

    def _watch_for_hung_jobs(self) -> None:
        while not self._closing.wait(HUNG_CHECK_INTERVAL_S):
            self._transfers.time_out_hung_jobs()

    def _timeout_error(self) -> Exception:
        return self._record_error(
            CheckpointStoreUnavailable(
                f"it has not answered for {JOB_TIMEOUT_S:g} s; check its server, or the folder's mount"
            )
        )

    def _try_put(
        self, key: str, state_number: int, session: int, host: HostState, part_names: Sequence[str]
    ) -> StoredObject | Exception:
        try:
            pieces = list(split_chunks(host.parts(), part_names))
            data, checksum = b"".join(pieces), checksum_pieces(pieces, state_number, session)
            del pieces  # frees their views of the host buffer before the slow put
            self._store.put(key, data)
        except (CheckpointStoreUnavailable, MemoryError, ValueError) as error:  # others may succeed
            return self._record_error(error)
        self.stats.trouble = None
        self.stats.puts += 1
        self.stats.put_bytes += len(data)
        return StoredObject(key, checksum)

    def _try_get(self, location: ObjectLocation) -> dict[str, bytes] | Exception:
        try:
            parts = self._fetch_verified(location)
        except ObjectNotFound:
            return self._missing(location)
        except ObjectUnusable as error:
            self.stats.missing += 1
            return error
        except (CheckpointStoreUnavailable, MemoryError) as error:  # others may succeed
            return self._record_error(error)
        self.stats.trouble = None
        self.stats.gets += 1
        return parts

    def _fetch_verified(self, location: ObjectLocation) -> dict[str, bytes]:
        """Get the state's parts. Tries a second time if they do not verify.

        A mismatch may be a transfer error, or a proxy's page in place of any object. The object counts as damaged only
        if the marker reads correctly and a second read still differs. Raises ObjectNotFound, ObjectUnusable,
        CheckpointStoreUnavailable.
        """
        with contextlib.suppress(ObjectUnusable):
            return _verified_parts(location, self._store.get(location.stored.key))
        if not _has_marker(self._store, self._key_prefix):
            raise CheckpointStoreUnavailable(
                "its answers differ from the objects put; check its server, and the proxies before it"
            )
        return _verified_parts(location, self._store.get(location.stored.key))

    def _missing(self, location: ObjectLocation) -> Exception:
        """Return the error for a missing object. A store that is not mounted looks the same, so check the marker."""
        try:
            is_there = _has_marker(self._store, self._key_prefix)
        except (ObjectNotFound, CheckpointStoreUnavailable):
            is_there = False
        if not is_there:
            return self._record_error(
                CheckpointStoreUnavailable("it has no objects of this database any more; check its mount or bucket")
            )
        self.stats.missing += 1
        return ObjectUnusable(f"the object {location.stored.key} is missing from the checkpoint store {self.name}")

    def _record_error(self, error: Exception) -> Exception:
        """Record an error of the store for /status. Returns it with the store's name."""
        unavailable = CheckpointStoreUnavailable(f"the checkpoint store {self.name} cannot be used ({error})")
        self.stats.trouble = str(unavailable)
        return unavailable

    def _delete(self, keys: list[str]) -> None:
        for key in keys:
            try:
                self._store.delete(key)
            except CheckpointStoreUnavailable as error:  # a later sweep finds it
                logger.warning("%s: the object is deleted later", self._record_error(error))
                return
            self.stats.deletes += 1

    def _sweep(self, find_used_keys: FindUsedKeys) -> None:
        assert self._sweeping is not None
        try:
            batch = next(self._sweeping, None)
        except CheckpointStoreUnavailable as error:  # a later sweep starts again
            logger.warning("%s: unused objects are deleted later", self._record_error(error))
            batch = None
        if batch is None:
            self._end_sweep()
            return
        old = {listed.key for listed in batch if listed.age_s > ORPHAN_AGE_S} - {f"{self._key_prefix}/{_MARKER}"}

        def on_used_keys(used: set[str] | None) -> None:
            if used is None:  # the server is down, so each query would wait; a later sweep retries
                self._cleaner.submit(self._end_sweep)
                return
            self._cleaner.submit(lambda: self._delete_orphans(sorted(old - used)))
            self._cleaner.submit(lambda: self._sweep(find_used_keys))

        states = sorted({state for key in old if (state := _state_number(key)) is not None})
        if states:
            find_used_keys(states, on_used_keys)
        else:
            on_used_keys(set())

    def _end_sweep(self) -> None:
        self._sweeping = None

    def _delete_orphans(self, keys: list[str]) -> None:
        before = self.stats.deletes
        self._delete(keys)
        self.stats.orphans += self.stats.deletes - before


def _has_marker(store: CheckpointStore, key_prefix: str) -> bool:
    """Whether the marker object is intact. Raises ObjectNotFound, CheckpointStoreUnavailable."""
    return store.get(f"{key_prefix}/{_MARKER}") == _MARKER_TEXT


def _verified_parts(location: ObjectLocation, data: bytes) -> dict[str, bytes]:
    """Split an object's data into parts. Raises ObjectUnusable."""
    sizes = part_sizes(location.layout)
    if (
        len(data) != sum(sizes.values())
        or checksum_pieces([data], location.state, location.session) != location.stored.checksum
    ):
        raise ObjectUnusable(f"the object {location.stored.key} of the checkpoint store is damaged")
    parts, at = {}, 0
    for name, size in sizes.items():
        parts[name] = data[at : at + size]
        at += size
    return parts


def _state_number(key: str) -> int | None:
    """Return the state number in a key. None for an object that this program did not put."""
    try:
        return int(key.rpartition("/")[2][:_STATE_DIGITS], 16)
    except ValueError:
        return None


def load_key_prefix(store: CheckpointStore, connection: Connection) -> str:
    """Return the prefix of this database's object keys.

    Creates it at the first start. Raises DatabaseUnusable if the store does not answer, or lacks the objects that the
    database names.
    """
    begin_with_retry(connection)
    connection.execute(
        "INSERT INTO checkpoint_home(id, name) VALUES (1, ?) ON CONFLICT(id) DO NOTHING", (secrets.token_hex(8),)
    )
    key_prefix = str(connection.execute("SELECT name FROM checkpoint_home WHERE id = 1").fetchone()[0])
    has_objects = connection.execute("SELECT 1 FROM states WHERE object_key IS NOT NULL LIMIT 1").fetchone() is not None
    connection.execute("COMMIT")
    try:
        try:
            store.get(f"{key_prefix}/{_MARKER}")
        except ObjectNotFound:
            if has_objects:
                raise DatabaseUnusable(
                    f"checkpoint store {store.name}: it has none of the session database's states (no key begins with "
                    f"{key_prefix}); name the store that has them, with --checkpoint-store"
                ) from None
            store.prepare(key_prefix)
            store.put(f"{key_prefix}/{_MARKER}", _MARKER_TEXT)
    except CheckpointStoreUnavailable as error:
        raise DatabaseUnusable(f"checkpoint store {store.name}: {error}") from None
    return key_prefix


def open_checkpoint_store(address: str) -> CheckpointStore:
    """Open the folder or S3 bucket of --checkpoint-store. Raises DatabaseUnusable."""
    try:
        location = parse_checkpoint_address(address)
    except ValueError as error:
        raise DatabaseUnusable(f"checkpoint store: {error}") from None
    if isinstance(location, FolderAddress):
        return FolderStore(location.folder)
    from state_pool.disk.s3 import S3Store  # its package is slow to import

    return S3Store(location)
