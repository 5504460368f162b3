"""A turn from checkout to commit, and deletes. Engine thread only."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from state_pool import errors
from state_pool.cache.checkpoints import append_job, build_session_row, mark_stored
from state_pool.cache.tiers import Tiers
from state_pool.cache.tuned_states import TunedStates
from state_pool.config import PoolConfig
from state_pool.disk.operations import DeleteNamed
from state_pool.disk.store import CompletionQueue, Store
from state_pool.origins import Adapters, Origin
from state_pool.session_key import ROOT, SessionKey, has_prefix
from state_pool.sessions import Lease, LeaseState, OnDurable, PendingTurn, Session, SessionIndex, checked_key
from state_pool.turns.acquisition import Acquisition
from state_pool.turns.deletes import SessionDeletes
from state_pool.turns.lease_queue import LeaseQueue

OnDeleted = Callable[[int | Exception], None]


class Turns:
    """Keeps each session's turns in order. Makes them durable before they count."""

    def __init__(
        self,
        config: PoolConfig,
        index: SessionIndex,
        tiers: Tiers,
        store: Store | None,
        deliver: CompletionQueue,
        tuned: TunedStates,
        adapters: Adapters,
    ) -> None:
        self.lease_queue = LeaseQueue(config, index, tiers, store, tuned, adapters)
        self._adapters = adapters
        self._tuned = tuned
        self._config = config
        self._index = index
        self._tiers = tiers
        self._store = store
        self._deliver = deliver
        self._stores_states = store is not None and config.durability == "turn"
        self._stores_log = store is not None and config.durability != "turn"
        self._is_lazy = store is not None and config.durability == "lazy"
        self.acquisition: Acquisition | None = None
        """set if the database is shared"""
        if store is not None and store.shared:
            self.acquisition = Acquisition(
                store, index, tiers, self.lease_queue.enqueue, self.start_next_turn, self._check_room
            )
        self._branches: dict[Lease, None] = {}
        """Leases of dialogues without a number yet, so that a delete finds them."""
        self.unsaved: deque[Callable[[], bool]] = deque()
        """Turns (durability "turn") that wait for the writer's queue. Each returns whether it is done waiting."""
        self.session_deletes = SessionDeletes(store, deliver)
        self.unlogged: dict[Session, None] = {}
        """with turns on their way to the log"""

    @property
    def pending(self) -> bool:
        """Whether a turn or a lease waits for work that `poll` starts."""
        is_acquiring = self.acquisition is not None and self.acquisition.pending
        return bool(self.unsaved) or self.lease_queue.pending or is_acquiring

    # -- checkout --------------------------------------------------------------------------------------

    def checkout(
        self,
        session_id: str,
        branch_from: int | None = None,
        wait: bool = True,
        state: str = "",
        adapter: str = "",
        mixture: Origin | None = None,
    ) -> Lease:
        """Start a turn of a session. The lease becomes READY at once or in a later `StatePool.poll`.

        - `branch_from`: None continues the plain session, one turn after another. A number n starts a new dialogue
          from dialogue n, which does not change; 0 is the empty root.
        - `wait`: False raises SessionBusy while another turn runs.
        - `state`: the tuned state that a new session starts from. "" is the zero state, or the one that the session
          has.
        - `adapter`: the adapter that the row runs under. "" is none, or the one that the session has.
        - `mixture`: the origin of a session that starts from several states. Such a session has no state in one slot,
          so end its turn with `record` and `release`.

        Raises InvalidSessionId, SessionBusy, DialogueNotFound, SessionUnusable, PoolFull, StateNotFound,
        AdapterNotFound, and OriginMismatch or AdapterMismatch if the session started differently.
        """
        if branch_from is not None:
            return self._checkout_branch(session_id, branch_from, state, adapter, mixture)
        key = checked_key(session_id)
        session = self._index.get(key)
        self.lease_queue.check_origin(session, state, adapter, mixture)
        if session is None:
            session = self._new_session(key)
            self._index.add(session)
        if self.acquisition is None:
            session.check_usable()
        if not wait and (session.active is not None or session.queue or session.pending is not None):
            raise errors.SessionBusy(
                f"session {session_id!r} is busy with another turn; wait for it, or send wait: true"
            )
        lease = self.lease_queue.acquire_resources(Lease(session, session, wait=wait), state, adapter, mixture)
        session.queue.append(lease)
        self.start_next_turn(session)
        return lease

    def _checkout_branch(self, session_id: str, parent: int, state: str, adapter: str, mixture: Origin | None) -> Lease:
        checked_key(session_id)
        source = None
        if parent != ROOT and self.acquisition is None:
            source = self._index.get(SessionKey(session_id, parent)) if parent > ROOT else None
            if source is None or not source.exists:
                raise errors.DialogueNotFound(session_id, parent)
            source.check_usable()
        self.lease_queue.check_origin(source, state, adapter, mixture)
        # Its number is assigned when the turn is recorded, because several branches may run at once.
        dialogue = self._new_session(SessionKey(session_id, ROOT), source)
        lease = self.lease_queue.acquire_resources(Lease(dialogue, source, branch=True), state, adapter, mixture)
        dialogue.active = lease
        self._branches[lease] = None
        if self.acquisition is None:
            self.lease_queue.enqueue(lease)
        else:
            self.acquisition.begin(lease, parent)
        return lease

    def _new_session(self, key: SessionKey, parent: Session | None = None) -> Session:
        """Return a new session. A shared database first says whether it is new, and then checks its room.

        Raises PoolFull.
        """
        if self.acquisition is None:
            self._check_room()
        now = time.time()
        row = self._index.new_row() if self._store is None else self._store.next_row()
        return Session(key, row, now, now, parent)

    def _check_room(self) -> None:
        if self._store is not None and self._store.over_limit and self._config.state_db_full == "refuse":
            raise errors.PoolFull(
                f"the session database holds its limit of {self._config.state_db_max_gb:g} GB and takes no new "
                "session; delete some, or raise --state-db-max-gb"
            )

    def start_next_turn(self, session: Session) -> None:
        """Start the session's next turn. Removes a session without any."""
        if session.active is not None or session.pending is not None:
            return
        if session.queue:
            session.active = session.queue.pop(0)
            if self.acquisition is None:
                self.lease_queue.enqueue(session.active)
            else:
                self.acquisition.begin(session.active)
            return
        if self.acquisition is not None:
            self.acquisition.release(session)
        if not session.exists and not session.deleted:
            self._index.remove(session)

    # -- record, checkin, release ----------------------------------------------------------------------

    def record(self, lease: Lease, tokens: list[int], on_durable: OnDurable) -> None:
        """Append a finished turn to the session: the prompt's tokens and the visible answer's.

        `on_durable` is called once from `StatePool.poll`. It gets None once the turn is durable, or the error that
        lost it; the session is then unchanged. Call `checkin` or `release` next.
        """
        session = lease.session
        if lease.state is not LeaseState.READY or session.pending is not None:
            error = lease.error or errors.PoolError("the lease has ended or its turn is already recorded")
            self._deliver(lambda: on_durable(error))
            return
        if lease.branch:
            self._assign_dialogue(lease)
        turn = PendingTurn(session.turn + 1, list(tokens), on_durable)
        session.pending = turn
        if self._store is None or not self._stores_log:
            return
        if session.log_broken:
            turn.log_result = errors.TurnNotStored(
                "the turn was not stored: the disk refused an earlier turn of this session; send it again in a moment"
            )
            return
        session.unlogged += 1
        self.unlogged[session] = None
        self._store.submit(append_job(session, turn), lambda error: self._logged(session, turn, error))

    def _assign_dialogue(self, lease: Lease) -> None:
        """Make a branch the session's newest dialogue."""
        dialogue = lease.session
        session_id = dialogue.key.session_id
        number = self._index.next_dialogue(session_id) if lease.reserved_dialogue is None else lease.reserved_dialogue
        dialogue.key = SessionKey(session_id, number)
        dialogue.num_tokens = lease.num_tokens
        lease.dialogue_idx = dialogue.key.dialogue
        self._branches.pop(lease, None)
        self._index.add(dialogue)

    def checkin(self, lease: Lease, slot: int) -> None:
        """Give the pool the slot with the state after the recorded turn.

        The session's next turn starts once this one is durable.
        """
        session, turn = lease.session, lease.session.pending
        if lease.state is not LeaseState.READY or turn is None:
            self._end_lease(lease)
            self._tiers.slots.drop_ref(slot)
            return
        turn.slot = slot
        turn.checked_in = True
        self._end_lease(lease)
        if self._stores_states:
            self.unsaved.append(lambda: self._store_state(session, turn, slot))
            self.begin_saves()
        elif self._store is None or self._is_lazy:  # not earlier: only the state is sure to have the turn
            session.log_broken = session.log_broken or isinstance(turn.log_result, Exception)
            self._deliver(lambda: self._set_outcome(session, turn, None))
        self._finish_if_complete(session)

    def _store_state(self, session: Session, turn: PendingTurn, slot: int) -> bool:
        if session.deleted:
            return True
        return self._tiers.checkpoints.store_turn(
            session, slot, append_job(session, turn), lambda error: self._set_outcome(session, turn, error)
        )

    def release(self, lease: Lease) -> None:
        """End the turn without a state; without `record`, the session is unchanged.

        After `record` with a token log the turn stays once its tokens are logged, also with durability "lazy": no state
        in memory has the turn. The next turn replays its tokens.
        """
        session, turn = lease.session, lease.session.pending
        self._end_lease(lease)
        self._branches.pop(lease, None)
        if lease in session.queue:
            session.queue.remove(lease)
        if session.active is not lease:
            return
        if turn is None:
            session.active = None
            self.start_next_turn(session)
        elif not turn.checked_in:
            turn.checked_in = True
            if not self._stores_log:
                self._set_outcome(
                    session, turn, errors.TurnNotStored("the turn was cancelled before its state was stored")
                )
            elif self._is_lazy and turn.log_result is not None:
                self._set_outcome(session, turn, turn.log_result if isinstance(turn.log_result, Exception) else None)
            self._finish_if_complete(session)

    def _end_lease(self, lease: Lease) -> None:
        self.lease_queue.stop_reading(lease)
        if lease.pinned:
            self._tiers.unpin(lease.read_slot)
            lease.pinned = False
        if lease.tuned is not None:
            self._tuned.drop_ref(lease.tuned)
            lease.tuned = None
        if lease.adapter is not None:
            self._adapters.drop_ref(lease.adapter)
            lease.adapter = None
        if lease.state is not LeaseState.FAILED:
            lease.state = LeaseState.DONE

    # -- outcomes --------------------------------------------------------------------------------------

    def _logged(self, session: Session, turn: PendingTurn, error: Exception | None) -> None:
        session.unlogged -= 1
        if not session.unlogged:
            self.unlogged.pop(session, None)
        turn.log_result = error or True
        if not self._is_lazy or (turn.checked_in and turn.slot is None):
            self._set_outcome(session, turn, error)
        elif turn.checked_in:
            session.log_broken = session.log_broken or error is not None

    def _set_outcome(self, session: Session, turn: PendingTurn, error: Exception | None) -> None:
        """Set the turn's outcome. A failure is reported at once, a success when the next turn can read it."""
        if session.deleted:
            error = errors.SessionNotFound(f"session {session.key.display_name!r} was deleted while its turn ran")
        self._tiers.counters.stale_turns += isinstance(error, errors.StaleEpoch)
        turn.outcome = error or True
        session.acquired = session.acquired and error is not None  # the commit has released it
        if error is not None:
            turn.notify(error)
        self._finish_if_complete(session)

    def _finish_if_complete(self, session: Session) -> None:
        """Add the turn to its session or drop it. Does nothing until outcome and state are known."""
        turn = session.pending
        if turn is None or turn.outcome is None or not turn.checked_in:
            return
        session.pending = None
        session.active = None
        if turn.outcome is True and not session.deleted:
            self._commit_turn(session, turn)
            turn.notify(None)
        elif turn.slot is not None:
            self._tiers.slots.drop_ref(turn.slot)
        self.start_next_turn(session)

    def _commit_turn(self, session: Session, turn: PendingTurn) -> None:
        self._index.num_existing += not session.exists
        session.turn = turn.turn
        session.num_tokens += len(turn.tokens)
        self._index.touch(session, time.time())
        if turn.slot is None:
            self._tiers.forget(session)  # the log can rebuild it
            return
        self._tiers.park(session, turn.slot)
        if self._stores_states:
            mark_stored(session, build_session_row(session))
        elif self._tiers.checkpoints.is_due(session):
            self._tiers.checkpoints.begin(session)

    def begin_saves(self) -> None:
        """Queue waiting turns for the writer, in order. Stops when there is no more room."""
        while self.unsaved and self.unsaved[0]():
            self.unsaved.popleft()

    # -- deletes ---------------------------------------------------------------------------------------

    def delete(self, session_id: str, delete_prefix: bool = False, on_deleted: OnDeleted = lambda _: None) -> int:
        """Delete a session with its dialogues, or all with the name prefix.

        Returns the number of sessions that this engine knew. Deletes one dialogue when given its display name, unless a
        session has that id. Leases of running turns become FAILED. `on_deleted` is called once from `StatePool.poll`,
        with the number of all engines, or with the error that delays the delete on disk; the pool retries it. Raises
        InvalidSessionId.
        """
        checked_key(session_id)
        to_delete = self._index.matching(session_id, delete_prefix)
        for lease in list(self._branches):
            name = lease.session.key.session_id
            if name == session_id or (delete_prefix and has_prefix(name, session_id)) or lease.source in to_delete:
                self._discard(lease.session)
        count = len(to_delete)
        if self.acquisition is None:
            self.remove(to_delete, lambda error: on_deleted(error or count))
            return count
        for session in to_delete:
            self._discard(session)
        assert self._store is not None
        job = DeleteNamed(session_id, delete_prefix)
        self._store.submit(job, lambda error: on_deleted(error or job.count))
        return count

    def remove(self, to_delete: list[Session], on_durable: OnDurable | None = None) -> None:
        for session in to_delete:
            self._discard(session)
        self.session_deletes.delete(tuple(s.row_id for s in to_delete if s.exists or s.pending is not None), on_durable)

    def _discard(self, session: Session) -> None:
        session.deleted = True
        error = errors.SessionNotFound(f"session {session.key.display_name!r} was deleted while its turn ran or waited")
        lease, turn = session.active, session.pending
        self.lease_queue.fail(session, error)
        if lease is not None and lease.state is not LeaseState.DONE:
            self._branches.pop(lease, None)
            lease.state, lease.error = LeaseState.FAILED, error
        if turn is not None and turn.on_durable is not None:  # not reported yet
            self._deliver(lambda: self._set_outcome(session, turn, error))
        self._tiers.forget(session)
        self._index.remove(session)
