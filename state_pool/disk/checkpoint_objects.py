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
from state_pool.codec import checksum_of, chunks_of, part_sizes
from state_pool.disk.checkpoint_store import CheckpointStore, CheckpointStoreAway, Listed, ObjectMissing
from state_pool.disk.folder import FolderStore
from state_pool.disk.membership import begin_among_others
from state_pool.disk.operations import ObjectPlace, StoredObject
from state_pool.disk.state_store import Connection
from state_pool.disk.thread import PoolThread
from state_pool.disk.transfers import LOOK_S, PATIENCE_S, Once, Workers
from state_pool.errors import DatabaseUnusable

logger = logging.getLogger(__name__)

ORPHAN_AGE_S = 3600.0
"""Far more than may lie between an object's put and its commit, and than clocks differ by."""
_MARKER = "of-this-database"
_MARKER_TEXT = (
    b"The objects beside this one are states of sessions; the database that they belong to names this folder.\n"
)
_MOST_DELETES = 10_000
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


class DamagedObject(Exception):  # noqa: N818 - names what happened
    """The object is not there, or is not what was put."""


OnPut = Callable[[StoredObject | Exception], None]
OnFetched = Callable[[dict[str, bytes] | Exception], None]
"""Called on a thread of the objects."""
WhichUsed = Callable[[list[int], Callable[[set[str] | None], None]], None]
"""Given numbers of states, tells (on any thread) the keys that rows of theirs name; None: that could not be read."""


class CheckpointObjects:
    """The objects of one database. Any thread may ask; answers come on the threads here."""

    def __init__(self, store: CheckpointStore, home: str, threads: int, on_death: Callable[[], None]) -> None:
        """`home`: what the keys of this database's objects begin with; `threads`: transfers at once."""
        self.stats = ObjectStats()
        self.name = store.name
        self._store = store
        self._home = home
        self._transfers = Workers("state-pool-objects", threads, on_death)
        self._cleaner = Workers("state-pool-object-cleaner", 1, on_death)
        self._sweeping: Iterator[list[Listed]] | None = None
        self._closing = threading.Event()
        self._watch = PoolThread("state-pool-object-watch", self._look_for_hung, on_death)

    @property
    def failure(self) -> str | None:
        """Why one of the threads is gone."""
        return self._transfers.failure or self._cleaner.failure or self._watch.failure

    def put(self, state: int, session: int, host: HostState, order: Sequence[str], done: OnPut) -> None:
        """Put a state's bytes under a new name; bounded by the writer, which has so many states under way."""
        key = f"{self._home}/{state:0{_STATE_DIGITS}x}-{secrets.token_hex(8)}"
        tell: Once[StoredObject | Exception] = Once(done)

        def work() -> None:
            outcome = self._try_put(key, state, session, host, order)
            if not tell(lambda: outcome) and isinstance(outcome, StoredObject):
                self.delete(key)

        self._transfers.submit(work, lambda: tell(self._hung))

    def get(self, place: ObjectPlace, done: OnFetched) -> None:
        """Fetch and verify a state; bounded by the pool, which loads so many sessions at once."""
        tell: Once[dict[str, bytes] | Exception] = Once(done)

        def work() -> None:
            outcome = self._try_get(place)
            tell(lambda: outcome)

        self._transfers.submit(work, lambda: tell(self._hung))

    def delete(self, key: str) -> None:
        """Delete an object that no row names any more."""
        if self._cleaner.waiting < _MOST_DELETES:
            self._cleaner.submit(lambda: self._delete([key]))

    def sweep(self, which_used: WhichUsed) -> None:
        """Delete the objects that no row names, batch by batch; nothing while that goes on from the last time."""
        if self._sweeping is None:
            self._sweeping = self._store.list(self._home)
            self._cleaner.submit(lambda: self._sweep(which_used))

    def close(self) -> None:
        """Finish what was asked, end the threads; those that a store holds for ever are left. Blocks."""
        self._transfers.close()
        self._cleaner.close()
        self._closing.set()
        self._watch.join()

    def _look_for_hung(self) -> None:
        while not self._closing.wait(LOOK_S):
            self._transfers.give_up_hung()

    def _hung(self) -> Exception:
        return self._noted(
            CheckpointStoreAway(f"it has not answered for {PATIENCE_S:g} s; see to its server, or the folder's mount")
        )

    def _try_put(
        self, key: str, state: int, session: int, host: HostState, order: Sequence[str]
    ) -> StoredObject | Exception:
        try:
            pieces = list(chunks_of(host.parts(), order))
            data, checksum = b"".join(pieces), checksum_of(pieces, state, session)
            del pieces  # the buffer is another state's, once this one has been given up
            self._store.put(key, data)
        except (CheckpointStoreAway, MemoryError, ValueError) as error:  # this state's failure
            return self._noted(error)
        self.stats.trouble = None
        self.stats.puts += 1
        self.stats.put_bytes += len(data)
        return StoredObject(key, checksum)

    def _try_get(self, place: ObjectPlace) -> dict[str, bytes] | Exception:
        try:
            parts = self._fetched(place)
        except ObjectMissing:
            return self._missing(place)
        except DamagedObject as error:
            self.stats.missing += 1
            return error
        except (CheckpointStoreAway, MemoryError) as error:  # this session's failure
            return self._noted(error)
        self.stats.trouble = None
        self.stats.gets += 1
        return parts

    def _fetched(self, place: ObjectPlace) -> dict[str, bytes]:
        """The state's parts. What is not what was put may have come to harm on its way, or be a proxy's own page for
        whatever it is asked: only what two answers of the store itself contradict is damaged.

        Raises ObjectMissing, DamagedObject, CheckpointStoreAway.
        """
        with contextlib.suppress(DamagedObject):
            return _checked(place, self._store.get(place.stored.key))
        if not _has_marker(self._store, self._home):
            raise CheckpointStoreAway("its answers are not what was put; see to its server, and to proxies before it")
        return _checked(place, self._store.get(place.stored.key))

    def _missing(self, place: ObjectPlace) -> Exception:
        """A store that is not there at all looks, of a folder or bucket, like one without this object."""
        try:
            is_there = _has_marker(self._store, self._home)
        except (ObjectMissing, CheckpointStoreAway):
            is_there = False
        if not is_there:
            return self._noted(
                CheckpointStoreAway("it has nothing of this database any more; see to its mount or bucket")
            )
        self.stats.missing += 1
        return DamagedObject(f"the object {place.stored.key} is missing from the checkpoint store {self.name}")

    def _noted(self, error: Exception) -> Exception:
        away = CheckpointStoreAway(f"the checkpoint store {self.name} cannot be used ({error})")
        self.stats.trouble = str(away)
        return away

    def _delete(self, keys: list[str]) -> None:
        for key in keys:
            try:
                self._store.delete(key)
            except CheckpointStoreAway as error:  # a later sweep finds it
                logger.warning("%s: the object is deleted later", self._noted(error))
                return
            self.stats.deletes += 1

    def _sweep(self, which_used: WhichUsed) -> None:
        """One batch; what no row names is deleted, then the next follows."""
        assert self._sweeping is not None
        try:
            batch = next(self._sweeping, None)
        except CheckpointStoreAway as error:  # a later sweep begins anew
            logger.warning("%s: objects that nothing names are looked for later", self._noted(error))
            batch = None
        if batch is None:
            self._end_sweep()
            return
        old = {listed.key for listed in batch if listed.age_s > ORPHAN_AGE_S} - {f"{self._home}/{_MARKER}"}

        def told(used: set[str] | None) -> None:
            if used is None:  # a later sweep begins anew: each further question would wait for the server again
                self._cleaner.submit(self._end_sweep)
                return
            self._cleaner.submit(lambda: self._delete_orphans(sorted(old - used)))
            self._cleaner.submit(lambda: self._sweep(which_used))

        states = sorted({state for key in old if (state := _state_of(key)) is not None})
        if states:
            which_used(states, told)
        else:
            told(set())

    def _end_sweep(self) -> None:
        self._sweeping = None

    def _delete_orphans(self, keys: list[str]) -> None:
        before = self.stats.deletes
        self._delete(keys)
        self.stats.orphans += self.stats.deletes - before


