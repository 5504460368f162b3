"""Slots for the states of drafted tokens. No torch.

They are taken when the engine starts: if drafts took free slots, idle sessions would lose theirs to new rows, and turns
would wait for drafts of others.
"""

from __future__ import annotations

import heapq

from state_pool.cache.slots import Slots


class DraftSlots:
    """Holds some slots of the arena. A row that continues from a draft's slot gives its own one for it."""

    def __init__(self, slots: Slots, count: int) -> None:
        """count: slots to take, the highest ones"""
        self._free = slots.reserve(count)
        """a heap"""

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Return so many free slots. Raises IndexError if there are fewer."""
        return [heapq.heappop(self._free) for _ in range(count)]

    def free(self, slots: list[int]) -> None:
        """Give slots back."""
        for slot in slots:
            heapq.heappush(self._free, slot)
