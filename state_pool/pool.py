"""The state pool's face: sessions are checked out, turns recorded and checked in. Engine thread only.

Nothing here waits for a disk or a device: what takes time is begun, and `poll` concludes it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from state_pool.arena import Arena
from state_pool.config import PoolConfig
from state_pool.crash_points import reach
from state_pool.errors import PoolError, PoolFull, SessionBusy, SessionNotFound, SessionUnusable, TurnNotStored
from state_pool.jobs import Append, Delete, Loaded, Quarantined
from state_pool.lease import Lease, LeaseState, OnDurable, PendingTurn
from state_pool.prefix import PrefixCache, PrefixHit
from state_pool.reader import Damaged, LoadResult
from state_pool.sessions import ROOT, Session, SessionIndex, SessionKey
from state_pool.status import pool_stats, session_status
from state_pool.store import Deliveries, Store
from state_pool.tiers import Tiers, mark_stored, row_of

_HOUSEKEEPING_S = 0.25
_RETRY_S = 1.0


class StatePool:
    """Sessions and cached prefixes on three tiers. Owned by the engine thread: call every method there."""

    def __init__(self, arena: Arena, config: PoolConfig, wake: Callable[[], None] | None = None) -> None:
        """`wake` is called from other threads when `poll` has something to do.

        Raises DatabaseUnusable when the database cannot be opened, naming file, fault and remedy.
        """
        self.config = config
        self._deliver = Deliveries(wake)
        self._index = SessionIndex()
        self._store = Store(config, arena, self._deliver) if config.state_db else None
        if self._store is not None:
            self._store.fill(self._index)
        self._tiers = Tiers(arena, config, self._index, self._store)
        self._prefix = PrefixCache(self._tiers, config)
        self._tiers.other = self._prefix
        self._wanting: deque[Lease] = deque()
        """Leases whose state is on its way to a slot, in the order they came."""
        self._unsaved: deque[Callable[[], bool]] = deque()
        """Turns (durability "turn") that wait for the writer's queue; each returns whether it could begin."""
        self._undeleted: list[tuple[int, ...]] = []
        """Deletes that failed on disk and are tried again."""
        self._next_row = 1
        self._loads = 0
        self._next_housekeeping = 0.0
        self._next_retry = 0.0

    # -- slots -----------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Slots nobody holds; `allocate` may make more."""
        return self._tiers.slots.num_free

    def allocate(self) -> int | None:
        """A slot for a row to write to. None: none is free yet; room is being made, ask again at a later step."""
        return self._tiers.take()

    def free(self, slot: int) -> None:
        """Give back a slot from `allocate` that was neither checked in nor taken by the prefix cache."""
        self._tiers.slots.drop(slot)

    # -- turns -----------------------------------------------------------------------------------------

    def checkout(self, session_id: str, branch_from: int | None = None, wait: bool = True) -> Lease:
        """Begin a turn of a session; the lease becomes READY at once or in a later `poll`.

        `branch_from` None: the turn continues the plain session, one after another in order. n: it starts a
        new dialogue from dialogue n, which isn't changed; 0 is the empty root.
        Raises SessionBusy (only with `wait` False), SessionNotFound (unknown parent dialogue),
        SessionUnusable, PoolFull.
        """
        self._check_id(session_id)
        if branch_from is not None:
            return self._checkout_branch(session_id, branch_from)
        session = self._index.get(SessionKey(session_id))
        if session is None:
            self._refuse_when_full()
            session = self._new_session(SessionKey(session_id), None)
        if session.unusable is not None:
            raise SessionUnusable(f"session {session_id!r}: {session.unusable}")
        if not wait and (session.active is not None or session.queue or session.pending is not None):
            raise SessionBusy(f"session {session_id!r} is busy with another turn; wait for it, or send wait: true")
        lease = Lease(session, session)
        session.queue.append(lease)
        self._advance(session)
        return lease

    def _checkout_branch(self, session_id: str, parent: int) -> Lease:
        source = None
        if parent != ROOT:
            source = self._index.get(SessionKey(session_id, parent)) if parent > ROOT else None
            if source is None or not source.exists:
                raise SessionNotFound(f"session {session_id!r} has no dialogue {parent}; 0 is its empty root")
            if source.unusable is not None:
                raise SessionUnusable(f"session {source.key.shown!r}: {source.unusable}")
        self._refuse_when_full()
        now = time.time()
        # Its number is only known when the turn is recorded: several branches may run at once.
        dialogue = Session(SessionKey(session_id, ROOT), self._row(), now, now, parent=source)
        lease = Lease(dialogue, source, branch=True)
        dialogue.active = lease
        self._want(lease)
        return lease

    def record(self, lease: Lease, tokens: list[int], on_durable: OnDurable) -> None:
        """The turn is over and these are its token ids: prompt as fed and visible answer.

        `on_durable` is called once from `poll`: with None when the turn is as durable as configured, else
        with why it was not kept (its session then stays as it was). Call `checkin` next, or `release`.
        """
        session = lease.session
        if lease.state is not LeaseState.READY:
            error = lease.error or PoolError("the lease has ended")
            self._deliver(lambda: on_durable(error))
            return
        if lease.branch:
            session.key = SessionKey(session.key.session_id, self._index.next_dialogue(session.key.session_id))
            lease.dialogue_idx = session.key.dialogue
            session.num_tokens = lease.num_tokens
            self._index.add(session)
        turn = PendingTurn(session.turn + 1, list(tokens), on_durable)
        session.pending = turn
        if self._store is None or self.config.durability == "lazy":
            self._deliver(lambda: self._committed(session, turn, None))
        if self._store is not None and self.config.durability != "turn" and not session.log_broken:
            self._store.submit(self._append_of(session, turn), lambda error: self._logged(session, turn, error))

    def checkin(self, lease: Lease, slot: int) -> None:
        """The slot now holds the state after the recorded turn; it is the pool's from here on."""
        session, turn = lease.session, lease.session.pending
        if lease.state is not LeaseState.READY or turn is None:
            self._end(lease)
            self.free(slot)
            return
        turn.slot = slot
        self._end(lease)
        turn.checked_in = True
        if self._store is not None and self.config.durability == "turn":
            append = self._append_of(session, turn)
            self._unsaved.append(
                lambda: self._tiers.store_turn(slot, append, lambda error: self._committed(session, turn, error))
            )
            self._begin_saves()
        self._settle(session)

    def release(self, lease: Lease) -> None:
        """The turn is dropped and the session is what it was; after `record`, the turn stays and is replayed."""
        session, turn = lease.session, lease.session.pending
        self._end(lease)
        if turn is not None and not turn.checked_in:
            turn.checked_in = True
            if self._store is None or self.config.durability == "turn":
                error = TurnNotStored("the turn was given up before its state was stored")
                self._committed(session, turn, error)
            self._settle(session)
            return
        if session.active is lease:
            session.active = None
        if lease in session.queue:
            session.queue.remove(lease)
        self._advance(session)

    def delete(self, session_id: str, delete_prefix: bool = False, on_durable: OnDurable | None = None) -> int:
        """Remove a session with its dialogues, or all whose names begin so, from every tier; returns how many.

        Running turns lose: their leases turn FAILED. `on_durable` is called once from `poll`: with None when
        the delete survives a crash, else with why it is not on disk yet (it is then tried again).
        """
        doomed = self._index.matching(session_id, delete_prefix)
        count = sum(session.exists for session in doomed)
        for session in doomed:
            self._bury(session)
        self._delete_rows(tuple(s.row for s in doomed if s.exists or s.pending is not None), on_durable)
        return count

    # -- prefixes --------------------------------------------------------------------------------------

    def match_prefix(self, tokens: Sequence[int]) -> PrefixHit | None:
        """The longest cached state after a proper prefix of `tokens`, its slot pinned until `unpin`."""
        return self._prefix.match(tokens)

    def unpin(self, hit: PrefixHit) -> None:
        """The row doesn't read the slot any more."""
        self._prefix.unpin(hit)

    def prefix_borders(self, tokens: Sequence[int], extra_borders: Sequence[int] = ()) -> list[int]:
        """Positions where the prefill should pause, because the state there is worth `offer_prefix`; ascending."""
        return self._prefix.borders(tokens, extra_borders)

    def offer_prefix(self, tokens: Sequence[int], slot: int) -> PrefixHit | None:
        """Cache the state after `tokens`, held in the caller's slot.

        A hit: the pool owns the slot now; the caller may read it until `unpin` and must write to another.
        None: refused, nothing changed.
        """
        return self._prefix.offer(tokens, slot)

    # -- housekeeping ----------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether `poll` has or will soon have something to conclude: call it every few milliseconds."""
        store = self._store
        return bool(
            self._deliver.waiting
            or self._tiers.busy
            or self._wanting
            or self._unsaved
            or self._loads
            or (store is not None and store.pending)
        )

    def poll(self) -> None:
        """Conclude what has finished and begin what has become possible. Call once per engine step."""
        self._deliver.run()
        self._tiers.finish_copies()
        self._begin_saves()
        self._serve()
        now = time.monotonic()
        if now >= self._next_housekeeping:
            self._next_housekeeping = now + _HOUSEKEEPING_S
            self._keep_house(now)

    def status(self, limit: int = 100, offset: int = 0) -> dict[str, Any]:
        """What /state/status shows: counts by tier, and sessions newest first."""
        return session_status(self._index, limit, offset)

    def stats(self) -> dict[str, Any]:
        """What /status shows of the pool: sizes, queues, counters, degradations."""
        return pool_stats(self.config, self._index, self._tiers, self._prefix, self._store)

    def close(self) -> None:
        """Store every session's newest state, deliver what is outstanding, let go of the database. Blocks."""
        self._prefix.clear()
        if self._store is not None:
            self._flush()
            self._store.close()
        self._deliver.run()

    # -- inside: turns ---------------------------------------------------------------------------------

    def _check_id(self, session_id: str) -> None:
        try:
            session_id.encode()
        except UnicodeEncodeError:
            raise SessionNotFound(f"session id {session_id!r} is not valid Unicode text") from None

    def _refuse_when_full(self) -> None:
        if self._store is not None and self._store.over_limit and self.config.state_db_full == "refuse":
            raise PoolFull(
                f"the session database holds its limit of {self.config.state_db_max_gb:g} GB and takes no new session; "
                "delete some, or raise --state-db-max-gb"
            )

    def _row(self) -> int:
        if self._store is not None:
            return self._store.next_row()
        self._next_row += 1
        return self._next_row

    def _new_session(self, key: SessionKey, parent: Session | None) -> Session:
        now = time.time()
        session = Session(key, self._row(), now, now, parent=parent)
        self._index.add(session)
        return session

    def _append_of(self, session: Session, turn: PendingTurn) -> Append:
        row = row_of(session, turn=turn.turn, num_tokens=session.num_tokens + len(turn.tokens), updated=time.time())
        return Append(row, turn.tokens)

    def _advance(self, session: Session) -> None:
        """Begin the next waiting turn, if none runs or settles; forget a session nobody came to keep."""
        if session.active is not None or session.pending is not None:
            return
        if session.queue:
            lease = session.queue.popleft()
            session.active = lease
            self._want(lease)
        elif not session.exists and not session.deleted:
            self._index.remove(session)

    def _want(self, lease: Lease) -> None:
        """Make a lease ready now, or put it among those that wait for a state."""
        source = lease.source
        if source is not None:
            source.readers += 1
            lease.wants = True
        if not self._try(lease):
            self._wanting.append(lease)

    def _try(self, lease: Lease) -> bool:
        """Whether the lease needs no more waiting, because it is ready or has failed."""
        source = lease.source
        if lease.state is not LeaseState.WAITING:
            return True
        if source is None or not source.exists:
            self._make_ready(lease)
            return True
        if lease.tier == "new":
            lease.tier = source.tier
        if source.slot is None and source.host is not None and self._tiers.can_pin:
            self._tiers.promote(source)
        if source.slot is not None:
            if not self._tiers.pin(source.slot):
                return False
            lease.counted = True
            lease.exists = True
            lease.read_slot, lease.replay = source.slot, list(source.replay)
            lease.num_tokens = source.num_tokens
            self._make_ready(lease)
            return True
        if source.host is None and not source.loading and self._loads < self.config.transfer_states:
            self._load(source)
        return False

    def _make_ready(self, lease: Lease) -> None:
        self._stop_wanting(lease)
        lease.state = LeaseState.READY

    def _stop_wanting(self, lease: Lease) -> None:
        if lease.wants and lease.source is not None:
            lease.source.readers -= 1
        lease.wants = False

    def _serve(self) -> None:
        """Try the waiting leases in order; those that still have to wait keep it."""
        for _ in range(len(self._wanting)):
            lease = self._wanting.popleft()
            if not self._try(lease):
                self._wanting.append(lease)

    def _load(self, session: Session) -> None:
        assert self._store is not None
        session.loading = True
        self._loads += 1
        self._store.load(session.row, lambda result: self._loaded(session, result))

    def _loaded(self, session: Session, result: LoadResult) -> None:
        self._loads -= 1
        session.loading = False
        if session.deleted or session.slot is not None or session.host is not None:
            return
        if isinstance(result, Loaded):
            try:
                host = None if result.parts is None else self._tiers.arena.host_state(result.parts)
            except ValueError as error:
                result = SessionUnusable(f"the stored state does not fit this model ({error})")
            else:
                self._tiers.counters.bytes_from_disk += result.bytes_read
                self._tiers.receive(session, host, result.replay)
                return
        if isinstance(result, Damaged):
            session.unusable = str(result)
            self._submit_mark(session)
        self._fail(session, SessionUnusable(f"session {session.key.shown!r}: {result}"))

    def _submit_mark(self, session: Session) -> None:
        if self._store is not None and session.unusable is not None:
            self._store.submit(Quarantined(session.row, session.unusable), lambda _: None)

    def _fail(self, session: Session, error: Exception) -> None:
        """Every lease that waits for the session's state fails."""
        for lease in [lease for lease in self._wanting if lease.source is session] + list(session.queue):
            self._stop_wanting(lease)
            lease.state, lease.error = LeaseState.FAILED, error
        session.queue.clear()

    def _end(self, lease: Lease) -> None:
        """The lease reads no more."""
        self._stop_wanting(lease)
        if lease.counted:
            self._tiers.unpin(lease.read_slot)
            lease.counted = False
        if lease.state is not LeaseState.FAILED:
            lease.state = LeaseState.DONE

    def _logged(self, session: Session, turn: PendingTurn, error: Exception | None) -> None:
        if self.config.durability == "lazy":
            session.log_broken = session.log_broken or error is not None
            return
        self._committed(session, turn, error)

    def _committed(self, session: Session, turn: PendingTurn, error: Exception | None) -> None:
        """The turn's fate is known: tell the engine, once."""
        if session.deleted:
            error = SessionNotFound(f"session {session.key.shown!r} was deleted while its turn ran")
        turn.outcome = error or True
        on_durable, turn.on_durable = turn.on_durable, None
        if on_durable is not None:
            on_durable(error)
            reach("after_acknowledgement")
        self._settle(session)

    def _settle(self, session: Session) -> None:
        """When the turn's fate and its state are both known, make it part of the session, or drop it."""
        turn = session.pending
        if turn is None or turn.outcome is None or not turn.checked_in:
            return
        session.pending = None
        session.active = None
        if turn.outcome is True and not session.deleted:
            self._accept(session, turn)
        elif turn.slot is not None:
            self.free(turn.slot)
        self._advance(session)

    def _accept(self, session: Session, turn: PendingTurn) -> None:
        self._index.num_existing += not session.exists
        session.turn = turn.turn
        session.num_tokens += len(turn.tokens)
        self._index.touch(session, time.time())
        if turn.slot is None:
            self._tiers.forget(session)
            return
        self._tiers.park(session, turn.slot)
        if self.config.durability == "turn" and self._store is not None:
            mark_stored(session, row_of(session))
        elif session.num_tokens - session.disk_tokens >= self.config.checkpoint_tokens:
            self._tiers.checkpoint(session)

    def _begin_saves(self) -> None:
        while self._unsaved and self._unsaved[0]():
            self._unsaved.popleft()

    # -- inside: deletes -------------------------------------------------------------------------------

    def _bury(self, session: Session) -> None:
        session.deleted = True
        error = SessionNotFound(f"session {session.key.shown!r} was deleted")
        lease = session.active
        self._fail(session, error)
        if lease is not None and lease.state is not LeaseState.DONE:
            lease.state, lease.error = LeaseState.FAILED, error
        self._tiers.forget(session)
        self._index.remove(session)

    def _delete_rows(self, rows: tuple[int, ...], on_durable: OnDurable | None) -> None:
        if self._store is None or not rows:
            if on_durable is not None:
                self._deliver(lambda: on_durable(None))
            return

        def done(error: Exception | None) -> None:
            if error is not None:
                self._undeleted.append(rows)
            else:
                reach("after_delete")
            if on_durable is not None:
                on_durable(error)

        self._store.submit(Delete(rows), done)

    # -- inside: housekeeping --------------------------------------------------------------------------

    def _keep_house(self, now: float) -> None:
        self._tiers.trim()
        self._prefix.trim()
        if now >= self._next_retry:
            self._next_retry = now + _RETRY_S
            undeleted, self._undeleted = self._undeleted, []
            for rows in undeleted:
                self._delete_rows(rows, None)
            self._expire()
        idle_since = time.time() - self.config.checkpoint_idle_s
        for session in [*self._index.l2, *self._index.l1]:
            long_log = session.num_tokens - session.disk_tokens >= self.config.checkpoint_tokens
            if session.dirty and (long_log or session.host is not None or session.updated < idle_since):
                self._tiers.checkpoint(session)

    def _expire(self) -> None:
        """Delete sessions past their time, and the oldest while the database is over its limit."""
        before = time.time() - self.config.session_ttl_s if self.config.session_ttl_s > 0 else None
        doomed: list[Session] = []
        for session in self._index:
            if before is None or session.updated >= before or len(doomed) >= 256:
                break
            if not session.busy:
                doomed.append(session)
        if not doomed and self._store is not None and self._store.over_limit and self.config.state_db_full == "evict":
            doomed = [s for s in self._index if not s.busy][:1]
        for session in doomed:
            self._bury(session)
        self._delete_rows(tuple(session.row for session in doomed), None)

    def _flush(self) -> None:
        """Store what is newer in memory than on disk, as fast as the writer takes it."""
        assert self._store is not None
        deadline = None
        while True:
            self._tiers.wait_copies()
            self._deliver.run()
            self._begin_saves()
            waiting = [s for s in [*self._index.l1, *self._index.l2] if s.dirty and not s.reloadable]
            for session in waiting:
                self._tiers.checkpoint(session)
            if not (waiting or self._store.pending or self._unsaved or self._tiers.busy):
                return
            if self._store.degraded is None:
                deadline = None
            elif deadline is None:
                deadline = time.monotonic() + _RETRY_S
            elif time.monotonic() > deadline:
                return
            time.sleep(0.001)
