"""A state that rows begin from instead of the zero state. Plain data of the engine's thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from state_pool.arena import HostState

NO_BASE = 0
"""Number of the zero state among the states that rows begin from."""


class Origin(NamedTuple):
    """What a session began from, as it is remembered with it."""

    name: str
    """As the tuned state was called then; for people."""
    digest: str
    """Of its numbers: a state is the same under another name."""


@dataclass(slots=True, eq=False)
class TunedState:
    """A tuned state that is loaded. Host memory always has it; a slot has it while rows begin from it often enough."""

    origin: Origin
    host: HostState
    number: int
    """Not NO_BASE, and never used again for another in this process."""
    slot: int | None = None
    used: float = 0.0
    """Unix time"""
    waiting: int = 0
    """Rows and turns that were admitted and have not begun to read it."""
    removed: bool = False

    @property
    def name(self) -> str:
        """What requests call it."""
        return self.origin.name
