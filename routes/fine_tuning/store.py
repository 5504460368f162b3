"""Records of fine-tuning jobs and their events, in the database of files."""

from __future__ import annotations

import enum
import re
import time
from collections.abc import Callable
from typing import Any

import msgspec

from routes.file_store import Records, Store, StoreFullError

MAX_ACTIVE, MAX_ACTIVE_PER_OWNER = 64, 8
"""Jobs that wait or run, of all keys and of one."""
MAX_MODELS, MAX_MODELS_PER_KEY = 64, 16
"""Tuned models that are not deleted: of a service without keys, and of one key.

An engine has 64 places for adapters (--max-adapters), so one key cannot fill them.
"""
_INVALID = re.compile(r"[^A-Za-z0-9._-]")


class JobStatus(enum.StrEnum):
    """Status of a job, in OpenAI's words."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


_UNFINISHED = (JobStatus.QUEUED, JobStatus.RUNNING, JobStatus.PAUSED)
ENDED = (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED)


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A fine-tuning job."""

    id: str
    owner: str
    """Name of the API key; "": none."""
    model: str
    training_file: str
    validation_file: str | None = None
    tuning: str
    """"state", "lora" or "state+lora"."""
    rank: int
    epochs: int
    """as asked for; 0: automatic, like the next two"""
    batch_size: int
    multiplier: float
    seed: int
    dtype: str = ""
    """type of the weights, as when it first ran: its checkpoint belongs to it"""
    chosen: dict[str, float] = {}
    """numbers of the run, under OpenAI's names"""
    suffix: str = ""
    metadata: dict[str, str] | None = None
    status: JobStatus = JobStatus.QUEUED
    created_at: int
    finished_at: int | None = None
    estimated_finish: int | None = None
    fine_tuned_model: str | None = None
    is_deleted: bool = False
    """whether the model was deleted"""
    error: dict[str, Any] | None = None
    result_files: list[str] = []
    trained_tokens: int | None = None
    metrics: dict[str, Any] = {}
    """of the best checkpoint: step, losses"""

    @property
    def model_id(self) -> str:
        """The model's name after success: `ft:BASE:ORG:SUFFIX:ID`; its last part begins with the tuning's letter."""
        letter = {"state": "s", "lora": "l"}.get(self.tuning, "b")
        parts = (_INVALID.sub("-", part) for part in (self.model, self.owner, self.suffix))
        return f"ft:{':'.join(parts)}:{letter}{self.id.removeprefix('ftjob-')}"


class JobStore:
    """Jobs and their events. Safe for threads and processes."""

    def __init__(self, store: Store) -> None:
        self._store, self._jobs = store, Records(store, "tunings", Job)
        self.job = self._jobs.get

    def add(self, job: Job) -> None:
        """Add a job. Raises StoreFullError, OSError."""
        with self._store.open() as database:
            active = "SELECT COUNT(*), COALESCE(SUM(owner = ?), 0) FROM tunings WHERE status IN (?, ?, ?)"
            count, own = database.execute(active, (job.owner, *_UNFINISHED)).fetchone()
            if count >= MAX_ACTIVE or own >= MAX_ACTIVE_PER_OWNER:
                raise StoreFullError(
                    f"{own} jobs of this key and {count} of all wait or run, the limits are {MAX_ACTIVE_PER_OWNER} and "
                    f"{MAX_ACTIVE}; wait or cancel some"
                )
            row = (job.id, job.owner, job.created_at, job.status, msgspec.json.encode(job).decode())
            database.execute("INSERT INTO tunings VALUES (?, ?, ?, ?, ?)", row)

    def jobs(self, owner: str, after: str = "", limit: int = 1 << 30) -> list[Job]:
        """Return a page of the jobs that the owner may see. The newest come first."""
        return self._jobs.page(owner, after, limit)

    def active(self) -> list[Job]:
        """Return the jobs that wait or run, oldest first; the running one is the first."""
        values = (JobStatus.QUEUED, JobStatus.RUNNING, JobStatus.QUEUED)
        return self._jobs.select("status IN (?, ?) ORDER BY status = ?, created, id", *values)

    def models(self, owner: str) -> list[Job]:
        """Return the jobs whose models the owner may use."""
        condition = "status = ? AND (? = '' OR owner = ?) ORDER BY created, id"
        return [job for job in self._jobs.select(condition, JobStatus.SUCCEEDED, owner, owner) if not job.is_deleted]

    def num_models(self, owner: str) -> int:
        """Return how many models the owner has, or will have when the jobs have ended."""
        query = "SELECT COUNT(*) FROM tunings WHERE owner = ? AND status IN (?, ?, ?)"
        with self._store.open() as database:
            (unfinished,) = database.execute(query, (owner, *_UNFINISHED)).fetchone()
        return len(self.models(owner)) + int(unfinished)

    def update(self, job_id: str, change: Callable[[Job], Job], *events: dict[str, Any]) -> Job:
        """Change a job in one transaction. Raises KeyError if it does not exist.

        Adds the events, unless the job had ended before. Figures are added once: a continued process repeats some.
        """
        with self._store.open() as database:
            before, job = self._jobs.update(database, job_id, change)
            known = "SELECT 1 FROM tuning_events WHERE job = ? AND json_extract(record, '$.message') = ?"
            for one in events if before.status not in ENDED else ():
                if one["data"] and database.execute(known, (job_id, one["message"])).fetchone():
                    continue
                query = "INSERT INTO tuning_events SELECT ?, COALESCE(MAX(number), 0) + 1, ? FROM tuning_events"
                database.execute(f"{query} WHERE job = ?", (job_id, msgspec.json.encode(one).decode(), job_id))
        return job

    def expire_results(self, job: Job, expires_at: int | None) -> None:
        """Set when a job's result files are deleted. None: never. Raises OSError."""
        for file_id in job.result_files:
            if (file := self._store.file(job.owner, file_id)) is not None:
                self._store.add_existing_file(msgspec.structs.replace(file, expires_at=expires_at))

    def events(self, job_id: str, after: str, limit: int) -> list[dict[str, Any]]:
        """Return a page of a job's events, newest first. `after`: the last entry of the previous page."""
        query = (
            "SELECT number, record FROM tuning_events WHERE job = ? AND (? = '' OR number < (SELECT number FROM "
            "tuning_events WHERE job = ? AND printf('ftevent-%06d', number) = ?)) ORDER BY number DESC LIMIT ?"
        )
        with self._store.open() as database:
            rows = database.execute(query, (job_id, after, job_id, after, limit)).fetchall()
        return [{"id": f"ftevent-{number:06}", **msgspec.json.decode(record)} for number, record in rows]


def make_event(message: str, level: str = "info", data: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return an event in OpenAI's form, without its id."""
    kind = "message" if data is None else "metrics"
    return {
        "object": "fine_tuning.job.event", "created_at": int(time.time()), "level": level, "message": message,
        "type": kind, "data": data or {},
    }  # fmt: skip
