"""What is known of a file and of a batch. Times are seconds since 1970."""

from __future__ import annotations

import enum
from typing import Any

import msgspec


class Purpose(enum.StrEnum):
    """What a file is for."""

    BATCH = "batch"
    BATCH_OUTPUT = "batch_output"


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file whose content is in the store."""

    id: str
    owner: str
    """The API key's name; "" = nobody by name."""
    bytes: int
    created_at: int
    filename: str
    purpose: Purpose
    expires_at: int | None = None


class Result(enum.StrEnum):
    """What a batch's answered and unanswered lines become."""

    OUTPUT = "output"
    ERROR = "error"


class Status(enum.StrEnum):
    """Where a batch stands."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


ACTIVE_STATUSES = (Status.VALIDATING, Status.IN_PROGRESS, Status.FINALIZING, Status.CANCELLING)
"""In which the runner has something to do for a batch."""


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Lines of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Lines of a file that are answered in their own time."""

    id: str
    owner: str
    client: str
    """In whose name its rows run."""
    limits: dict[str, int | None] | None = None
    """Of that client's key, as they were when it was made."""
    endpoint: str
    input_file_id: str
    completion_window: str
    status: Status = Status.VALIDATING
    created_at: int
    expires_at: int
    times: dict[str, int] = {}
    """When it came to a status, by name: in_progress, finalizing, ..."""
    counts: Counts = Counts()
    ends_as: Status = Status.COMPLETED
    """What it becomes once it is finalised."""
    output_file_id: str | None = None
    error_file_id: str | None = None
    metadata: dict[str, str] | None = None
    errors: list[dict[str, Any]] = []
    """Why it has failed as a whole."""

    def result_id(self, result: Result) -> str:
        """The id that the file of its results has, or will have."""
        return f"file-{self.id.removeprefix('batch_')}{result[0]}"

    def with_status(self, status: Status, now: int, **changes: Any) -> Batch:
        """The batch at its next status."""
        times = {**self.times, status.value: now}
        return msgspec.structs.replace(self, status=status, times=times, **changes)
