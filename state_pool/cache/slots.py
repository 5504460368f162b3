"""Reference counts of the arena's slots. Engine thread only; copies no bytes."""

from __future__ import annotations

import heapq

from state_pool.layout import FIRST_FREE_SLOT, ZERO_SLOT


class Slots:
    """The slots that sequences may own. A slot without a holder is free.

    Holders are running rows, idle sessions, cached prefixes, leases that read the slot, and running copies. So a slot
    that is being read cannot be reused. The lowest free slot is used first: rows in adjacent slots are faster to read.
    """

    def __init__(self, num_slots: int) -> None:
        """Raises ValueError if the arena has no slot for sequences."""
        if num_slots <= FIRST_FREE_SLOT:
            raise ValueError(f"an arena of {num_slots} slots is too small; it needs at least {FIRST_FREE_SLOT + 1}")
        self._free = list(range(FIRST_FREE_SLOT, num_slots))
        """a heap"""
        self._ref_counts = [0] * num_slots
        self.num_usable = num_slots - FIRST_FREE_SLOT

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int | None:
        """Return a free slot with one reference for the caller, or None."""
        if not self._free:
            return None
        slot = heapq.heappop(self._free)
        self._ref_counts[slot] = 1
        return slot

    def reserve(self, count: int) -> list[int]:
        """Take the highest free slots permanently, before any other is taken. Returns them in order."""
        kept = len(self._free) - count
        taken, self._free = self._free[kept:], self._free[:kept]
        for slot in taken:
            self._ref_counts[slot] = 1
        self.num_usable -= count
        return taken

    def add_ref(self, slot: int) -> None:
        """Add a reference to a held slot; the zero slot needs none. Raises ValueError for a free slot."""
        if slot == ZERO_SLOT:
            return
        if self._ref_counts[slot] < 1:
            raise ValueError(f"slot {slot} is free and cannot be shared")
        self._ref_counts[slot] += 1

    def drop_ref(self, slot: int) -> None:
        """Remove one reference. Raises ValueError for a free slot."""
        if slot == ZERO_SLOT:
            return
        if self._ref_counts[slot] < 1:
            raise ValueError(f"slot {slot} is free and cannot be released")
        self._ref_counts[slot] -= 1
        if self._ref_counts[slot] == 0:
            heapq.heappush(self._free, slot)

    def ref_count(self, slot: int) -> int:
        return self._ref_counts[slot]


class DraftSlots:
    """Slots for the states of drafted tokens. A row that continues from one of them gives its own slot for it.

    They are taken when the engine starts: if drafts took free slots, idle sessions would lose theirs to new rows, and
    turns would wait for drafts of others.
    """

    def __init__(self, slots: Slots, count: int) -> None:
        """count: slots to take, the highest ones"""
        self._free = slots.reserve(count)
        """a heap"""

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Return `count` free slots. Raises IndexError if there are fewer."""
        return [heapq.heappop(self._free) for _ in range(count)]

    def free(self, slots: list[int]) -> None:
        """Give slots back."""
        for slot in slots:
            heapq.heappush(self._free, slot)
