"""States as objects of a checkpoint store, and the threads that put, get and delete them.

An object is put under a new name first; the row that names it is committed by the writer (`statements.put_state`), in
the transaction that compares the epoch; then the object that it replaces is deleted. What a crash leaves between these
is an object that no row names: one that is older than an hour is deleted by a sweep.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from state_pool.arena import HostState
from state_pool.checkpoint_address import FolderAddress, parse_checkpoint_address
from state_pool.codec import checksum_pieces, part_sizes, split_chunks
from state_pool.disk.checkpoint_store import CheckpointStore, CheckpointStoreUnavailable, ListedObject, ObjectNotFound
from state_pool.disk.folder import FolderStore
from state_pool.disk.membership import begin_with_retry
from state_pool.disk.operations import ObjectLocation, StoredObject
from state_pool.disk.state_store import Connection
from state_pool.disk.thread import PoolThread
from state_pool.disk.worker_threads import HUNG_CHECK_INTERVAL_S, JOB_TIMEOUT_S, OnceCallback, WorkerThreads
from state_pool.errors import DatabaseUnusable

logger = logging.getLogger(__name__)

ORPHAN_AGE_S = 3600.0
"""Far more than may lie between an object's put and its commit, and than clocks differ by."""
_MARKER = "of-this-database"
_MARKER_TEXT = (
    b"The objects beside this one are states of sessions; the database that they belong to names this folder.\n"
)
_MAX_PENDING_DELETES = 10_000
"""Waiting; more are left to the next sweep."""
_STATE_DIGITS = 16


@dataclass(slots=True)
class ObjectStats:
    """Counters of the threads; others only read them."""

    puts: int = 0
    put_bytes: int = 0
    gets: int = 0
    deletes: int = 0
    orphans: int = 0
    """Deleted, which no row named."""
    missing: int = 0
    """Objects that a row named and that were not there, or damaged."""
    trouble: str | None = None
    """Why the store could not be used the last time; None since it could."""


class ObjectCorrupted(Exception):  # noqa: N818 - names what happened
    """The object is not there, or is not what was put."""


OnPut = Callable[[StoredObject | Exception], None]
OnFetched = Callable[[dict[str, bytes] | Exception], None]
"""Called on a thread of the objects."""
FindUsedKeys = Callable[[list[int], Callable[[set[str] | None], None]], None]
"""Given numbers of states, tells (on any thread) the keys that rows of theirs name; None: that could not be read."""


class CheckpointObjects:
    """The objects of one database. Any thread may ask; answers come on the threads here."""

    def __init__(self, store: CheckpointStore, key_prefix: str, threads: int, on_death: Callable[[], None]) -> None:
        """`key_prefix`: what the keys of this database's objects begin with; `threads`: transfers at once."""
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
        """Why one of the threads is gone."""
        return self._transfers.failure or self._cleaner.failure or self._watch.failure

    def put(self, state: int, session: int, host: HostState, order: Sequence[str], done: OnPut) -> None:
        """Put a state's bytes under a new name; bounded by the writer, which has so many states under way."""
        key = f"{self._key_prefix}/{state:0{_STATE_DIGITS}x}-{secrets.token_hex(8)}"
        report: OnceCallback[StoredObject | Exception] = OnceCallback(done)

        def work() -> None:
            outcome = self._try_put(key, state, session, host, order)
            if not report(lambda: outcome) and isinstance(outcome, StoredObject):
                self.delete(key)

        self._transfers.submit(work, lambda: report(self._timeout_error))

    def get(self, location: ObjectLocation, done: OnFetched) -> None:
        """Fetch and verify a state; bounded by the pool, which loads so many sessions at once."""
        report: OnceCallback[dict[str, bytes] | Exception] = OnceCallback(done)

        def work() -> None:
            outcome = self._try_get(location)
            report(lambda: outcome)

        self._transfers.submit(work, lambda: report(self._timeout_error))

    def delete(self, key: str) -> None:
        """Delete an object that no row names any more."""
        if self._cleaner.waiting < _MAX_PENDING_DELETES:
            self._cleaner.submit(lambda: self._delete([key]))

    def sweep(self, find_used_keys: FindUsedKeys) -> None:
        """Delete the objects that no row names, batch by batch; nothing while that goes on from the last time."""
        if self._sweeping is None:
            self._sweeping = self._store.list(self._key_prefix)
            self._cleaner.submit(lambda: self._sweep(find_used_keys))

    def close(self) -> None:
        """Finish what was asked, end the threads; those that a store holds for ever are left. Blocks."""
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
                f"it has not answered for {JOB_TIMEOUT_S:g} s; see to its server, or the folder's mount"
            )
        )

    def _try_put(
        self, key: str, state: int, session: int, host: HostState, order: Sequence[str]
    ) -> StoredObject | Exception:
        try:
            pieces = list(split_chunks(host.parts(), order))
            data, checksum = b"".join(pieces), checksum_pieces(pieces, state, session)
            del pieces  # the buffer is another state's, once this one has been given up
            self._store.put(key, data)
        except (CheckpointStoreUnavailable, MemoryError, ValueError) as error:  # this state's failure
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
        except ObjectCorrupted as error:
            self.stats.missing += 1
            return error
        except (CheckpointStoreUnavailable, MemoryError) as error:  # this session's failure
            return self._record_error(error)
        self.stats.trouble = None
        self.stats.gets += 1
        return parts

    def _fetch_verified(self, location: ObjectLocation) -> dict[str, bytes]:
        """The state's parts. What is not what was put may have come to harm on its way, or be a proxy's own page for
        whatever it is asked: only what two answers of the store itself contradict is damaged.

        Raises ObjectMissing, DamagedObject, CheckpointStoreAway.
        """
        with contextlib.suppress(ObjectCorrupted):
            return _verified_parts(location, self._store.get(location.stored.key))
        if not _has_marker(self._store, self._key_prefix):
            raise CheckpointStoreUnavailable(
                "its answers are not what was put; see to its server, and to proxies before it"
            )
        return _verified_parts(location, self._store.get(location.stored.key))

    def _missing(self, location: ObjectLocation) -> Exception:
        """A store that is not there at all looks, of a folder or bucket, like one without this object."""
        try:
            is_there = _has_marker(self._store, self._key_prefix)
        except (ObjectNotFound, CheckpointStoreUnavailable):
            is_there = False
        if not is_there:
            return self._record_error(
                CheckpointStoreUnavailable("it has nothing of this database any more; see to its mount or bucket")
            )
        self.stats.missing += 1
        return ObjectCorrupted(f"the object {location.stored.key} is missing from the checkpoint store {self.name}")

    def _record_error(self, error: Exception) -> Exception:
        away = CheckpointStoreUnavailable(f"the checkpoint store {self.name} cannot be used ({error})")
        self.stats.trouble = str(away)
        return away

    def _delete(self, keys: list[str]) -> None:
        for key in keys:
            try:
                self._store.delete(key)
            except CheckpointStoreUnavailable as error:  # a later sweep finds it
                logger.warning("%s: the object is deleted later", self._record_error(error))
                return
            self.stats.deletes += 1

    def _sweep(self, find_used_keys: FindUsedKeys) -> None:
        """One batch; what no row names is deleted, then the next follows."""
        assert self._sweeping is not None
        try:
            batch = next(self._sweeping, None)
        except CheckpointStoreUnavailable as error:  # a later sweep begins anew
            logger.warning("%s: objects that nothing names are looked for later", self._record_error(error))
            batch = None
        if batch is None:
            self._end_sweep()
            return
        old = {listed.key for listed in batch if listed.age_s > ORPHAN_AGE_S} - {f"{self._key_prefix}/{_MARKER}"}

        def on_used_keys(used: set[str] | None) -> None:
            if used is None:  # a later sweep begins anew: each further question would wait for the server again
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
    """Whether the marker of this database's objects is what was put. Raises ObjectMissing, CheckpointStoreAway."""
    return store.get(f"{key_prefix}/{_MARKER}") == _MARKER_TEXT


