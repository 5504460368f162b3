"""`StatePool` creates and polls the parts of the pool. Engine thread only.

No method but `close` waits for a disk or a device. Slow work is started by the parts and finished by `poll`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import msgspec

from state_pool.cache.prefix_cache import PrefixCache
from state_pool.cache.tiers import Tiers
from state_pool.cache.tuned_states import TunedStates
from state_pool.config import DEFAULT_SESSION_TTL_S, PoolConfig
from state_pool.disk.operations import ClockSetBack
from state_pool.disk.store import CompletionQueue, Store
from state_pool.errors import PoolLost
from state_pool.expiry import Expiry, Gap, UsageTimes
from state_pool.layout import Arena
from state_pool.origins import Adapters
from state_pool.session_listing import SessionListing
from state_pool.sessions import Session, SessionIndex
from state_pool.turns.deletes import SharedCleanup
from state_pool.turns.import_export import ImportExport
from state_pool.turns.turns import Turns


def _database(store: Store | None) -> dict[str, Any] | None:
    if store is None:
        return None
    small, states = store.writer.queued
    return {
        "path": store.path,
        "other_models": store.other_models,
        "queued_turns": small,
        "queued_states": states,
        "engines": store.engines,
        "checkpoint_store": store.checkpoint_store,
        **msgspec.to_builtins(store.writer.stats),
    }


_HOUSEKEEPING_S = 0.25
_RETRY_S = 1.0
_MAX_EXPIRED_PER_RUN = 256


class StatePool:
    """Sessions and cached prefixes on three tiers. Engine thread only.

    - `turns`: checkout, record, checkin, release, delete
    - `prefixes`: cached prompt prefixes
    - `tiers`: slots for rows
    - `tuned`, `adapters`: loaded tuned states and adapters
    - `import_export`, `listing`: sessions as files, pages of the session list
    """

    def __init__(self, arena: Arena, config: PoolConfig, wake: Callable[[], None] | None = None) -> None:
        """Open the database and index its sessions.

        `wake` is called from other threads when `poll` has work. Raises DatabaseUnusable when the database cannot be
        opened.
        """
        self.config = config
        self._deliver = CompletionQueue(wake)
        self._index = SessionIndex()
        self._store = Store(config, arena, self._deliver) if config.state_db else None
        if self._store is not None:
            self._store.load_sessions(self._index)
        self.tiers = Tiers(arena, config, self._index, self._store)
        self.prefixes = PrefixCache(self.tiers, config)
        self.tuned = TunedStates(self.tiers, config)
        self.adapters = Adapters(config.max_adapters, self.tuned.new_number)
        self.tiers.evictables = [self.prefixes, self.tuned]
        self.turns = Turns(config, self._index, self.tiers, self._store, self._deliver, self.tuned, self.adapters)
        self.import_export = ImportExport(
            self._index,
            self.tiers,
            self._store,
            self._deliver,
            self.turns.start_next_turn,
            self.turns.session_deletes.delete,
            self.tuned,
            self.adapters,
        )
        self.listing = SessionListing(self._index, self._store, self._deliver, lambda: self.turns.unlogged)
        self._expiry = Expiry(*self._expiry_settings())
        self._cleanup: SharedCleanup | None = None
        if self._store is not None and self._store.shared:
            self._cleanup = SharedCleanup(config, self._index, self.tiers, self._store, self._expiry)
        self._next_housekeeping = 0.0
        self._next_retry = 0.0

    @property
    def has_token_log(self) -> bool:
        """Whether turns are logged as tokens. A state can then be rebuilt."""
        return self._store is not None and self.config.durability != "turn"

    @property
    def pending(self) -> bool:
        """Whether `poll` has work now or soon: call it every few milliseconds."""
        store = self._store
        is_busy = self._deliver.waiting or self.tiers.busy or self.turns.pending or self.import_export.pending
        is_busy = is_busy or self.listing.pending
        return bool(is_busy or (store is not None and store.pending))

    @property
    def failure(self) -> str | None:
        """The fatal error of a dead pool thread, or None."""
        return None if self._store is None else self._store.failure

    def poll(self) -> None:
        """Finish completed work and start new work. Call once per engine step.

        Raises PoolLost when a pool thread has died: no turn can become durable then.
        """
        if (failure := self.failure) is not None:
            raise PoolLost(f"{failure}; durable turns are kept")
        self._deliver.run()
        self.tiers.finish_copies()
        self.turns.begin_saves()
        if self.turns.acquisition is not None:
            self.turns.acquisition.poll()
        self.turns.lease_queue.poll()
        now = time.monotonic()
        self.listing.expire(now)
        if now >= self._next_housekeeping:
            self._next_housekeeping = now + _HOUSEKEEPING_S
            self._do_housekeeping(now)

    def stats(self) -> dict[str, Any]:
        config, index, tiers, prefixes, store = self.config, self._index, self.tiers, self.prefixes, self._store
        state_bytes = tiers.arena.state_bytes
        prefix_l1, prefix_l2 = prefixes.sizes
        return {
            "durability": config.durability if store is not None else "memory",
            "sessions": index.num_existing,
            "slots": {"total": tiers.slots.num_usable, "free": tiers.slots.num_free},
            "l1": {"sessions": len(index.l1), "limit": config.l1_sessions, "bytes": len(index.l1) * state_bytes},
            "l2": {"sessions": len(index.l2), "limit": config.l2_sessions, "bytes": len(index.l2) * state_bytes},
            "database": _database(store),
            "prefix_cache": {
                "enabled": prefixes.enabled,
                "l1": prefix_l1,
                "l2": prefix_l2,
                "history_bytes": prefixes.history_bytes,
                **msgspec.to_builtins(prefixes.counters),
            },
            "counters": msgspec.to_builtins(tiers.counters),
            "quarantined": [
                {"session_id": session.key.display_name, "reason": session.unusable}
                for session in islice(index.unusable, 20)
            ],
            "quarantined_count": len(index.unusable),
            "degraded": None if store is None else store.degraded,
            "session_ttl_s": self._expiry.ttl,
            "waiting_leases": len(self.turns.lease_queue),
            "tuned_states": {
                "loaded": len(self.tuned),
                "limit": config.max_states,
                "in_slots": len(self.tuned.slots),
            },
            "adapters": {
                "loaded": len(self.adapters),
                "limit": config.max_adapters,
                "rows": self.adapters.num_refs,
            },
        }

    def close(self) -> None:
        """Store every session's newest state, deliver pending callbacks, close the database. Blocks."""
        self.prefixes.close()
        self.tuned.close()
        if self._store is not None:
            self._expiry.cutoff()
            self._store_set_backs(self._store)
            self._flush(self._store)
            self._store.close()
        self._deliver.run()

    def _do_housekeeping(self, now: float) -> None:
        self.tiers.trim()
        self.prefixes.trim()
        self.tuned.trim()
        if now >= self._next_retry:
            self._next_retry = now + _RETRY_S
            self.turns.session_deletes.retry()
            if self._store is not None:
                self._store.sweep_objects()
                self._store_set_backs(self._store)
            if self._cleanup is None:
                self._remove_expired_or_excess()
            else:
                self._cleanup.run()
        self._checkpoint_due_sessions()

    def _checkpoint_due_sessions(self) -> None:
        """Store dirty states: those with a long log, then idle ones, then those that may be evicted soon."""
        checkpoints = self.tiers.checkpoints
        now = time.time()
        idle_since = now - self.config.checkpoint_idle_s
        nearly_full = self.tiers.host_nearly_full
        dirty = [session for session in [*self._index.l2, *self._index.l1] if session.dirty]
        for session in dirty:
            if checkpoints.is_due(session) or not idle_since <= session.updated <= now:  # later: the clock was set back
                checkpoints.begin(session)
        for session in dirty:
            if nearly_full and session.host is not None and not checkpoints.busy:
                checkpoints.begin(session)

    def _expiry_settings(self) -> tuple[float, UsageTimes]:
        """Return the TTL in seconds and the times of use so far."""
        if self._store is not None:
            return self._store.session_ttl, self._store.usage_times
        ttl = self.config.session_ttl
        return DEFAULT_SESSION_TTL_S if ttl is None else ttl, UsageTimes()

    def _store_set_backs(self, store: Store) -> None:
        """Store the times that the clock showed twice since the last call. Failed ones are tried again."""

        def done(times: Gap, error: Exception | None) -> None:
            if error is not None:
                self._expiry.unstored.append(times)

        unstored, self._expiry.unstored = self._expiry.unstored, []
        for times in unstored:
            store.submit(ClockSetBack(times), partial(done, times))

    def _remove_expired_or_excess(self) -> None:
        expired = self._expired()
        removed = expired or self._over_limit_sessions()
        if removed:
            self.turns.remove(removed)
            self.tiers.counters.count_removed(len(removed), removed[-1].updated, is_expired=bool(expired))

    def _expired(self) -> list[Session]:
        """Expired sessions, the least recently used first."""
        expired: list[Session] = []
        cutoff = self._expiry.cutoff()
        for session in self._index:
            if cutoff is None or session.updated >= cutoff or len(expired) >= _MAX_EXPIRED_PER_RUN:
                break
            if not session.busy:
                expired.append(session)
        return expired

    def _over_limit_sessions(self) -> list[Session]:
        """The oldest sessions, enough to bring the database under its limit."""
        store = self._store
        if store is None or not store.over_limit or store.has_pending_deletes or self.config.state_db_full != "evict":
            return []
        count = min(_MAX_EXPIRED_PER_RUN, 1 + store.excess_bytes // max(1, self.tiers.arena.state_bytes))
        evicted: list[Session] = []
        for session in self._index:
            if len(evicted) >= count:
                break
            if session.exists and not session.busy:
                evicted.append(session)
        return evicted

    def _flush(self, store: Store) -> None:
        deadline: float | None = None
        while True:
            self.tiers.wait_copies()
            self._deliver.run()
            self.turns.session_deletes.retry()
            self.turns.begin_saves()
            waiting = [s for s in [*self._index.l1, *self._index.l2] if s.dirty and not s.reloadable]
            for session in waiting:
                self.tiers.checkpoints.begin(session, ignore_retry_delay=True)
            outstanding = waiting or store.pending or self.tiers.busy or self.turns.unsaved
            if not outstanding or store.failure is not None:
                return
            if store.degraded is None:
                deadline = None
            elif deadline is None:
                deadline = time.monotonic() + _RETRY_S
            elif time.monotonic() > deadline:
                return  # the disk stays broken: only the committed log is kept
            time.sleep(0.001)
