"""Decides which slots a row reads and writes. The engine's side of the state pool.

A row never writes to a slot that another row may still read. Its initial state stays unchanged: a session's state, a
cached prefix or a shared prompt. The row's own slot receives the new state. So forking, resuming and rolling
back copy nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from rwkv_batch.core import mixtures
from rwkv_batch.core.error_mapping import as_service_error
from rwkv_batch.core.sequence import NO_SLOT, Phase, RollbackState, Sequence, SharedSlot
from rwkv_batch.errors import MAY_BE_KEPT, ErrorKind, ServiceError, invalid
from rwkv_batch.request import GenerateRequest
from rwkv_batch.tokenizer import Tokenizer
from state_pool.cache.prefix_cache import prefix_base
from state_pool.errors import PoolError, SessionNotFound
from state_pool.origins import TunedState
from state_pool.pool import StatePool
from state_pool.sessions import LeaseState


def _session_of(sequence: Sequence) -> str | None:
    turn = sequence.request.session
    return None if turn is None else turn.session_id


def _may_share_prefix(sequence: Sequence) -> bool:
    """Return whether the row may start from a cached prefix. It must start at its prompt's first token."""
    fresh = sequence.shared is None and sequence.num_computed_tokens == 0
    alone = sequence.request.session is None and not sequence.request.mixture
    return fresh and alone and sequence.request.use_prefix_cache


def _already_stored_error(sequence: Sequence, history: tuple[int, int]) -> ServiceError | None:
    """Return an error if the session changed since its resumed turn began."""
    turn = sequence.request.session
    if turn is None or turn.expected_history in (None, history):
        return None
    message = f"the engine was lost at the end of this turn; {MAY_BE_KEPT}"
    return ServiceError(ErrorKind.ENGINE_LOST, message, field="session_id")