def _verified_parts(location: ObjectLocation, data: bytes) -> dict[str, bytes]:
    """The state's parts. Raises DamagedObject."""
    sizes = part_sizes(location.layout)
    if (
        len(data) != sum(sizes.values())
        or checksum_pieces([data], location.state, location.session) != location.stored.checksum
    ):
        raise ObjectCorrupted(f"the object {location.stored.key} of the checkpoint store is damaged")
    parts, at = {}, 0
    for name, size in sizes.items():
        parts[name] = data[at : at + size]
        at += size
    return parts


def _state_number(key: str) -> int | None:
    """The state that an object was put for; None for what is no object of ours."""
    try:
        return int(key.rpartition("/")[2][:_STATE_DIGITS], 16)
    except ValueError:
        return None


def load_key_prefix(store: CheckpointStore, connection: Connection) -> str:
    """What the keys of this database's objects begin with; made up the first time.

    Raises DatabaseUnusable for a store that does not answer, or has not the objects that the database names.
    """
    begin_with_retry(connection)
    connection.execute(
        "INSERT INTO checkpoint_home(id, name) VALUES (1, ?) ON CONFLICT(id) DO NOTHING", (secrets.token_hex(8),)
    )
    key_prefix = str(connection.execute("SELECT name FROM checkpoint_home WHERE id = 1").fetchone()[0])
    named = connection.execute("SELECT 1 FROM states WHERE object_key IS NOT NULL LIMIT 1").fetchone()
    connection.execute("COMMIT")
    try:
        try:
            store.get(f"{key_prefix}/{_MARKER}")
        except ObjectNotFound:
            if named is not None:
                raise DatabaseUnusable(
                    f"checkpoint store {store.name}: it has none of the states that the session database has put in a "
                    f"store (nothing begins with {key_prefix}); name the store that has, with --checkpoint-store"
                ) from None
            store.prepare(key_prefix)
            store.put(f"{key_prefix}/{_MARKER}", _MARKER_TEXT)
    except CheckpointStoreUnavailable as error:
        raise DatabaseUnusable(f"checkpoint store {store.name}: {error}") from None
    return key_prefix


def open_checkpoint_store(address: str) -> CheckpointStore:
    """The store of that address; raises DatabaseUnusable."""
    try:
        location = parse_checkpoint_address(address)
    except ValueError as error:
        raise DatabaseUnusable(f"checkpoint store: {error}") from None
    if isinstance(location, FolderAddress):
        return FolderStore(location.folder)
    from state_pool.disk.s3 import S3Store  # its package takes a while to load

    return S3Store(location)
