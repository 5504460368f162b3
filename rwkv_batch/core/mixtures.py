"""Mixtures: one row that reads the same tokens from several tuned states and draws from their logits, mixed.

A mixture has one seat and one place in the steps, and a slot for each of its members; the first is the row itself.
All members come to their slots at once or not at all, so that rows which wait hold nothing that others need.
"""

from __future__ import annotations

import math

from rwkv_batch.core.sequence import NO_SLOT, Member, Sequence, SharedSlot
from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.request import GenerateRequest
from state_pool.pool import StatePool
from state_pool.tuned_state import Origin, TunedState, mixed_origin

MAX_MEMBERS = 16
"""States in one mixture."""


def check_mixture(request: GenerateRequest, pool: StatePool) -> None:
    """Raises ServiceError, or StateNotFound, for a mixture that cannot be run."""
    if not request.mixture:
        return
    check_members(request.mixture, pool)
    if request.session is not None and not pool.has_token_log:
        message = "a session of a mixture is kept by its tokens, which --state-db and --durability log or lazy keep"
        raise _invalid_field(message, request.session.session_id)
    if request.prompt_logprobs is not None or request.candidates:
        raise _invalid_field("what is scored is read from one state", None)


def check_members(mixture: list[tuple[str, float]], pool: StatePool) -> None:
    """Raises ServiceError for too many members or weights that cannot be, StateNotFound for one that is not there."""
    most = min(MAX_MEMBERS, pool.num_slots // 2)
    if len(mixture) > most:
        limit = f"{most}" if most == MAX_MEMBERS else f"{most} on this server, by its slots"
        raise _invalid_field(f"has {len(mixture)} states, the limit is {limit}", len(mixture))
    if not 0 < sum(weight for _, weight in mixture) < math.inf:
        raise _invalid_field("the weights must add up to more than 0", [weight for _, weight in mixture])
    for state, _ in mixture:
        if state:
            pool.tuned.get(state)


def prepare_members(sequence: Sequence, pool: StatePool) -> None:
    """Make the row's members of its mixture, and hold their states for when it begins."""
    mixture = sequence.request.mixture
    total = sum(weight for _, weight in mixture)
    tuned = [pool.tuned.acquire(state) if state else None for state, _ in mixture]
    sequence.tuned, sequence.weight = tuned[0], mixture[0][1] / total
    sequence.members = [
        Member(weight / total, state) for state, (_, weight) in zip(tuned[1:], mixture[1:], strict=True)
    ]


def origin_of(request: GenerateRequest, pool: StatePool) -> Origin | None:
    """What a session of the request's mixture begins from; None: it has none. Raises StateNotFound."""
    if not request.mixture:
        return None
    return mixed_origin([pool.tuned.get(state).origin if state else None for state, _ in request.mixture])


def allocate_members(sequence: Sequence, pool: StatePool) -> bool:
    """Get every member a slot to write, and those with a tuned state theirs to read; False: not all can be had yet.

    The row's own slot is left free, to be taken next.
    """
    if sequence.members[0].slot != NO_SLOT:
        return True
    wanted = [sequence.tuned, *(member.tuned for member in sequence.members)]
    pinned = [None if state is None else pin(state, pool) for state in wanted]
    slots = [pool.allocate() for _ in wanted]
    if None in slots or any(state and not found for state, found in zip(wanted, pinned, strict=True)):
        for found in pinned:
            if found is not None:
                found.drop()
        for slot in slots:
            if slot is not None:
                pool.free(slot)
        return False
    for member, slot, found in zip(sequence.members, slots[1:], pinned[1:], strict=True):
        assert slot is not None
        member.slot, member.shared = slot, found
    sequence.tuned_slot = pinned[0]
    assert slots[0] is not None
    pool.free(slots[0])
    _release_tuned(sequence, pool)
    return True


def pin(state: TunedState, pool: StatePool) -> SharedSlot | None:
    """A tuned state's slot, held for a reader; None: it is not in one yet."""
    slot = pool.tuned.pin(state)
    return None if slot is None else SharedSlot(slot, lambda: pool.unpin_slot(slot))


def release_read_slots(sequence: Sequence) -> None:
    """A step was launched: the members' states are in their own slots from now on."""
    for member in sequence.members:
        if member.shared is not None:
            member.shared.drop()
            member.shared = None


def release_members(sequence: Sequence, pool: StatePool) -> None:
    """The row ends: whatever its members hold goes back."""
    _release_tuned(sequence, pool)
    release_read_slots(sequence)
    for member in sequence.members:
        if member.slot != NO_SLOT:
            pool.free(member.slot)
            member.slot = NO_SLOT


def _release_tuned(sequence: Sequence, pool: StatePool) -> None:
    if sequence.tuned is not None:
        pool.tuned.drop_ref(sequence.tuned)
        sequence.tuned = None
    for member in sequence.members:
        if member.tuned is not None:
            pool.tuned.drop_ref(member.tuned)
            member.tuned = None


def _invalid_field(message: str, given: object) -> ServiceError:
    return ServiceError(ErrorKind.INVALID_FIELD, f"states: {message}", field="states", given=given)