class StateManager:
    """Moves rows between the pool and the steps. Owned by the engine's thread."""

    def __init__(self, pool: StatePool, tokenizer: Tokenizer, overlap: bool) -> None:
        self.pool = pool
        self._tokenizer = tokenizer
        self._overlap = overlap
        self.parked = mixtures.ParkedMixtures(pool)

    def check(self, request: GenerateRequest) -> None:
        """Check that a request's states and adapter are loaded.

        Also check that its mixture can run. Raises ServiceError.
        """
        try:
            mixtures.check_mixture(request, self.pool)
            if request.state:
                self.pool.tuned.get(request.state)
            if request.adapter:
                self.pool.adapters.get(request.adapter)
        except PoolError as error:
            raise as_service_error(error) from error

    def check_out(self, sequence: Sequence) -> None:
        """Queue for the session, or announce the prompt to the prefix cache.

        Raises ServiceError if the session is not available.
        """
        turn, state, adapter = sequence.request.session, sequence.request.state, sequence.request.adapter
        try:
            if turn is not None:
                origin = mixtures.origin_of(sequence.request, self.pool)
                sequence.lease = self.pool.turns.checkout(
                    turn.session_id, turn.branch_from, turn.wait, state, adapter, origin
                )
                if sequence.request.mixture:
                    mixtures.prepare_members(sequence, self.pool)
                return
            if adapter:
                sequence.adapter = self.pool.adapters.acquire(adapter)
            if sequence.request.mixture:
                mixtures.prepare_members(sequence, self.pool)
            elif state:
                sequence.tuned = self.pool.tuned.acquire(state)
            numbers = [one.number for one in (sequence.tuned, sequence.adapter) if one is not None]
            sequence.base = prefix_base(numbers, sequence.job.spec.prefix_salt)
        except PoolError as error:
            raise as_service_error(error, given=_session_of(sequence)) from error
        if _may_share_prefix(sequence) and not sequence.request.cached_tokens:  # else it names its shared prefix
            self.pool.prefixes.observe(sequence.token_ids, sequence.base)

    def failure(self, sequence: Sequence) -> ServiceError | None:
        if sequence.lease is None:
            return None
        if sequence.phase is Phase.WAITING and sequence.lease.state is LeaseState.READY:
            return _already_stored_error(sequence, sequence.lease.history) or self._replay_error(sequence)
        if sequence.lease.state is not LeaseState.FAILED:
            return None
        error = sequence.lease.error or SessionNotFound("the session was deleted while its turn ran")
        return as_service_error(error, given=_session_of(sequence))

    def _replay_error(self, sequence: Sequence) -> ServiceError | None:
        """Return an error if the turn would replay too many session tokens."""
        lease, turn = sequence.lease, sequence.request.session
        assert lease is not None and turn is not None
        limit = turn.max_replayed_tokens
        if limit is None or len(lease.replay) <= limit or not lease.exists:
            return None
        num_tokens = len(lease.replay) - self.parked.num_computed_tokens(lease, 1 + len(sequence.members))
        if num_tokens <= limit:
            return None
        message = (
            f"{num_tokens} tokens of the session are in no stored state and must be read again, "
            f"the limit is {limit} (--max-request-tokens); start another session"
        )
        return invalid("session_id", message, num_tokens)

    # The scheduler's SlotSource ------------------------------------------------------------------------------

    def is_ready(self, sequence: Sequence) -> bool:
        if sequence.lease is not None:
            is_ready = sequence.lease.state is LeaseState.READY
            return is_ready and (not sequence.members or self._allocate_members(sequence))
        if _may_share_prefix(sequence) and self.pool.prefixes.should_wait(sequence.reusable_ids, sequence.base):
            return False
        if sequence.members:
            return self._allocate_members(sequence)
        return sequence.tuned is None or self._pin_tuned(sequence, sequence.tuned)

    def _allocate_members(self, sequence: Sequence) -> bool:
        """Allocate the slots of a mixture's members. Frees parked mixtures if needed."""
        return mixtures.allocate_members(sequence, self.pool) or (
            self.parked.drop_oldest() and mixtures.allocate_members(sequence, self.pool)
        )

    def _pin_tuned(self, sequence: Sequence, tuned: TunedState) -> bool:
        """Pin the row's tuned state. Returns False if the state is not in a slot yet."""
        sequence.tuned_slot = mixtures.pin(tuned, self.pool)
        if sequence.tuned_slot is None:
            return False
        mixtures.release_tuned(sequence, self.pool)
        return True

    def allocate(self) -> int | None:
        slot = self.pool.tiers.allocate()
        return self.pool.tiers.allocate() if slot is None and self.parked.drop_oldest() else slot

    def prepare(self, sequence: Sequence) -> None:
        if sequence.lease is not None:
            self._start_from_session(sequence)
        elif _may_share_prefix(sequence):
            self._start_from_prefix(sequence)
        if sequence.tuned_slot is not None:
            if sequence.shared is None:
                sequence.shared = sequence.tuned_slot
            else:
                sequence.tuned_slot.drop()  # the cached prefix includes it
            sequence.tuned_slot = None
        sequence.prompt_end = len(sequence.token_ids)
        if sequence.request.resumed is not None and sequence.may_sample:
            sequence.token_ids = [*sequence.token_ids, *sequence.request.resumed.token_ids]
        sequence.sampled_start = len(sequence.token_ids)

    def _start_from_session(self, sequence: Sequence) -> None:
        lease, turn = sequence.lease, sequence.request.session
        assert lease is not None and turn is not None
        if self._overlap and not sequence.members:
            self.add_spare(sequence)
        if lease.exists:
            sequence.token_ids = [*lease.replay, *turn.resume_prompt]
            sequence.turn_start = len(lease.replay)
            sequence.replayed_tokens = len(lease.replay)
            sequence.cached_tokens = lease.num_tokens - len(lease.replay)
            sequence.prompt_tokens = lease.num_tokens + len(turn.resume_prompt)
        sequence.adapter = lease.adapter  # held by the lease
        if sequence.members:
            sequence.cached_tokens = 0
            if (parked := self.parked.take(lease, 1 + len(sequence.members))) is not None:
                mixtures.begin_from(sequence, parked, self.pool)
                sequence.replayed_tokens -= parked.num_computed_tokens
            return
        # The lease protects the slot until the turn ends.
        sequence.shared = SharedSlot(lease.read_slot, lambda: None)

    def add_spare(self, sequence: Sequence) -> None:
        if (spare := self.pool.tiers.allocate()) is not None:
            sequence.spare_slot = spare

    def preempt(self, sequence: Sequence) -> None:
        """Give up a paused row's cache points. Waiting rows read the prefix themselves; this row still offers it."""
        self._abandon_cache_points(sequence)

    def _abandon_cache_points(self, sequence: Sequence) -> None:
        for cache_point in sequence.cache_points:
            self.pool.prefixes.abandon(sequence.token_ids[:cache_point], sequence.base)

    def _start_from_prefix(self, sequence: Sequence) -> None:
        hit = self.pool.prefixes.match(sequence.reusable_ids, sequence.base)
        wanted, ids = sequence.request.cached_tokens, sequence.token_ids
        if hit is not None:
            sequence.shared = SharedSlot(hit.slot, lambda: self.pool.prefixes.unpin(hit))
            sequence.num_computed_tokens = sequence.cached_tokens = hit.num_tokens
            if 0 < wanted <= hit.num_tokens:
                return
        sequence.cache_points = self.pool.prefixes.cache_points(ids, True, sequence.base, wanted)

    # Steps ---------------------------------------------------------------------------------------------------

    def advance(self, sequence: Sequence, num_tokens: int) -> None:
        """Record a launched step that reads `num_tokens` tokens. The row's own slot then holds its state."""
        if sequence.keeps_last_state:
            sequence.slot, sequence.spare_slot = sequence.spare_slot, sequence.slot
        sequence.num_computed_tokens += num_tokens
        if sequence.shared is not None:
            sequence.shared.drop()
            sequence.shared = None
        mixtures.release_read_slots(sequence)
        if sequence.cache_points and sequence.cache_points[0] == sequence.num_computed_tokens:
            del sequence.cache_points[0]
            self._offer_prefix(sequence)

    def _offer_prefix(self, sequence: Sequence) -> None:
        """Give the state at a cache point to the prefix cache. The row continues in a new slot."""
        prefix = sequence.token_ids[: sequence.num_computed_tokens]
        fresh = self.pool.tiers.allocate()
        hit = self.pool.prefixes.offer(prefix, sequence.slot, sequence.base) if fresh is not None else None
        if fresh is None or hit is None:
            self.pool.prefixes.abandon(prefix, sequence.base)
            if fresh is not None:
                self.pool.tiers.free(fresh)
            return
        sequence.shared = SharedSlot(hit.slot, lambda: self.pool.prefixes.unpin(hit))
        sequence.slot = fresh

    def fork(self, sequence: Sequence, children: list[Sequence]) -> None:
        """Make the row's state the initial state of its children. The row itself ends."""
        assert sequence.shared is None, "at least one token follows a cache point, so the row has written its own slot"
        slot, sequence.slot = sequence.slot, NO_SLOT
        base = SharedSlot(slot, lambda: self.pool.tiers.free(slot), len(children))
        for child in children:
            child.shared, child.num_computed_tokens = base, sequence.num_computed_tokens
            child.cached_tokens = sequence.cached_tokens
            if sequence.adapter is not None:
                child.adapter = self.pool.adapters.add_ref(sequence.adapter)
        self._release_adapter(sequence)

    def _release_adapter(self, sequence: Sequence) -> None:
        if sequence.adapter is not None and sequence.request.session is None:
            self.pool.adapters.drop_ref(sequence.adapter)
        sequence.adapter = None

    def truncate(self, sequence: Sequence) -> None:
        """Drop the last token and all tokens launched after it. The last token ended the row."""
        end = sequence.prompt_end + len(sequence.output.tokens) - 1
        del sequence.token_ids[end:]
        if sequence.num_computed_tokens > end and sequence.lease is not None:
            sequence.slot, sequence.spare_slot = sequence.spare_slot, sequence.slot
        sequence.num_computed_tokens = min(sequence.num_computed_tokens, end)

    def update_rollback_state(self, sequence: Sequence) -> None:
        """Keep the latest state before text that may belong to a stop. For rows with a session."""
        if sequence.lease is None or sequence.phase is not Phase.RUNNING or sequence.members:
            return
        if not sequence.output.has_held_text:
            self._drop_rollback_state(sequence)
        elif sequence.rollback_state is None:
            self._keep_rollback_state(sequence)

    def _keep_rollback_state(self, sequence: Sequence) -> None:
        count = sequence.num_computed_tokens - sequence.prompt_end
        reads_token = sequence.reads_sampled_token  # the spare slot's state has not read that token
        if count - reads_token > sequence.output.first_held_token() or (fresh := self.pool.tiers.allocate()) is None:
            return
        if reads_token and count > sequence.output.first_held_token():
            sequence.rollback_state, sequence.spare_slot = RollbackState(sequence.spare_slot, count - 1), fresh
        else:
            sequence.rollback_state = RollbackState(sequence.slot, count)
            sequence.shared = SharedSlot(sequence.slot, lambda: None)
            sequence.slot = fresh

    def _drop_rollback_state(self, sequence: Sequence) -> None:
        if sequence.rollback_state is not None:
            self.pool.tiers.free(sequence.rollback_state.slot)
            sequence.rollback_state = None

    def _drop_spare_slot(self, sequence: Sequence) -> None:
        if sequence.spare_slot != NO_SLOT:
            self.pool.tiers.free(sequence.spare_slot)
            sequence.spare_slot = NO_SLOT

    # Ends ----------------------------------------------------------------------------------------------------

    def close_turn(self, sequence: Sequence) -> None:
        """Drop the tokens after the shown text. The row then reads up to the state right before the stop."""
        token_ids = sequence.token_ids[: sequence.prompt_end] + self._shown_tokens(sequence)
        if sequence.members:
            self._park_mixture(sequence, token_ids)
            return
        self._rewind(sequence, token_ids)
        sequence.token_ids, sequence.may_sample, sequence.cache_points = token_ids, False, []

    def record_turn(self, sequence: Sequence, acknowledge: Callable[[ServiceError | None], None]) -> None:
        """Store a closed turn's tokens, then call `acknowledge`. It gets the error, if any."""
        lease = sequence.lease
        assert lease is not None

        def durable(error: Exception | None) -> None:
            sequence.dialogue_idx = lease.dialogue_idx
            acknowledge(None if error is None else as_service_error(error, given=_session_of(sequence)))

        self.pool.turns.record(lease, sequence.token_ids[sequence.turn_start :], durable)

    def _park_mixture(self, sequence: Sequence, token_ids: list[int]) -> None:
        """Park a mixture's slots after its turn. No more steps are needed, because its tokens are kept."""
        read = sequence.num_computed_tokens
        is_beginning = sequence.token_ids[:read] == token_ids[:read]
        sequence.token_ids, sequence.may_sample = token_ids, False
        if is_beginning:
            self.parked.park(sequence)
        sequence.num_computed_tokens = len(token_ids)

    def _shown_tokens(self, sequence: Sequence) -> list[int]:
        """Token ids of the shown text. A token that a stop cuts is tokenised again."""
        whole, partial = sequence.output.shown_tokens()
        return whole + (self._tokenizer.encode_bytes(partial) if partial else [])

    def _rewind(self, sequence: Sequence, token_ids: list[int]) -> None:
        """Return to the latest kept state that fits `token_ids`. It has read only a prefix of them."""
        lease, kept, base = sequence.lease, sequence.rollback_state, sequence.prompt_end
        assert lease is not None
        if sequence.token_ids[: sequence.num_computed_tokens] == token_ids[: sequence.num_computed_tokens]:
            self._drop_rollback_state(sequence)
            return
        if sequence.shared is not None:
            sequence.shared.drop()
            sequence.shared = None
        if kept is not None and sequence.token_ids[: base + kept.count] == token_ids[: base + kept.count]:
            self.pool.tiers.free(sequence.slot)
            sequence.slot, sequence.num_computed_tokens, sequence.rollback_state = kept.slot, base + kept.count, None
            return
        self._drop_rollback_state(sequence)
        sequence.num_computed_tokens = 0
        sequence.shared = SharedSlot(lease.read_slot, lambda: None)

    def check_in(self, sequence: Sequence) -> None:
        """Give the slot with the session's new state to the pool."""
        if sequence.members:
            self.release(sequence)  # the recorded tokens are all that is kept
            return
        assert sequence.lease is not None
        assert sequence.shared is None, "the turn's last tokens were never read"
        self._drop_rollback_state(sequence)
        self._drop_spare_slot(sequence)
        self.pool.turns.checkin(sequence.lease, sequence.slot)
        sequence.lease, sequence.slot, sequence.adapter = None, NO_SLOT, None

    def release(self, sequence: Sequence) -> None:
        """Release everything the row holds. Its session does not change."""
        self._abandon_cache_points(sequence)
        sequence.cache_points = []
        if sequence.shared is not None:
            sequence.shared.drop()
            sequence.shared = None
        self._release_adapter(sequence)
        mixtures.release_members(sequence, self.pool)
        if sequence.tuned_slot is not None:
            sequence.tuned_slot.drop()
            sequence.tuned_slot = None
        self._drop_rollback_state(sequence)
        self._drop_spare_slot(sequence)
        if sequence.slot != NO_SLOT:
            self.pool.tiers.free(sequence.slot)
            sequence.slot = NO_SLOT
        if sequence.lease is not None:
            self.pool.turns.release(sequence.lease)
            sequence.lease = None
