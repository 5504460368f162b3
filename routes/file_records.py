"""Records of files and batches. Times are Unix times in seconds."""

from __future__ import annotations

import enum
from typing import Any

import msgspec


class Purpose(enum.StrEnum):
    """Purpose of a file."""

    BATCH = "batch"
    BATCH_OUTPUT = "batch_output"


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file whose content is stored."""

    id: str
    owner: str
    """Name of the API key. "": no owner."""
    bytes: int
    created_at: int
    filename: str
    purpose: Purpose
    expires_at: int | None = None


class Result(enum.StrEnum):
    """Kind of a batch's result file."""

    OUTPUT = "output"
    ERROR = "error"


class Status(enum.StrEnum):
    """Status of a batch."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


ACTIVE_STATUSES = (Status.VALIDATING, Status.IN_PROGRESS, Status.FINALIZING, Status.CANCELLING)
"""The runner has work to do for batches in these statuses."""


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Number of lines of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch: a file of requests that are answered in the background."""

    id: str
    owner: str
    client: str
    """The client in whose name the rows run."""
    limits: dict[str, int | None] | None = None
    """Limits of the client's key, from when the batch was created."""
    endpoint: str
    input_file_id: str
    completion_window: str
    status: Status = Status.VALIDATING
    created_at: int
    expires_at: int
    times: dict[str, int] = {}
    """Time of each status, by name: in_progress, finalizing, ..."""
    counts: Counts = Counts()
    ends_as: Status = Status.COMPLETED
    """Status after finalizing."""
    output_file_id: str | None = None
    error_file_id: str | None = None
    metadata: dict[str, str] | None = None
    errors: list[dict[str, Any]] = []
    """Why the whole batch failed."""

    def result_id(self, result: Result) -> str:
        """Return the id of a result file, which may not exist yet."""
        return f"file-{self.id.removeprefix('batch_')}{result[0]}"

    def with_status(self, status: Status, now: int, **changes: Any) -> Batch:
        """Return the batch with a new status."""
        times = {**self.times, status.value: now}
        return msgspec.structs.replace(self, status=status, times=times, **changes)
