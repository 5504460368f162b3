"""Brings states to slots for waiting leases, first come, first served. Engine thread only."""

from __future__ import annotations

from collections import deque

from state_pool.cache.tiers import Tiers
from state_pool.cache.tuned_states import TunedStates
from state_pool.config import PoolConfig
from state_pool.disk.operations import Loaded, LoadResult, Quarantined
from state_pool.disk.store import Store
from state_pool.errors import (
    AdapterNotFound,
    OriginMismatch,
    PoolError,
    SessionCorrupted,
    SessionReadFailed,
    SessionUnusable,
)
from state_pool.origins import Adapters, Origin, adapter_mismatch, is_mixture
from state_pool.sessions import Lease, LeaseState, Session, SessionIndex

_LOOK_AHEAD = 32
"""Leases tried per step: this number of the oldest, and this number of the others in turn. Bounds the cost."""


class LeaseQueue:
    """The leases that wait for a state. Those behind another turn of their session come later."""

    def __init__(
        self,
        config: PoolConfig,
        index: SessionIndex,
        tiers: Tiers,
        store: Store | None,
        tuned: TunedStates,
        adapters: Adapters,
    ) -> None:
        self._adapters = adapters
        self._config = config
        self._tuned = tuned
        self._index = index
        self._tiers = tiers
        self._store = store
        self._is_shared = store is not None and store.shared
        self._waiting: deque[Lease] = deque()
        self._lacks_pins = False
        """whether a lease waits for a pin only, as of the last `poll`: a later one must not take it at once"""

    def check_origin(self, session: Session | None, state: str, adapter: str, mixture: Origin | None) -> None:
        """Check that the session started with this tuned state and adapter.

        Raises StateNotFound, AdapterNotFound, OriginMismatch, AdapterMismatch.
        """
        origin = self._tuned.get(state).origin if state else mixture
        loaded_adapter = self._adapters.get(adapter) if adapter else None
        if session is None or not session.exists or self._is_shared:
            return
        error = origin_mismatch(session, origin) or adapter_mismatch(
            session.key.display_name, session.adapter, loaded_adapter
        )
        if error is not None:
            raise error

    def acquire_resources(self, lease: Lease, state: str, adapter: str, mixture: Origin | None) -> Lease:
        """Acquire the tuned state and the adapter that the lease names. Holds them until the lease ends."""
        lease.tuned, lease.mixture = self._tuned.acquire(state) if state else None, mixture
        lease.adapter = self._adapters.acquire(adapter) if adapter else None
        return lease

    @property
    def pending(self) -> bool:
        return bool(self._waiting) or self._tiers.num_loading > 0

    def __len__(self) -> int:
        return len(self._waiting)

    def enqueue(self, lease: Lease) -> None:
        """Make a lease READY once its state is in a slot. That may be now."""
        if lease.source is not None:
            lease.source.readers += 1
            lease.is_reader = True
        if (lease.source is not None and self._lacks_pins) or not self._try(lease):
            self._waiting.append(lease)

    def stop_reading(self, lease: Lease) -> None:
        if lease.is_reader and lease.source is not None:
            lease.source.readers -= 1
        lease.is_reader = False

    def poll(self) -> None:
        """Try the oldest waiting leases in order, then some of the others.

        The others take turns, because a store that hangs may hold up all of the oldest.
        """
        self._lacks_pins = False
        front = self._try_next(_LOOK_AHEAD)
        self._waiting.extend(self._try_next(_LOOK_AHEAD))
        self._waiting.extendleft(reversed(front))

    def _try_next(self, count: int) -> list[Lease]:
        """Try the next `count` leases. Returns those that still wait."""
        tried = [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
        return [lease for lease in tried if not self._try(lease)]

    def fail(self, session: Session, error: Exception) -> None:
        """Fail every lease that waits for the session's state or its turn."""
        waiting = [lease for lease in self._waiting if lease.source is session and lease.state is LeaseState.WAITING]
        for lease in waiting + list(session.queue):
            self.stop_reading(lease)
            lease.state, lease.error = LeaseState.FAILED, error
            if lease.session.active is lease:
                lease.session.active = None
        session.queue.clear()

    def _try(self, lease: Lease) -> bool:
        """Return whether the lease is READY or has ended."""
        source = lease.source
        if lease.state is not LeaseState.WAITING:
            return True
        if source is None or not source.exists:
            return self._begin(lease)
        if (error := self._mismatch_error(source, lease)) is not None:
            lease.state, lease.error = LeaseState.FAILED, error
            return True
        if lease.tier is None:
            lease.tier = source.tier
        if source.slot is None:
            self._fetch(source)
        if source.slot is None:
            return False
        if not self._tiers.pin(source.slot):
            self._lacks_pins = True
            return False
        lease.pinned = lease.exists = True
        lease.read_slot, lease.replay = source.slot, list(source.replay)
        lease.num_tokens, lease.history = source.num_tokens, (source.row_id, source.turn)
        lease.session.origin, lease.session.adapter = source.origin, source.adapter
        lease.state = LeaseState.READY
        return True

    def _mismatch_error(self, source: Session, lease: Lease) -> PoolError | None:
        """Return why a turn cannot continue this history. If it can, set the lease's adapter from the history."""
        display_name = source.key.display_name
        error = origin_mismatch(source, origin_of(lease)) or adapter_mismatch(
            display_name, source.adapter, lease.adapter
        )
        if error is None and lease.adapter is None and source.adapter is not None:
            try:
                lease.adapter = self._adapters.acquire_for_session(display_name, source.adapter)
            except AdapterNotFound as missing:
                return missing
        return error

    def _begin(self, lease: Lease) -> bool:
        """Start a new history from the zero state or a tuned state. A tuned state must be in a slot first."""
        if lease.tuned is not None:
            slot = self._tuned.pin(lease.tuned)
            if slot is None:
                return False
            lease.pinned, lease.read_slot = True, slot
        lease.session.origin = origin_of(lease)
        lease.session.adapter = None if lease.adapter is None else lease.adapter.origin
        lease.state = LeaseState.READY
        return True

    def _fetch(self, session: Session) -> None:
        """Start to bring the state one tier up."""
        if session.host is not None:
            if self._tiers.can_pin:
                self._tiers.promote(session)
        elif self._store is not None and self._may_load(session):
            session.loading = True
            self._tiers.num_loading += 1
            expected = (session.row_id, session.turn)
            self._store.reader.load(session.row_id, lambda result: self._loaded(session, expected, result))

    def _may_load(self, session: Session) -> bool:
        if session.loading or self._tiers.num_loading >= self._config.transfer_states:
            return False
        return self._tiers.host_has_room()

    def _loaded(self, session: Session, expected: tuple[int, int], result: LoadResult) -> None:
        self._tiers.num_loading -= 1
        session.loading = False
        if session.deleted or session.slot is not None or session.host is not None:
            return
        if (session.row_id, session.turn) != expected:  # another engine's turn has changed it
            return
        result = self._tuned.with_origin_state(session, result)
        if isinstance(result, Loaded):
            self._tiers.add_loaded(session, result)
            return
        if isinstance(result, SessionCorrupted):
            self._quarantine(session, str(result))
        error_type = SessionReadFailed if isinstance(result, SessionReadFailed) else SessionUnusable
        self.fail(session, error_type(f"session {session.key.display_name!r}: {result}"))

    def _quarantine(self, session: Session, reason: str) -> None:
        """Record the damage in memory and on disk. So the session is not used later."""
        self._index.mark_unusable(session, reason)
        if self._store is not None:
            self._store.submit(Quarantined(session.row_id, reason), lambda _: None)


def origin_of(lease: Lease) -> Origin | None:
    return lease.mixture if lease.tuned is None else lease.tuned.origin


def origin_mismatch(session: Session, requested: Origin | None) -> OriginMismatch | None:
    """Return the error if a request names another origin than the session's."""
    origin, display_name = session.origin, session.key.display_name
    if is_mixture(origin) and origin is not None and (requested is None or requested.digest != origin.digest):
        return OriginMismatch(
            f"session {display_name!r} began with a mixture of {origin.name}; name these states, in this order"
        )
    if requested is None or (origin is not None and origin.digest == requested.digest):
        return None
    name = f"a mixture of {requested.name}" if is_mixture(requested) else repr(requested.name)
    remedy = "leave `state` out to continue it, or begin another session"
    if origin is None:
        known = "it began with the empty state, or was imported from a file, which does not say"
        return OriginMismatch(
            f"session {display_name!r} is not known to have begun with {name}: {known}; {remedy}", requested.name
        )
    actual = f"the tuned state {origin.name!r} (digest {origin.digest})"
    return OriginMismatch(f"session {display_name!r} began with {actual}, not with {name}; {remedy}", requested.name)
