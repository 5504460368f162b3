"""Who holds which slot of the arena, by counting holders. Engine thread only; moves no bytes."""

from __future__ import annotations

import heapq

from state_pool.arena import FIRST_FREE_SLOT, ZERO_SLOT


class Slots:
    """The slots a sequence may own. A slot is free when nobody holds it.

    Running rows, parked sessions, cached prefixes, leases that read from a slot and copies under way each
    hold a slot once; whoever lets go last frees it. So a state that is being read cannot be handed out anew.
    The lowest free slot is handed out first: rows that run lie close together, which is faster to read.
    """

    def __init__(self, num_slots: int) -> None:
        """Raises ValueError if none of so many slots could be lent."""
        if num_slots <= FIRST_FREE_SLOT:
            raise ValueError(f"an arena of {num_slots} slots has none to lend; it needs at least {FIRST_FREE_SLOT + 1}")
        self._free = list(range(FIRST_FREE_SLOT, num_slots))
        """a heap"""
        self._ref_counts = [0] * num_slots
        self.num_usable = num_slots - FIRST_FREE_SLOT

    @property
    def num_free(self) -> int:
        """Slots nobody holds."""
        return len(self._free)

    def allocate(self) -> int | None:
        """A free slot, held once by the caller; None if there is none."""
        if not self._free:
            return None
        slot = heapq.heappop(self._free)
        self._ref_counts[slot] = 1
        return slot

    def add_ref(self, slot: int) -> None:
        """Hold a slot that somebody holds already; the zero slot needs no holding. Raises ValueError for a free one."""
        if slot == ZERO_SLOT:
            return
        if self._ref_counts[slot] < 1:
            raise ValueError(f"slot {slot} is free and cannot be shared")
        self._ref_counts[slot] += 1

    def drop_ref(self, slot: int) -> None:
        """Let go of a slot once. Raises ValueError if nobody holds it."""
        if slot == ZERO_SLOT:
            return
        if self._ref_counts[slot] < 1:
            raise ValueError(f"slot {slot} was let go more often than held")
        self._ref_counts[slot] -= 1
        if self._ref_counts[slot] == 0:
            heapq.heappush(self._free, slot)

    def ref_count(self, slot: int) -> int:
        """How many hold the slot."""
        return self._ref_counts[slot]

    def ref_counts(self) -> dict[int, int]:
        """Slot -> number of holders, for integrity checks."""
        return {slot: count for slot, count in enumerate(self._ref_counts) if count}
