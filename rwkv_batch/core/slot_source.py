"""The scheduler's interface to the owner of the slots."""

from __future__ import annotations

from typing import Protocol

from rwkv_batch.core.sequence import Sequence


class SlotSource(Protocol):
    """Implemented by `state_manager.StateManager`."""

    def is_ready(self, sequence: Sequence) -> bool:
        """Return whether the row may start: its initial state can be read, and no row computes its prefix now."""
        ...

    def allocate(self) -> int | None:
        """Return a state slot that a row may write."""
        ...

    def prepare(self, sequence: Sequence) -> None:
        """Set the initial state of a row that got its slots: zero, a tuned state, a session's or a cached prefix's."""
        ...

    def add_spare(self, sequence: Sequence) -> None:
        """Try to allocate the second slot that the row needs to be in every step."""
        ...

    def preempt(self, sequence: Sequence) -> None:
        """Handle a paused row: rows that wait for its prompt's cached prefix compute it themselves."""
        ...
