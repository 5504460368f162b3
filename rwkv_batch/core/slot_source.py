"""What the scheduler asks of whoever owns the slots."""

from __future__ import annotations

from typing import Protocol

from rwkv_batch.core.sequence import Sequence


class SlotSource(Protocol):
    """See `state_manager.StateManager`."""

    def is_ready(self, sequence: Sequence) -> bool:
        """Whether the row may start now."""
        ...

    def allocate(self) -> int | None:
        """A slot for a row to write to; None if there is none at the moment."""
        ...

    def prepare(self, sequence: Sequence) -> None:
        """The row got its slot and its seat."""
        ...

    def add_spare(self, sequence: Sequence) -> None:
        """The row began without the second slot that it needs to be in every step: try again."""
        ...

    def preempt(self, sequence: Sequence) -> None:
        """The row is paused, for as long as it may take: nobody should wait for what it was about to make."""
        ...
