"""The state pool's interface for the engine: `StatePool`. Engine thread only.

No method waits for a disk or a device. Slow work is started here and finished by `poll`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from state_pool.cache.prefix_cache import PrefixCache, PrefixHit
from state_pool.cache.tiers import Tiers
from state_pool.cache.tuned_states import TunedStates
from state_pool.config import PoolConfig
from state_pool.disk.store import CompletionQueue, Store
from state_pool.errors import PoolLost
from state_pool.expiry import Expiry, UsageTimes
from state_pool.layout import Arena
from state_pool.origins import NO_BASE, Adapters, Origin
from state_pool.session_file import SessionFile
from state_pool.session_listing import OnListed, SessionListing
from state_pool.sessions import Lease, OnDurable, Session, SessionIndex, checked_key
from state_pool.status import pool_stats
from state_pool.turns.import_export import ImportExport, OnExported
from state_pool.turns.shared_cleanup import SharedCleanup
from state_pool.turns.turns import Turns

OnDeleted = Callable[[int | Exception], None]

_HOUSEKEEPING_S = 0.25
_RETRY_S = 1.0
_MAX_EXPIRED_PER_RUN = 256


class StatePool:
    """Sessions and cached prefixes on three tiers. Engine thread only."""

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
        self._tiers = Tiers(arena, config, self._index, self._store)
        self._prefix = PrefixCache(self._tiers, config)
        self.tuned = TunedStates(self._tiers, config)
        self.adapters = Adapters(config.max_adapters, self.tuned.new_number)
        self._tiers.evictables = [self._prefix, self.tuned]
        self._turns = Turns(config, self._index, self._tiers, self._store, self._deliver, self.tuned, self.adapters)
        self._import_export = ImportExport(
            self._index,
            self._tiers,
            self._store,
            self._deliver,
            self._turns.start_next_turn,
            self._turns.delete_rows,
            self.tuned,
            self.adapters,
        )
        self._listing = SessionListing(self._index, self._store, self._deliver, lambda: self._turns.unlogged)
        self._expiry = Expiry(config.session_ttl, self._store.usage_times if self._store is not None else UsageTimes())
        self._cleanup: SharedCleanup | None = None
        if self._store is not None and self._store.shared:
            self._cleanup = SharedCleanup(config, self._index, arena, self._store, self._expiry)
        self._next_housekeeping = 0.0
        self._next_retry = 0.0

    # -- slots -----------------------------------------------------------------------------------------

    @property
    def num_slots(self) -> int:
        """Slots shared by rows, sessions, prefixes and tuned states."""
        return self._tiers.slots.num_usable

    @property
    def num_free(self) -> int:
        """Slots without a holder. `allocate` may free more."""
        return self._tiers.slots.num_free

    def allocate(self) -> int | None:
        """Return a slot for a row to write to, or None if none is free yet.

        On None, the pool starts to make room: try again at a later step.
        """
        return self._tiers.allocate()

    def free(self, slot: int) -> None:
        """Free a slot from `allocate` that neither `checkin` nor `offer_prefix` took."""
        self._tiers.slots.drop_ref(slot)

    # -- turns -----------------------------------------------------------------------------------------

    @property
    def has_token_log(self) -> bool:
        """Whether turns are logged as tokens, so that a state can be rebuilt."""
        return self._store is not None and self.config.durability != "turn"

    def checkout(
        self,
        session_id: str,
        branch_from: int | None = None,
        wait: bool = True,
        state: str = "",
        adapter: str = "",
        mixture: Origin | None = None,
    ) -> Lease:
        """Start a turn of a session. The lease becomes READY at once or in a later `poll`.

        - `branch_from`: None continues the plain session, one turn after another. A number n starts a new dialogue from
          dialogue n, which does not change; 0 is the empty root.
        - `wait`: False raises SessionBusy while another turn runs.
        - `state`: the tuned state that a new session starts from. "" is the zero state, or the one that the session
          has.
        - `adapter`: the adapter that the row runs under. "" is none, or the one that the session has.
        - `mixture`: the origin of a session that starts from several states. Such a session has no state in one slot,
          so end
          its turn with `record` and `release`.

        Raises InvalidSessionId, SessionBusy, DialogueNotFound, SessionUnusable, PoolFull, StateNotFound,
        AdapterNotFound, and OriginMismatch or AdapterMismatch if the session started differently.
        """
        if branch_from is not None:
            return self._turns.checkout_branch(session_id, branch_from, state, adapter, mixture)
        return self._turns.checkout(session_id, wait, state, adapter, mixture)

    def record(self, lease: Lease, tokens: list[int], on_durable: OnDurable) -> None:
        """Append a finished turn to the session: the prompt's tokens and the visible answer's.

        `on_durable` is called once from `poll`. It gets None once the turn is durable, or the error that lost it; the
        session is then unchanged. Call `checkin` or `release` next.
        """
        self._turns.record(lease, tokens, on_durable)

    def checkin(self, lease: Lease, slot: int) -> None:
        """Give the pool the slot with the state after the recorded turn.

        The session's next turn starts once this one is durable.
        """
        self._turns.checkin(lease, slot)

    def release(self, lease: Lease) -> None:
        """End the turn without a state; without `record`, the session is unchanged.

        After `record` with a token log the turn stays. The next turn replays its tokens.
        """
        self._turns.release(lease)

    def delete(self, session_id: str, delete_prefix: bool = False, on_durable: OnDurable | None = None) -> int:
        """Delete a session with its dialogues, or all sessions with the name prefix; return the number.

        Deletes one dialogue when given its display name, unless a session has that id. Leases of running turns become
        FAILED. `on_durable` is called once from `poll`, with None or with the error that delays the delete on disk; the
        pool retries it. Raises InvalidSessionId.
        """
        checked_key(session_id)
        return self._turns.delete(session_id, delete_prefix, on_durable).count

    def delete_counted(self, session_id: str, delete_prefix: bool, on_deleted: OnDeleted) -> None:
        """`delete`, but also count the sessions that only other engines knew.

        `on_deleted` is called once from `poll`, with the number or with the error that delays the delete on disk.
        Raises InvalidSessionId.
        """
        checked_key(session_id)
        job = self._turns.delete(session_id, delete_prefix, lambda error: on_deleted(error or job.count))

    def export(self, session_id: str, on_exported: OnExported, dialogue: int | None = None) -> None:
        """Copy a session as of its last durable turn. The session stays usable meanwhile.

        `on_exported` is called once from `poll` with a `SessionFile` or an error. Call `SessionFile.encode` on another
        thread. Raises InvalidSessionId, SessionNotFound, SessionUnusable, PoolFull.
        """
        self._import_export.export(session_id, dialogue, on_exported)

    def import_session(self, session_id: str, file: SessionFile, on_durable: OnDurable) -> None:
        """Create a session from an exported one. `on_durable` is called once from `poll`.

        Raises InvalidSessionFile (another model or state layout), SessionBusy (the id is taken), PoolFull,
        InvalidSessionId.
        """
        self._import_export.import_session(session_id, file, on_durable)

    # -- prefixes --------------------------------------------------------------------------------------

    # `base`: number of the state that the tokens follow (`TunedState.number`). Prompts share a prefix only with equal
    # bases.

    def match_prefix(self, tokens: Sequence[int], base: int = NO_BASE) -> PrefixHit | None:
        """Return the longest cached prefix of `tokens` that is shorter than them. Its slot is pinned until `unpin`."""
        return self._prefix.match(tokens, base)

    def unpin(self, hit: PrefixHit) -> None:
        """The row has stopped reading the slot."""
        self._prefix.unpin(hit)

    def unpin_slot(self, slot: int) -> None:
        """The row has stopped reading a slot pinned by `tuned.pin`."""
        self._tiers.unpin(slot)

    def observe_prompt(self, tokens: Sequence[int], base: int = NO_BASE) -> None:
        """Announce a prompt. Optional: lets prompts that wait together share a prefill."""
        self._prefix.observe(tokens, base)

    def should_wait_for_prefix(self, tokens: Sequence[int], base: int = NO_BASE) -> bool:
        """Whether another row is computing a longer prefix of `tokens` than the cached one."""
        return self._prefix.should_wait(tokens, base)

    def prefix_cache_points(self, tokens: Sequence[int], observed: bool = False, base: int = NO_BASE) -> list[int]:
        """Return the position, if any, where prefill should pause and call `offer_prefix`. At most one.

        `observed`: the prompt was announced by `observe_prompt`. Other rows may wait for this state
        (`should_wait_for_prefix`), so a row that ends early must call `abandon_cache_point`.
        """
        return self._prefix.cache_points(tokens, observed, base)

    def abandon_cache_point(self, tokens: Sequence[int], base: int = NO_BASE) -> None:
        """The state after `tokens`, promised by `prefix_cache_points`, will not be offered."""
        self._prefix.abandon(tokens, base)

    def offer_prefix(self, tokens: Sequence[int], slot: int, base: int = NO_BASE) -> PrefixHit | None:
        """Cache the state after `tokens`, which the caller's slot holds.

        On a hit, the pool owns the slot. The caller may read it until `unpin` and must write to another. None: not
        cached, the slot stays the caller's.
        """
        return self._prefix.offer(tokens, slot, base)

    # -- housekeeping ----------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether `poll` has work now or soon: call it every few milliseconds."""
        store = self._store
        is_busy = self._deliver.waiting or self._tiers.busy or self._turns.pending or self._import_export.pending
        is_busy = is_busy or self._listing.pending
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
        self._tiers.finish_copies()
        self._turns.begin_saves()
        if self._turns.acquisition is not None:
            self._turns.acquisition.poll()
        self._turns.lease_queue.poll()
        now = time.monotonic()
        self._listing.expire(now)
        if now >= self._next_housekeeping:
            self._next_housekeeping = now + _HOUSEKEEPING_S
            self._do_housekeeping(now)

    def list_sessions(self, on_listed: OnListed, limit: int = 100, offset: int = 0) -> None:
        """List a page of sessions, newest first, with counts by tier. The database's reader finds them.

        `on_listed` is called once from `poll` with a `SessionPage`, DatabaseReadFailed, DirectoryUnreachable, or
        DatabaseTimeout after 5 s. Raises PoolFull when too many lists are being read.
        """
        self._listing.request(limit, offset, on_listed)

    def stats(self) -> dict[str, Any]:
        return {
            **pool_stats(self.config, self._index, self._tiers, self._prefix, self._store),
            "waiting_leases": len(self._turns.lease_queue),
            "tuned_states": {"loaded": len(self.tuned), "in_slots": len(self.tuned.slots)},
            "adapters": {"loaded": len(self.adapters), "rows": self.adapters.num_refs},
        }

    def close(self) -> None:
        """Store every session's newest state, deliver pending callbacks, close the database. Blocks."""
        self._prefix.close()
        self.tuned.close()
        if self._store is not None:
            self._flush(self._store)
            self._store.close()
        self._deliver.run()

    def _do_housekeeping(self, now: float) -> None:
        self._tiers.trim()
        self._prefix.trim()
        self.tuned.trim()
        if now >= self._next_retry:
            self._next_retry = now + _RETRY_S
            self._turns.retry_deletes()
            if self._store is not None:
                self._store.sweep_objects()
            if self._cleanup is None:
                self._turns.remove(self._expired() or self._over_limit_sessions())
            else:
                self._cleanup.run()
        self._checkpoint_due_sessions()

    def _checkpoint_due_sessions(self) -> None:
        """Store dirty states: those with a long log, then idle ones, then those that may be evicted soon."""
        checkpoints = self._tiers.checkpoints
        idle_since = time.time() - self.config.checkpoint_idle_s
        nearly_full = self._tiers.host_nearly_full
        dirty = [session for session in [*self._index.l2, *self._index.l1] if session.dirty]
        for session in dirty:
            if checkpoints.is_due(session) or session.updated < idle_since:
                checkpoints.begin(session)
        for session in dirty:
            if nearly_full and session.host is not None and not checkpoints.busy:
                checkpoints.begin(session)

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
        count = min(_MAX_EXPIRED_PER_RUN, 1 + store.excess_bytes // max(1, self._tiers.arena.state_bytes))
        evicted: list[Session] = []
        for session in self._index:
            if len(evicted) >= count:
                break
            if session.exists and not session.busy:
                evicted.append(session)
        return evicted

    def _flush(self, store: Store) -> None:
        """Store all states that are newer than on disk."""
        deadline: float | None = None
        while True:
            self._tiers.wait_copies()
            self._deliver.run()
            self._turns.retry_deletes()
            self._turns.begin_saves()
            waiting = [s for s in [*self._index.l1, *self._index.l2] if s.dirty and not s.reloadable]
            for session in waiting:
                self._tiers.checkpoints.begin(session, ignore_retry_delay=True)
            outstanding = waiting or store.pending or self._tiers.busy or self._turns.unsaved
            if not outstanding or store.failure is not None:
                return
            if store.degraded is None:
                deadline = None
            elif deadline is None:
                deadline = time.monotonic() + _RETRY_S
            elif time.monotonic() > deadline:
                return  # the disk stays broken: only the committed log is kept
            time.sleep(0.001)
