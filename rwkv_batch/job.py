"""A job inside the engine: its rows, where its events go, how much of it is left."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from rwkv_batch.face import Sink
from rwkv_batch.request import Delta, Job
from rwkv_batch.sequence import Sequence


@dataclass(slots=True, eq=False)
class RunningJob:
    """A job that was admitted. Owned by the engine thread."""

    job: Job
    sink: Sink
    unfinished: int
    """rows that have not sent their finish"""
    submitted_at: float = field(default_factory=time.monotonic)
    waiting: deque[Sequence] = field(default_factory=deque)
    """rows without a slot, in order"""
    live: dict[Sequence, None] = field(default_factory=dict)
    """rows that have not sent their finish, waiting ones among them (an ordered set)"""
    seated: int = 0
    """rows that hold a seat"""
    deltas: list[Delta] = field(default_factory=list)
    """news gathered in this step"""

    @property
    def deadline(self) -> float | None:
        """Monotonic time at which it times out."""
        return None if self.job.timeout_s is None else self.submitted_at + self.job.timeout_s
