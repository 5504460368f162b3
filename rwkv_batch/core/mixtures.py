"""Mixtures: one row reads the same tokens from several tuned states and samples from their mixed logits.

A mixture has one request slot, one running slot, and one state slot per member. The row itself is the first member.
A mixture gets all its slots at once or none, so a waiting row holds no slot.

A session of a mixture is stored as its token log. Its states stay in slots between turns while there is room.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial

from rwkv_batch.core.sequence import NO_SLOT, Member, Sequence, SharedSlot
from rwkv_batch.errors import invalid
from rwkv_batch.request import GenerateRequest
from state_pool.origins import Origin, TunedState, mixed_origin
from state_pool.pool import StatePool
from state_pool.session_key import without_owner
from state_pool.sessions import Lease

MAX_MEMBERS = 16


def check_mixture(request: GenerateRequest, pool: StatePool) -> None:
    """Check that a request's mixture can run. Raises ServiceError or StateNotFound."""
    if not request.mixture:
        return
    check_members(request.mixture, pool)
    if request.session is not None and not pool.has_token_log:
        message = (
            "a mixture cannot continue a session on this server, which stores no token logs. "
            "Set state_db, and durability to log or lazy"
        )
        raise invalid("states", message, without_owner(request.session.session_id))
    if request.prompt_logprobs is not None or request.candidates:
        raise invalid("states", "a mixture cannot be combined with prompt_logprobs or candidates", None)