def _has_marker(store: CheckpointStore, home: str) -> bool:
    """Whether the marker of this database's objects is what was put. Raises ObjectMissing, CheckpointStoreAway."""
    return store.get(f"{home}/{_MARKER}") == _MARKER_TEXT


def _checked(place: ObjectPlace, data: bytes) -> dict[str, bytes]:
    """The state's parts. Raises DamagedObject."""
    sizes = part_sizes(place.layout)
    if len(data) != sum(sizes.values()) or checksum_of([data], place.state, place.session) != place.stored.checksum:
        raise DamagedObject(f"the object {place.stored.key} of the checkpoint store is damaged")
    parts, at = {}, 0
    for name, size in sizes.items():
        parts[name] = data[at : at + size]
        at += size
    return parts


def _state_of(key: str) -> int | None:
    """The state that an object was put for; None for what is no object of ours."""
    try:
        return int(key.rpartition("/")[2][:_STATE_DIGITS], 16)
    except ValueError:
        return None


def home_in(store: CheckpointStore, connection: Connection) -> str:
    """What the keys of this database's objects begin with; made up the first time.

    Raises DatabaseUnusable for a store that does not answer, or has not the objects that the database names.
    """
    begin_among_others(connection)
    connection.execute(
        "INSERT INTO checkpoint_home(id, name) VALUES (1, ?) ON CONFLICT(id) DO NOTHING", (secrets.token_hex(8),)
    )
    home = str(connection.execute("SELECT name FROM checkpoint_home WHERE id = 1").fetchone()[0])
    named = connection.execute("SELECT 1 FROM states WHERE object_key IS NOT NULL LIMIT 1").fetchone()
    connection.execute("COMMIT")
    try:
        try:
            store.get(f"{home}/{_MARKER}")
        except ObjectMissing:
            if named is not None:
                raise DatabaseUnusable(
                    f"checkpoint store {store.name}: it has none of the states that the session database has put in a "
                    f"store (nothing begins with {home}); name the store that has, with --checkpoint-store"
                ) from None
            store.prepare(home)
            store.put(f"{home}/{_MARKER}", _MARKER_TEXT)
    except CheckpointStoreAway as error:
        raise DatabaseUnusable(f"checkpoint store {store.name}: {error}") from None
    return home


def open_checkpoint_store(address: str) -> CheckpointStore:
    """The store of that address; raises DatabaseUnusable."""
    try:
        place = parse_checkpoint_address(address)
    except ValueError as error:
        raise DatabaseUnusable(f"checkpoint store: {error}") from None
    if isinstance(place, FolderAddress):
        return FolderStore(place.folder)
    from state_pool.disk.s3 import S3Store  # its package takes a while to load

    return S3Store(place)
