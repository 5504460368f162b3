"""States on their way to the database: those that wait, those that are put into the checkpoint store, the one that is
being written. Callers hold the writer's lock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from state_pool.disk.operations import Checkpoint, Done, StoredObject


@dataclass(slots=True, eq=False)
class StagedState:
    """A state being written: first its chunks, or its object, then the row that points to them."""

    job: Checkpoint
    done: Done
    state: int = 0
    """Its number, from the first piece on."""
    chunks: deque[memoryview] = field(default_factory=deque)
    number: int = 0
    num_bytes: int = 0
    stored: StoredObject | None = None
    """The object that has its bytes."""
    upload_started_at: float = 0.0
    """Unix time before which it was not there."""


class StagingQueue:
    """Which state is where."""

    def __init__(self) -> None:
        self.waiting: deque[StagedState] = deque()
        self.uploading: list[StagedState] = []
        self.current: StagedState | None = None
        """What the writer's thread is at."""

    def __len__(self) -> int:
        return len(self.waiting) + len(self.uploading) + (self.current is not None)

    def next(self) -> StagedState | None:
        """The state to write a piece of now."""
        if self.current is None and self.waiting:
            self.current = self.waiting.popleft()
        return self.current

    def start_upload(self, staging: StagedState) -> bool:
        """Have the state's object put, while others are written; False: a delete has overtaken it."""
        if self.current is not staging:
            return False
        self.current = None
        self.uploading.append(staging)
        return True

    def finish_upload(self, staging: StagedState) -> bool:
        """The state's object was put: its row is next; False: a delete has overtaken it."""
        if staging not in self.uploading:
            return False
        self.uploading.remove(staging)
        self.waiting.appendleft(staging)
        return True

    def finish(self, staging: StagedState) -> bool:
        """The state is written, or given up; False: a delete has overtaken it."""
        if staging in self.uploading:
            self.uploading.remove(staging)
            return True
        if self.current is not staging:
            return False
        self.current = None
        return True

    def forget(self, rows: set[int]) -> list[StagedState]:
        """Give up the states of these sessions; those of them that have a number may have left pieces."""
        gone = [staged for staged in self.waiting if staged.job.session.row in rows]
        for staged in gone:
            self.waiting.remove(staged)
        for staged in [*self.uploading, *([self.current] if self.current is not None else [])]:
            if staged.job.session.row in rows:
                self.finish(staged)
                gone.append(staged)
        return gone
