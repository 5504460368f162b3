"""Sessions of mixtures. Their token logs are kept, and their states stay in slots between turns while there is room."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import partial

from rwkv_batch.core.mixtures import release_read_slots
from rwkv_batch.core.sequence import NO_SLOT, Sequence, SharedSlot
from state_pool.pool import StatePool
from state_pool.sessions import Lease


@dataclass(slots=True)
class Parked:
    """The slots of a session's mixture after its last turn."""

    token_ids: list[int]
    """all tokens of the session"""
    num_computed_tokens: int
    """number of these tokens that the states have read"""
    slots: list[int]


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
        if lease.exists and parked.token_ids == lease.replay and len(parked.slots) == num_members:
            return parked
        self._free(parked)
        return None

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
    """The slots of all members, the row's own first."""
    return [sequence.slot, *(member.slot for member in sequence.members)]


def begin_from(sequence: Sequence, parked: Parked, pool: StatePool) -> None:
    """Let the row start from parked states. Its members must have slots to write."""
    release = [SharedSlot(slot, partial(pool.tiers.free, slot)) for slot in parked.slots]
    release_read_slots(sequence)
    if sequence.tuned_slot is not None:
        sequence.tuned_slot.drop()
    sequence.tuned_slot = release[0]
    for member, shared in zip(sequence.members, release[1:], strict=True):
        member.shared = shared
    sequence.num_computed_tokens = sequence.cached_tokens = parked.num_computed_tokens
