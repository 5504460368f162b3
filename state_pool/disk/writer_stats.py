from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class WriterStats:
    """Counters of the writer thread. Other threads only read them."""

    commits: int = 0
    turns: int = 0
    states: int = 0
    state_bytes: int = 0
    failures: int = 0
    used_bytes: int = 0
    """Bytes of the database in use, without free pages."""
    object_bytes: int = 0
    """Bytes of states in a checkpoint store."""
    degraded: str | None = None
    """The last write error; None after a success."""
