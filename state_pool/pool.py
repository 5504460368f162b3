"""What the engine sees of the state pool: sessions are checked out, turns recorded and checked in. Engine thread only.

Nothing here waits for a disk or a device: what takes time is begun, and `poll` concludes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from state_pool.adapters import Adapters
from state_pool.arena import Arena
from state_pool.cache.prefix_cache import PrefixCache, PrefixHit
from state_pool.cache.tiers import Tiers
from state_pool.cache.tuned_states import TunedStates
from state_pool.config import PoolConfig
from state_pool.disk.store import CompletionQueue, Store
from state_pool.errors import PoolLost
from state_pool.expiry import Expiry, UsageTimes
from state_pool.integrity import integrity_faults
from state_pool.session_file import SessionFile
from state_pool.session_listing import OnListed, SessionListing
from state_pool.sessions import Lease, OnDurable, Session, SessionIndex, checked_key
from state_pool.status import pool_stats
from state_pool.tuned_state import NO_BASE, Origin
from state_pool.turns.import_export import ImportExport, OnExported
from state_pool.turns.shared_cleanup import SharedCleanup
from state_pool.turns.turns import Turns

OnDeleted = Callable[[int | Exception], None]

_HOUSEKEEPING_S = 0.25
_RETRY_S = 1.0
_MAX_EXPIRED_PER_RUN = 256


class StatePool:
    """Sessions and cached prefixes on three tiers. Owned by the engine thread: call every method there."""

    def __init__(self, arena: Arena, config: PoolConfig, wake: Callable[[], None] | None = None) -> None:
        """`wake` is called from other threads when `poll` has something to do.

        Raises DatabaseUnusable when the database cannot be opened, naming file, fault and remedy.
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
        """Slots that rows, sessions, prefixes and tuned states share."""
        return self._tiers.slots.num_usable

    @property
    def num_free(self) -> int:
        """Slots nobody holds; `allocate` may make more."""
        return self._tiers.slots.num_free

    def allocate(self) -> int | None:
        """A slot for a row to write to. None: none is free yet; room is being made, ask again at a later step."""
        return self._tiers.allocate()

    def free(self, slot: int) -> None:
        """Give back a slot from `allocate` that was neither checked in nor taken by the prefix cache."""
        self._tiers.slots.drop_ref(slot)

    # -- turns -----------------------------------------------------------------------------------------

    @property
    def has_token_log(self) -> bool:
        """Whether a turn is kept by its tokens, so that its state may be thrown away."""
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
        """Begin a turn of a session; the lease becomes READY at once or in a later `poll`.

        `branch_from` None: the turn continues the plain session, one after another in order. n: it starts a
        new dialogue from dialogue n, which isn't changed; 0 is the empty root. `state` names a tuned state that
        a new history begins from; "": the zero state, or whatever an existing one began from;
        `adapter` one that its row runs under, likewise; `mixture` what a session of a mixture begins from, which
        `release` keeps, after `record`: it has no state of one slot.
        Raises UnfitName, SessionBusy (only with `wait` False), DialogueNotFound (unknown parent), SessionUnusable,
        PoolFull, StateNotFound, AdapterNotFound, OtherOrigin or OtherAdapter (an existing one began
        otherwise).
        """
        if branch_from is not None:
            return self._turns.checkout_branch(session_id, branch_from, state, adapter, mixture)
        return self._turns.checkout(session_id, wait, state, adapter, mixture)

    def record(self, lease: Lease, tokens: list[int], on_durable: OnDurable) -> None:
        """The turn is over and these are its token ids: prompt as fed and visible answer.

        `on_durable` is called once from `poll`: with None when the turn is as durable as configured, else
        with why it was not kept (its session then stays as it was). Call `checkin` next, or `release`.
        """
        self._turns.record(lease, tokens, on_durable)

    def checkin(self, lease: Lease, slot: int) -> None:
        """The slot now holds the state after the recorded turn; it is the pool's from here on.

        The session's next turn begins when this one is durable.
        """
        self._turns.checkin(lease, slot)

    def release(self, lease: Lease) -> None:
        """The turn is dropped and the session is what it was.

        After `record` with a log, the turn stays and its tokens are replayed from the log by the next one.
        """
        self._turns.release(lease)

    def delete(self, session_id: str, delete_prefix: bool = False, on_durable: OnDurable | None = None) -> int:
        """Remove a session with its dialogues, or all whose names begin so, from every tier; returns how many.

        A dialogue alone goes by the name it is shown under, unless a session has that id. Running turns
        lose: their leases turn FAILED. `on_durable` is called once from `poll`: with None when the delete
        survives a crash, else with why it is not on disk yet (it is then tried again).
        Raises UnfitName for an id that no session can have.
        """
        checked_key(session_id)
        return self._turns.delete(session_id, delete_prefix, on_durable).count

    def delete_counted(self, session_id: str, delete_prefix: bool, on_deleted: OnDeleted) -> None:
        """`delete`, with how many there were, those that only other engines knew among them.

        `on_deleted` is called once from `poll`, with the number or with why the delete is not on disk yet.
        Raises UnfitName for an id that no session can have.
        """
        checked_key(session_id)
        job = self._turns.delete(session_id, delete_prefix, lambda error: on_deleted(error or job.count))

    def export(self, session_id: str, on_exported: OnExported, dialogue: int | None = None) -> None:
        """Copy a session out as it was after its last durable turn; it may go on meanwhile.

        `on_exported` is called once from `poll` with a `SessionFile`, whose `encode` belongs on another
        thread, or with why it could not be read. Raises UnfitName, SessionNotFound, SessionUnusable, PoolFull.
        """
        self._import_export.export(session_id, dialogue, on_exported)

    def import_session(self, session_id: str, file: SessionFile, on_durable: OnDurable) -> None:
        """Make an exported session a new one here; `on_durable` is called once from `poll`.

        Raises NotASession (another model or state layout), SessionBusy (the id is taken), PoolFull, UnfitName.
        """
        self._import_export.import_session(session_id, file, on_durable)

    # -- prefixes --------------------------------------------------------------------------------------

    # `base` is the number of the state that the tokens are read from (`TunedState.number`): prompts share a prefix
    # only where they have it in common.

    def match_prefix(self, tokens: Sequence[int], base: int = NO_BASE) -> PrefixHit | None:
        """The longest cached state after a proper prefix of `tokens`, its slot pinned until `unpin`."""
        return self._prefix.match(tokens, base)

    def unpin(self, hit: PrefixHit) -> None:
        """The row doesn't read the slot any more."""
        self._prefix.unpin(hit)

    def unpin_slot(self, slot: int) -> None:
        """The row doesn't read a slot any more that `tuned.pin` gave."""
        self._tiers.unpin(slot)

    def observe_prompt(self, tokens: Sequence[int], base: int = NO_BASE) -> None:
        """A prompt has arrived. Optional: prompts that wait at the same time then share a prefill from the first on."""
        self._prefix.observe(tokens, base)

    def should_wait_for_prefix(self, tokens: Sequence[int], base: int = NO_BASE) -> bool:
        """Whether another row is computing a longer prefix of `tokens` than is cached: starting later is cheaper."""
        return self._prefix.should_wait(tokens, base)

    def prefix_cache_points(self, tokens: Sequence[int], observed: bool = False, base: int = NO_BASE) -> list[int]:
        """Positions where the prefill should pause, because the state there is worth `offer_prefix`; at most one.

        `observed`: the prompt was announced by `observe_prompt`. Rows that share the border wait for it if
        they ask `should_wait_for_prefix`, so a row that ends cutoff must say so by `abandon_cache_point`.
        """
        return self._prefix.cache_points(tokens, observed, base)

    def abandon_cache_point(self, tokens: Sequence[int], base: int = NO_BASE) -> None:
        """The state after `tokens`, announced by `prefix_cache_points`, will not be offered after all."""
        self._prefix.abandon(tokens, base)

    def offer_prefix(self, tokens: Sequence[int], slot: int, base: int = NO_BASE) -> PrefixHit | None:
        """Cache the state after `tokens`, held in the caller's slot.

        A hit: the pool owns the slot now; the caller may read it until `unpin` and must write to another.
        None: refused, nothing changed.
        """
        return self._prefix.offer(tokens, slot, base)

    # -- housekeeping ----------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether `poll` has or will soon have something to conclude: call it every few milliseconds."""
        store = self._store
        waits = self._deliver.waiting or self._tiers.busy or self._turns.pending or self._import_export.pending
        waits = waits or self._listing.pending
        return bool(waits or (store is not None and store.pending))

    @property
    def failure(self) -> str | None:
        """Why the pool can do nothing any more: one of its threads has died."""
        return None if self._store is None else self._store.failure

    def poll(self) -> None:
        """Conclude what has finished and begin what has become possible. Call once per engine step.

        Raises PoolLost when a thread of the pool has died: no turn would ever be acknowledged again.
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
        """Counts by tier, and a page of the sessions, newest first, as the database's reader finds them.

        `on_listed` is called once from `poll` with a `SessionPage`, with DatabaseUnreadable or DirectoryUnreachable, or
        with DatabaseSlow when the reader took longer than 5 s. Raises PoolFull when too many lists are being read.
        """
        self._listing.request(limit, offset, on_listed)

    def stats(self) -> dict[str, Any]:
        """Sizes, queues, counters, degradations."""
        return {
            **pool_stats(self.config, self._index, self._tiers, self._prefix, self._store),
            "waiting_leases": len(self._turns.lease_queue),
            "tuned_states": {"loaded": len(self.tuned), "in_slots": len(self.tuned.slots)},
            "adapters": {"loaded": len(self.adapters), "rows": self.adapters.num_refs},
        }

    def check_integrity(self, rows: Iterable[int] | None = None) -> list[str]:
        """What is wrong with the bookkeeping; empty if all is well.

        `rows`: slots from `allocate` that the caller holds now; None: none, nothing runs and nothing is pending.
        """
        return integrity_faults(self._index, self._tiers, self._prefix, self.tuned, rows)

    def close(self) -> None:
        """Store every session's newest state, deliver what is outstanding, let go of the database. Blocks."""
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
        """Begin to store states: those whose log must not grow or that rest, then those that may have to leave."""
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
        """Sessions past their time, the longest unused first."""
        expired: list[Session] = []
        cutoff = self._expiry.cutoff()
        for session in self._index:
            if cutoff is None or session.updated >= cutoff or len(expired) >= _MAX_EXPIRED_PER_RUN:
                break
            if not session.busy:
                expired.append(session)
        return expired

    def _over_limit_sessions(self) -> list[Session]:
        """The oldest sessions, as many as bring the database under its limit."""
        store = self._store
        if store is None or not store.over_limit or store.has_pending_deletes or self.config.state_db_full != "evict":
            return []
        count = min(_MAX_EXPIRED_PER_RUN, 1 + store.excess_bytes // max(1, self._tiers.arena.state_bytes))
        nearly_full: list[Session] = []
        for session in self._index:
            if len(nearly_full) >= count:
                break
            if session.exists and not session.busy:
                nearly_full.append(session)
        return nearly_full

    def _flush(self, store: Store) -> None:
        """Store what is newer in memory than on disk, as fast as the writer takes it."""
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
                return  # the disk takes nothing: the log, as far as it was committed, is what stays
            time.sleep(0.001)
