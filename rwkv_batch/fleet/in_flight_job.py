"""A job on its way through a fleet: with one engine after the other, until it has ended once."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from rwkv_batch.errors import MAY_BE_KEPT, ErrorInfo, ErrorKind, ServiceError
from rwkv_batch.fleet.progress import Progress
from rwkv_batch.protocol import OnAdmitted, Sink
from rwkv_batch.request import Job, JobEvents

if TYPE_CHECKING:
    from rwkv_batch.fleet.member import Member

ENGINE_GONE = (ErrorKind.ENGINE_LOST, ErrorKind.DRAINING)
"""What an engine says that is lost or leaves: others may go on."""
CANCELLED = ErrorInfo(kind=ErrorKind.CANCELLED, message="the request was cancelled while it waited for an engine")


class InFlightJob:
    """See above. One engine at a time has it; what any other says is not heard. One thread at a time."""

    def __init__(self, job: Job, sink: Sink, on_admitted: OnAdmitted, can_resume: bool = True) -> None:
        self.job = job
        self.can_resume = can_resume
        """Whether it is followed so closely that another engine can go on with it once it has begun."""
        self.is_cancelled = False
        self.losses = 0
        """engines that it was lost with"""
        self.deadline = 0.0
        """time.monotonic until which it waits for an engine"""
        self.error: ErrorInfo | None = None
        """why its last engine does not go on"""
        self.member: Member | None = None
        """the engine that has it"""
        self.attempt = -1
        self.quota_engine: Member | None = None
        """the engine that holds the client's limits, where it has any"""
        self._sink, self._admitted = sink, on_admitted
        self.is_admitted = False
        self._progress = Progress(job)
        self._started_at = time.monotonic()

    def too_many_losses_error(self, last: ErrorInfo) -> ErrorInfo:
        """What it is told when it may lose no more engines. `last`: what the last one ended with."""
        message = (
            f"the request ran on {self.losses} engines that were lost, --resubmit allows {self.losses - 1}; it may be "
            f"what ends them and is not tried again; the last of them: {last.message}"
        )
        is_turn = any(row.session is not None for row in self.job.rows)
        if is_turn and MAY_BE_KEPT not in message:
            message = f"{message}; {MAY_BE_KEPT}"
        return ErrorInfo(kind=ErrorKind.ENGINE_LOST, message=message)

    @property
    def attempt_id(self) -> str:
        """Under which its engine knows it."""
        return f"{self.job.job_id}/{self.attempt}" if self.attempt else self.job.job_id

    def next_attempt(self) -> Job | None:
        """What the next engine gets; None: nothing is left to be done."""
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
            attempt=self.attempt,
            timeout_s=timeout_s,
            return_token_ids=self.can_resume,
        )

    def answer(self, refusal: ServiceError | None) -> None:
        """It is admitted, or refused for good. An engine that goes on with it is not told of."""
        if self.is_admitted:
            if refusal is not None:
                self._sink(JobEvents(job_id=self.job.job_id, deltas=[], done=True, error=refusal.info))
            return
        self.is_admitted = refusal is None
        self._admitted(refusal)

    def forward(self, events: JobEvents) -> None:
        """Pass on what its engine says."""
        if self.can_resume:
            events = self._progress.record(events)
        if events.deltas or events.done:
            self._sink(events)

    def forward_last(self, events: JobEvents) -> None:
        """Its engine does not go on: pass on what it says beside that."""
        if events.deltas:
            self.forward(JobEvents(job_id=self.job.job_id, deltas=events.deltas))

    def fail(self, error: ErrorInfo) -> None:
        """End it: no engine goes on."""
        self.answer(ServiceError.from_info(error))
