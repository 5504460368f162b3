"""What the writer's thread counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class WriterStats:
    """Counters of the writer thread; others only read them."""

    commits: int = 0
    turns: int = 0
    states: int = 0
    state_bytes: int = 0
    failures: int = 0
    used_bytes: int = 0
    """Bytes of the database in use, free pages not counted."""
    object_bytes: int = 0
    """Bytes of states that are objects of a checkpoint store."""
    degraded: str | None = None
    """Why the last write failed; None since one succeeded."""
