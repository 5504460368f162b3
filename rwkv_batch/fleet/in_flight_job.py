"""A job in a fleet. It runs on one engine after another until it has ended once."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from rwkv_batch.errors import MAY_BE_KEPT, ErrorInfo, ErrorKind, ServiceError
from rwkv_batch.fleet.member import Member
from rwkv_batch.fleet.progress import Progress, without_turn_starts
from rwkv_batch.protocol import OnAdmitted, Sink
from rwkv_batch.request import Job, JobEvents, attempt_id

if TYPE_CHECKING:
    from rwkv_batch.fleet.member import Member

ENGINE_GONE = (ErrorKind.ENGINE_LOST, ErrorKind.DRAINING)
"""Errors of a lost or draining engine. Another engine may continue the job."""
CANCELLED = ErrorInfo(kind=ErrorKind.CANCELLED, message="the request was cancelled while it waited for an engine")


class InFlightJob:
    """Events of other engines are dropped. One thread at a time."""

    def __init__(self, job: Job, sink: Sink, on_admitted: OnAdmitted, can_resume: bool = True) -> None:
        self.job = job
        self.can_resume = can_resume
        """whether its progress is recorded, so that another engine can continue it"""
        self.is_cancelled = False
        self.losses = 0
        self.deadline = 0.0
        """time.monotonic() until which it waits for an engine"""
        self.error: ErrorInfo | None = None
        """why its last engine does not continue it"""
        self.member: Member | None = None
        self.attempt = -1
        self.usage = job.usage
        """None: it has no limits"""
        self.is_counted = False
        self._sink, self._admitted = sink, on_admitted
        self.is_admitted = False
        self._progress = Progress(job)
        self._started_at = time.monotonic()

    def too_many_losses_error(self, last: ErrorInfo) -> ErrorInfo:
        """Return the error of a job that may not lose another engine. `last`: the last engine's error."""
        message = (
            f"the request ran on {self.losses} engines that were lost, --resubmit allows {self.losses - 1}; it may be "
            f"the cause and is not sent to another engine. Last error: {last.message}"
        )
        is_turn = any(row.session is not None for row in self.job.rows)
        if is_turn and MAY_BE_KEPT not in message:
            message = f"{message}; {MAY_BE_KEPT}"
        return ErrorInfo(kind=ErrorKind.ENGINE_LOST, message=message)

    @property
    def attempt_id(self) -> str:
        return attempt_id(self.job.job_id, self.attempt)

    def next_attempt(self) -> Job | None:
        """None: all rows have ended."""
        self.attempt += 1
        remaining_job = self._progress.remaining_job() if self.attempt else self.job
        if remaining_job is None:
            return None
        timeout_s = self.job.timeout_s
        if timeout_s is not None and self.attempt:
            timeout_s = max(0.001, timeout_s - (time.monotonic() - self._started_at))
        return msgspec.structs.replace(
            remaining_job,
            job_id=self.attempt_id,
            was_admitted=self.is_admitted,
            limits=None,
            timeout_s=timeout_s,
            return_token_ids=self.can_resume or self.usage is not None,
        )

    def report_admission(self, refusal: ServiceError | None) -> None:
        """The admission by a further engine is not reported."""
        if self.is_admitted:
            if refusal is not None:
                self._sink(JobEvents(job_id=self.job.job_id, deltas=[], done=True, error=refusal.info))
            return
        self.is_admitted = refusal is None
        self._admitted(refusal)

    def forward(self, events: JobEvents) -> None:
        """Record events and pass them on."""
        if self.can_resume:
            events = self._progress.record(events)
        events = without_turn_starts(events)
        if events.deltas or events.done:
            self._sink(events)

    def forward_last(self, events: JobEvents) -> None:
        """Pass on the last deltas of a lost engine, without its error."""
        if events.deltas:
            self.forward(JobEvents(job_id=self.job.job_id, deltas=events.deltas))

    def fail(self, error: ErrorInfo) -> None:
        self.report_admission(ServiceError.from_info(error))


class Attempt(NamedTuple):
    number: int
    job_id: str
    member: Member
    connection: int
    """the engine's connection number when the job was sent"""
