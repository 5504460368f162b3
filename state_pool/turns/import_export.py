"""Exports sessions to files and imports them. Engine thread only; the caller encodes on another thread."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from state_pool.cache.checkpoints import build_session_row, mark_stored
from state_pool.cache.tiers import Tiers
from state_pool.cache.tuned_states import TunedStates
from state_pool.disk.operations import Acquire, Append, Checkpoint, Loaded, LoadResult, StoredSession
from state_pool.disk.reader import LookupFailed
from state_pool.disk.store import CompletionQueue, Store, build_session
from state_pool.errors import PoolError, PoolFull, SessionBusy, SessionNotFound, SessionUnusable
from state_pool.layout import ZERO_SLOT, HostState, InvalidStateValues, reshard_state
from state_pool.origins import Adapters, is_mixture, join_fingerprint, split_fingerprint
from state_pool.session_file import InvalidSessionFile, SessionFile
from state_pool.session_key import LINEAR, SessionKey
from state_pool.sessions import OnDurable, PendingTurn, Session, SessionIndex, checked_key

MAX_CONCURRENT = 2
"""Each export or import holds a state in host memory."""

OnExported = Callable[[SessionFile | Exception], None]
"""Called once, on the engine thread."""


@dataclass(frozen=True, slots=True)
class FittedFile:
    """A session file that this model can continue."""

    host: HostState | None
    replay: list[int]
    num_tokens: int
    adapter_digest: str
    """"": no adapter"""


class ImportExport:
    def __init__(
        self,
        index: SessionIndex,
        tiers: Tiers,
        store: Store | None,
        deliver: CompletionQueue,
        start_next_turn: Callable[[Session], None],
        delete_rows: Callable[[tuple[int, ...]], None],
        tuned: TunedStates,
        adapters: Adapters,
    ) -> None:
        self._tuned = tuned
        self._adapters = adapters
        self._start_next_turn = start_next_turn
        self._delete_rows = delete_rows
        self._index = index
        self._tiers = tiers
        self._store = store
        self._deliver = deliver
        self._num_active = 0

    @property
    def pending(self) -> bool:
        return self._num_active > 0

    def export(self, session_id: str, on_exported: OnExported, dialogue: int | None = None) -> None:
        """Copy a session as of its last durable turn. The session stays usable meanwhile.

        `on_exported` is called once from `StatePool.poll` with a `SessionFile` or an error. Call `SessionFile.encode`
        on another thread. Raises InvalidSessionId, SessionNotFound, SessionUnusable, PoolFull.
        """
        key = checked_key(session_id)._replace(dialogue=LINEAR if dialogue is None else dialogue)
        if self._store is not None and self._store.shared:
            self._export_shared(self._store, key, on_exported)
            return
        session = self._index.get(key)
        if session is None or not session.exists:
            raise _not_found_error(key)
        session.check_usable(session_id)
        if is_mixture(session.origin):
            raise SessionUnusable(
                f"session {key.display_name!r} began with a mixture, which has no state to export", session_id
            )
        with self._limit_concurrency():
            self._copy_out(session, on_exported)

    def _export_shared(self, store: Store, key: SessionKey, on_exported: OnExported) -> None:
        """Export from a shared database: it knows the last turn, memory may have the state after it."""

        def found(stored: list[StoredSession] | LookupFailed) -> None:
            if isinstance(stored, Exception) or not stored or stored[0].quarantined is not None:
                self._num_active -= 1
                on_exported(stored if isinstance(stored, Exception) else _unavailable_error(key, stored))
                return
            last, known = stored[0].session, self._index.get(key)
            in_memory = known is not None and (known.slot is not None or known.host is not None)
            if known is not None and in_memory and (known.row_id, known.turn) == (last.row_id, last.turn):
                self._copy_out(known, on_exported)
                return
            session = build_session(stored[0])
            store.reader.load(last.row_id, lambda result: self._read(session, on_exported, result))

        with self._limit_concurrency():
            store.reader.find(key, found)

    def _copy_out(self, session: Session, on_exported: OnExported) -> None:
        num_tokens, replay = session.num_tokens, list(session.replay)

        def arrived(host: HostState) -> None:
            self._exported(session, on_exported, num_tokens, replay, host.parts())

        if session.host is not None:
            host = session.host
            self._deliver(lambda: arrived(host))
        elif session.slot == ZERO_SLOT:
            self._deliver(lambda: self._exported(session, on_exported, num_tokens, replay, {}))
        elif session.slot is not None:
            self._tiers.save(session.slot, arrived, frees_slot=False)
        else:
            assert self._store is not None, "without a store, every session is in memory"
            self._store.reader.load(session.row_id, lambda result: self._read(session, on_exported, result))

    def _read(self, session: Session, on_exported: OnExported, result: LoadResult) -> None:
        result = self._tuned.with_origin_state(session, result)
        if isinstance(result, Loaded):
            parts = {} if result.host is None else result.host.parts()
            self._exported(session, on_exported, result.num_tokens, result.replay, parts)
        else:
            self._num_active -= 1
            # The delete may have come before the read.
            on_exported(_not_found_error(session.key) if session.deleted else result)

    def _exported(
        self,
        session: Session,
        on_exported: OnExported,
        num_tokens: int,
        replay: list[int],
        parts: Mapping[str, memoryview],
    ) -> None:
        self._num_active -= 1
        arena = self._tiers.arena
        layout = {name: arena.layout[name] for name in parts}
        on_exported(
            SessionFile(join_fingerprint(arena.fingerprint, session.adapter), num_tokens, replay, layout, parts)
        )

    def fit(self, file: SessionFile) -> FittedFile:
        """Check a file against the model and copy its state. Any thread: it takes long.

        Raises InvalidSessionFile (another model or state layout), SessionUnusable.
        """
        arena = self._tiers.arena
        fingerprint, digest = split_fingerprint(file.fingerprint)
        dataclasses.replace(file, fingerprint=fingerprint).check(arena.fingerprint, arena.layout, arena.vocab)
        try:
            host = arena.host_state(reshard_state(file.parts, file.layout, arena.layout)) if file.parts else None
        except InvalidStateValues as error:
            raise InvalidSessionFile(f"{error}; export the session from where it works") from None
        except ValueError as error:
            raise SessionUnusable(f"the state does not fit this model: {error}") from None
        return FittedFile(host, file.replay, file.num_tokens, digest)

    def import_session(self, session_id: str, file: FittedFile, on_durable: OnDurable) -> None:
        """Create a session from an exported one. `on_durable` is called once from `StatePool.poll`.

        Raises SessionBusy (the id is taken), PoolFull, InvalidSessionId, AdapterNotFound.
        """
        digest = file.adapter_digest
        adapter = self._adapters.find_by_digest(digest, f"file for session {session_id!r}") if digest else None
        key = checked_key(session_id)
        self._forget_idle(key)
        if self._index.get(key) is not None:
            raise _name_taken_error(key)
        if not self._tiers.host_has_room() or (self._store is not None and not self._store.writer.has_room_for_state):
            raise PoolFull("too many states are being moved; try again in a moment")
        with self._limit_concurrency():
            now = time.time()
            session = Session(key, 0 if self._store is None else self._store.next_row(), now, now)
            session.adapter = None if adapter is None else adapter.origin
            session.pending = PendingTurn(0, [], None)  # turns of the session wait meanwhile
            self._index.add(session)

            def done(error: Exception | None) -> None:
                self._imported(session, file, error, on_durable)

            self._acquire(session, lambda: self._write(session, file, done), done)
            self._tiers.num_loading += file.host is not None

    def _forget_idle(self, key: SessionKey) -> None:
        """Drop an idle session from memory. A shared database decides whether it exists."""
        session = self._index.get(key)
        if session is not None and self._store is not None and self._store.shared and not session.busy:
            self._tiers.forget(session)
            self._index.remove(session)

    def _acquire(self, session: Session, write: Callable[[], None], done: OnDurable) -> None:
        """Reserve the name in a shared database, then `write`; on failure call `done` with the error."""
        if self._store is None or not self._store.shared:
            write()
            return
        job = Acquire(session.key.session_id)

        def acquired(error: Exception | None) -> None:
            session.fence, session.acquired = job.fence, job.fence is not None
            if error is None and (job.fence is None or job.stored):
                error = _name_taken_error(session.key)
            if error is not None:
                done(error)
            else:
                write()

        self._store.submit(job, acquired)

    def _write(self, session: Session, file: FittedFile, done: OnDurable) -> None:
        """Write the state, then the tokens after it. The tokens are a turn in the log."""
        if self._store is None:
            self._deliver(lambda: done(None))
            return
        store, turn = self._store, 0 if file.host is None else 1
        state = build_session_row(session, turn=turn, num_tokens=file.num_tokens - len(file.replay))
        following = build_session_row(session, turn=turn + 1, num_tokens=file.num_tokens)

        def stored(error: Exception | None) -> None:
            if error is None and file.replay and not session.deleted:
                store.submit(Append(following, file.replay, session.fence), done)
            else:
                done(error)

        if file.host is None:
            stored(None)
        else:
            store.submit_state(Checkpoint(state, file.host, fence=session.fence), stored)

    def _imported(self, session: Session, file: FittedFile, error: Exception | None, on_durable: OnDurable) -> None:
        self._tiers.num_loading -= file.host is not None
        self._num_active -= 1
        session.pending = None
        if session.deleted:
            error = SessionNotFound(f"session {session.key.display_name!r} was deleted while it was imported")
        elif error is None:
            self._add_imported(session, file)
        else:
            assert self._store is not None, "only a store fails"
            self._delete_rows((session.row_id,))
            # Waiting turns begin a new session. Its row has another id, so the delete does not touch it.
            session.row_id = self._store.next_row()
        on_durable(error)
        self._start_next_turn(session)

    def _add_imported(self, session: Session, file: FittedFile) -> None:
        if file.host is not None and self._store is not None:
            mark_stored(session, build_session_row(session, turn=1, num_tokens=file.num_tokens - len(file.replay)))
        session.turn = (file.host is not None) + bool(file.replay)
        session.num_tokens = file.num_tokens
        self._index.num_existing += session.exists
        self._index.touch(session, time.time())
        self._tiers.add_loaded(session, Loaded(file.host, file.replay, 0, file.num_tokens))

    @contextmanager
    def _limit_concurrency(self) -> Iterator[None]:
        """Counts an export or import until its end. Uncounts it if starting it raises."""
        if self._num_active >= MAX_CONCURRENT:
            raise PoolFull(f"{MAX_CONCURRENT} sessions are being exported or imported; try again in a moment")
        self._num_active += 1
        try:
            yield
        except BaseException:
            self._num_active -= 1
            raise


def _name_taken_error(key: SessionKey) -> SessionBusy:
    name = key.session_id
    return SessionBusy(f"there is a session {name!r} already; delete it first, or choose another id", name)


def _unavailable_error(key: SessionKey, stored: list[StoredSession]) -> PoolError:
    if not stored:
        return _not_found_error(key)
    return SessionUnusable(f"session {key.display_name!r}: {stored[0].quarantined}", key.session_id)


def _not_found_error(key: SessionKey) -> SessionNotFound:
    dialogue = "" if key.dialogue == LINEAR else f":{key.dialogue}"
    return SessionNotFound(f"there is no session {key.session_id!r}{dialogue}", key.session_id)