def check_members(mixture: list[tuple[str, float]], pool: StatePool) -> None:
    """Check a mixture's states and weights. Raises ServiceError, or StateNotFound for a state that is not loaded."""
    max_members = min(MAX_MEMBERS, pool.tiers.slots.num_usable // 2)
    if len(mixture) > max_members:
        limit = f"{max_members}" if max_members == MAX_MEMBERS else f"{max_members}, half of this server's slots"
        raise invalid("states", f"has {len(mixture)} states, the limit is {limit}", len(mixture))
    if not 0 < sum(weight for _, weight in mixture) < math.inf:
        raise invalid("states", "the weights must add up to more than 0", [weight for _, weight in mixture])
    for state, _ in mixture:
        if state:
            pool.tuned.get(state)


def prepare_members(sequence: Sequence, pool: StatePool) -> None:
    """Create the row's members and keep their states loaded until it starts."""
    mixture = sequence.request.mixture
    total = sum(weight for _, weight in mixture)
    tuned = [pool.tuned.acquire(state) if state else None for state, _ in mixture]
    sequence.tuned, sequence.weight = tuned[0], mixture[0][1] / total
    sequence.members = [
        Member(weight / total, state) for state, (_, weight) in zip(tuned[1:], mixture[1:], strict=True)
    ]


def origin_of(request: GenerateRequest, pool: StatePool) -> Origin | None:
    """Return the origin of a session that the request's mixture starts; None without a mixture.

    Raises StateNotFound.
    """
    if not request.mixture:
        return None
    return mixed_origin([pool.tuned.get(state).origin if state else None for state, _ in request.mixture])


def allocate_members(sequence: Sequence, pool: StatePool) -> bool:
    """Allocate a slot per member and pin their tuned states. Returns False if not all are available.

    On success the row's own slot is free again, to be allocated next.
    """
    if sequence.members[0].slot != NO_SLOT:
        return True
    states = [sequence.tuned, *(member.tuned for member in sequence.members)]
    pinned = [None if state is None else pin(state, pool) for state in states]
    slots = [pool.tiers.allocate() for _ in states]
    if None in slots or any(state and not found for state, found in zip(states, pinned, strict=True)):
        for found in pinned:
            if found is not None:
                found.drop()
        for slot in slots:
            if slot is not None:
                pool.tiers.free(slot)
        return False
    for member, slot, found in zip(sequence.members, slots[1:], pinned[1:], strict=True):
        assert slot is not None
        member.slot, member.shared = slot, found
    sequence.tuned_slot = pinned[0]
    assert slots[0] is not None
    pool.tiers.free(slots[0])
    release_tuned(sequence, pool)
    return True


def pin(state: TunedState, pool: StatePool) -> SharedSlot | None:
    """Pin a tuned state's slot for a reader. None if the state is not in a slot yet."""
    slot = pool.tuned.pin(state)
    return None if slot is None else SharedSlot(slot, lambda: pool.tiers.unpin(slot))


def release_read_slots(sequence: Sequence) -> None:
    """Release the slots that the members read first. After the first launch, their states are in their own slots."""
    for member in sequence.members:
        if member.shared is not None:
            member.shared.drop()
            member.shared = None


def release_members(sequence: Sequence, pool: StatePool) -> None:
    release_tuned(sequence, pool)
    release_read_slots(sequence)
    for member in sequence.members:
        if member.slot != NO_SLOT:
            pool.tiers.free(member.slot)
            member.slot = NO_SLOT


def release_tuned(sequence: Sequence, pool: StatePool) -> None:
    """Uncount the tuned states that the row and its members have not read. Their slots are pinned, or the row ends."""
    if sequence.tuned is not None:
        pool.tuned.drop_ref(sequence.tuned)
        sequence.tuned = None
    for member in sequence.members:
        if member.tuned is not None:
            pool.tuned.drop_ref(member.tuned)
            member.tuned = None


@dataclass(slots=True)
class Parked:
    """The slots that an idle session's mixture keeps after its last turn."""

    token_ids: list[int]
    """all tokens of the session"""
    num_computed_tokens: int
    """number of these tokens that the states have read"""
    slots: list[int]

    def is_for(self, lease: Lease, num_members: int) -> bool:
        """Return whether a turn of the session may continue from these slots."""
        return lease.exists and self.token_ids == lease.replay and len(self.slots) == num_members


class ParkedMixtures:
    """Slots of the mixtures of idle sessions, freed under pressure. The tokens restore the states."""

    def __init__(self, pool: StatePool) -> None:
        self._pool = pool
        self._parked: OrderedDict[str, Parked] = OrderedDict()

    def park(self, sequence: Sequence) -> None:
        """Keep the members' slots after a recorded turn, if possible."""
        lease, slots = sequence.lease, write_slots_of(sequence)
        assert lease is not None
        if lease.branch or sequence.shared is not None or NO_SLOT in slots:
            return
        self._forget(lease.session.key.session_id)
        sequence.slot = NO_SLOT
        for member in sequence.members:
            member.slot = NO_SLOT
        parked = Parked(sequence.token_ids, sequence.num_computed_tokens, slots)
        self._parked[lease.session.key.session_id] = parked
        while sum(len(one.slots) for one in self._parked.values()) > self._pool.config.l1_sessions:
            self.drop_oldest()

    def take(self, lease: Lease, num_members: int) -> Parked | None:
        """Remove and return the parked slots of the lease's session. None: its tokens must be read."""
        parked = None if lease.branch else self._parked.pop(lease.session.key.session_id, None)
        if parked is None:
            return None
        if parked.is_for(lease, num_members):
            return parked
        self._free(parked)
        return None

    def num_computed_tokens(self, lease: Lease, num_members: int) -> int:
        """Return how many of the session's tokens the parked slots have read."""
        parked = None if lease.branch else self._parked.get(lease.session.key.session_id)
        return parked.num_computed_tokens if parked is not None and parked.is_for(lease, num_members) else 0

    def drop_oldest(self) -> bool:
        """Free the slots parked longest ago. Returns False if none are parked."""
        if not self._parked:
            return False
        self._free(self._parked.popitem(last=False)[1])
        return True

    def clear(self) -> None:
        while self.drop_oldest():
            pass

    @property
    def slots(self) -> list[int]:
        return [slot for parked in self._parked.values() for slot in parked.slots]

    def _forget(self, session_id: str) -> None:
        if (parked := self._parked.pop(session_id, None)) is not None:
            self._free(parked)

    def _free(self, parked: Parked) -> None:
        for slot in parked.slots:
            self._pool.tiers.free(slot)


def write_slots_of(sequence: Sequence) -> list[int]:
    """Return the slots of all members, the row's own slot first."""
    return [sequence.slot, *(member.slot for member in sequence.members)]


def begin_from(sequence: Sequence, parked: Parked, pool: StatePool) -> None:
    """Let the row start from parked states. Its members must have slots to write."""
    parked_slots = [SharedSlot(slot, partial(pool.tiers.free, slot)) for slot in parked.slots]
    release_read_slots(sequence)
    if sequence.tuned_slot is not None:
        sequence.tuned_slot.drop()
    sequence.tuned_slot = parked_slots[0]
    for member, shared in zip(sequence.members, parked_slots[1:], strict=True):
        member.shared = shared
    sequence.num_computed_tokens = sequence.cached_tokens = parked.num_computed_tokens
