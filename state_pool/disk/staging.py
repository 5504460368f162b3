"""The queue of states to be stored: waiting, being uploaded, being written. Callers hold the writer's lock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from state_pool.disk.operations import Checkpoint, Done, StoredObject


@dataclass(slots=True, eq=False)
class StagedState:
    """A state being written: first its chunks or its object, then its row."""

    job: Checkpoint
    done: Done
    state: int = 0
    """Its number, set before the first chunk."""
    chunks: deque[memoryview] = field(default_factory=deque)
    number: int = 0
    num_bytes: int = 0
    stored: StoredObject | None = None
    """The object with its bytes."""
    upload_started_at: float = 0.0
    """Unix time when the upload started."""


class StagingQueue:
    def __init__(self) -> None:
        self.waiting: deque[StagedState] = deque()
        self.uploading: list[StagedState] = []
        self.current: StagedState | None = None
        """The state that the writer thread is writing."""

    def __len__(self) -> int:
        return len(self.waiting) + len(self.uploading) + (self.current is not None)

    def next(self) -> StagedState | None:
        """Return the state to write a chunk of next."""
        if self.current is None and self.waiting:
            self.current = self.waiting.popleft()
        return self.current

    def start_upload(self, staging: StagedState) -> bool:
        """Move the state to the uploads, so that others are written meanwhile. Returns False if a delete removed it."""
        if self.current is not staging:
            return False
        self.current = None
        self.uploading.append(staging)
        return True

    def finish_upload(self, staging: StagedState) -> bool:
        """Queue the uploaded state's row next. Returns False if a delete removed it."""
        if staging not in self.uploading:
            return False
        self.uploading.remove(staging)
        self.waiting.appendleft(staging)
        return True

    def finish(self, staging: StagedState) -> bool:
        """Remove a written or failed state. Returns False if a delete removed it."""
        if staging in self.uploading:
            self.uploading.remove(staging)
            return True
        if self.current is not staging:
            return False
        self.current = None
        return True

    def forget(self, rows: set[int]) -> list[StagedState]:
        """Remove and return the states of these sessions. Some chunks of them may be written."""
        removed = [staged for staged in self.waiting if staged.job.session.row in rows]
        for staged in removed:
            self.waiting.remove(staged)
        for staged in [*self.uploading, *([self.current] if self.current is not None else [])]:
            if staged.job.session.row in rows:
                self.finish(staged)
                removed.append(staged)
        return removed
