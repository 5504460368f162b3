"""A job in a fleet. It runs on one engine after another until it has ended once.

Its output is recorded, so that another engine can continue it with the same text.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from rwkv_batch.errors import MAY_BE_KEPT, ErrorInfo, ErrorKind, ServiceError
from rwkv_batch.fleet.member import Member
from rwkv_batch.protocol import OnAdmitted, Sink
from rwkv_batch.request import Delta, GenerateRequest, Job, JobEvents, PromptLogprobs, Resumed, SessionTurn, attempt_id


@dataclass(slots=True)
class RowProgress:
    """One row of the job, by the caller's numbering."""

    token_ids: array[int] = field(default_factory=lambda: array("I"))
    """four bytes each: an HTTP worker holds those of all its streams"""
    shown: int = 0
    """bytes of text"""
    logprobs: int = 0
    """tokens with reported log-probabilities"""
    prompt_logprobs: int = 0
    """the same for its prompt"""
    session_history: tuple[int, int] | None = None
    """row and turns of its session before the turn; None: the turn has not begun"""
    is_complete_branch: bool = False
    """whether it is a branch that its engine may have stored"""
    has_ended: bool = False

    @property
    def has_begun(self) -> bool:
        has_output = self.token_ids or self.prompt_logprobs or self.has_ended
        return bool(has_output or self.session_history is not None)

    def record(self, delta: Delta) -> None:
        self.token_ids.fromlist(delta.token_ids)
        self.shown += len(delta.text)
        self.logprobs += len(delta.logprobs or ())
        self.prompt_logprobs += len(delta.prompt_logprobs or ())
        if delta.session_history is not None:
            self.session_history = delta.session_history
            self.is_complete_branch = delta.is_complete_branch
        self.has_ended = delta.finish is not None


def without_turn_starts(events: JobEvents) -> JobEvents:
    """Return the events without the deltas that only mark a turn's start."""
    if not any(delta.session_history is not None for delta in events.deltas):
        return events
    return msgspec.structs.replace(events, deltas=[delta for delta in events.deltas if delta.session_history is None])


class Progress:
    """How far each row of a job has come. One thread at a time."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._rows = [RowProgress() for _ in range(job.num_rows)]
        self._numbers: list[int] | None = None
        """None: unchanged"""

    @property
    def has_complete_branch(self) -> bool:
        return any(row.is_complete_branch for row in self._rows)

    def record(self, events: JobEvents) -> JobEvents:
        """Returns the events with the original row numbers."""
        if self._numbers is not None:
            deltas = [msgspec.structs.replace(delta, row=self._numbers[delta.row]) for delta in events.deltas]
            events = msgspec.structs.replace(events, deltas=deltas)
        for delta in events.deltas:
            self._rows[delta.row].record(delta)
        return events

    def remaining_job(self) -> Job | None:
        """Return the job's rest for another engine. None: every row has ended."""
        rows: list[GenerateRequest] = []
        numbers: list[int] = []
        first = 0
        for request in self._job.rows:
            for one, number in self._remaining_requests(request, first):
                rows.append(one)
                numbers.extend(range(number, number + one.num_rows))
            first += request.num_rows
        self._numbers = numbers
        return msgspec.structs.replace(self._job, rows=rows) if rows else None

    def _remaining_requests(self, request: GenerateRequest, first: int) -> Iterator[tuple[GenerateRequest, int]]:
        """Yield the unfinished parts of a request. Each comes with the number of its first row."""
        progress = self._rows[first : first + request.num_rows]
        if not any(row.has_begun for row in progress):
            yield request, first
            return
        for i, row in enumerate(progress):
            if not row.has_ended:
                yield _resumed(request, i, row), first + i


def _resumed(request: GenerateRequest, i: int, progress: RowProgress) -> GenerateRequest:
    prompt = request.prompt + request.candidates[i] if request.candidates else request.prompt
    seed = (request.sampling.seed + i) % (1 << 64)
    # Tokens whose log-probabilities were not sent yet are sampled again.
    has_logprobs = request.sampling.top_logprobs is not None
    token_ids = progress.token_ids[: progress.logprobs] if has_logprobs else progress.token_ids
    return msgspec.structs.replace(
        request,
        prompt=prompt,
        candidates=[],
        n=1,
        sampling=msgspec.structs.replace(request.sampling, seed=seed),
        resumed=Resumed(token_ids=list(token_ids), shown=progress.shown) if token_ids else None,
        session=_session_of(request.session, progress),
        prompt_logprobs=_remaining_prompt_logprobs(request, i, progress, len(prompt)),
    )


def _session_of(turn: SessionTurn | None, progress: RowProgress) -> SessionTurn | None:
    """Return the turn with its expected history. It then fails if it was kept before its engine was lost."""
    return turn if turn is None else msgspec.structs.replace(turn, expected_history=progress.session_history)


def _remaining_prompt_logprobs(
    request: GenerateRequest, i: int, progress: RowProgress, prompt_end: int
) -> PromptLogprobs | None:
    scoring = request.prompt_logprobs
    if scoring is None:
        return None
    # The first of several rows reports the scores of a shared prompt.
    is_shared = i > 0 and len(request.prompt) > 1
    start = (max(scoring.start, len(request.prompt)) if is_shared else scoring.start) + progress.prompt_logprobs
    return msgspec.structs.replace(scoring, start=start) if start < prompt_end else None


ENGINE_GONE = (ErrorKind.ENGINE_LOST, ErrorKind.DRAINING)
"""Errors of a lost or draining engine. Another engine may continue the job."""
CANCELLED = ErrorInfo(kind=ErrorKind.CANCELLED, message="the request was cancelled while it waited for an engine")


class InFlightJob:
    """A job and its current engine. Events of other engines are dropped. One thread at a time."""

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
        return self.lost_error(message)

    def final_refusal(self, refusal: ServiceError) -> ServiceError:
        """Return the refusal to report. A turn that was sent to a lost engine may be kept, so it is not refused."""
        if not self.losses or not self._is_turn:
            return refusal
        return ServiceError.from_info(self.lost_error(f"the engine was lost, and another refused: {refusal}"))

    @property
    def _is_turn(self) -> bool:
        return any(row.session is not None for row in self.job.rows)

    def lost_error(self, message: str) -> ErrorInfo:
        if self._is_turn and MAY_BE_KEPT not in message:
            message = f"{message}; {MAY_BE_KEPT}"
        return ErrorInfo(kind=ErrorKind.ENGINE_LOST, message=message)

    @property
    def attempt_id(self) -> str:
        return attempt_id(self.job.job_id, self.attempt)

    def next_attempt(self) -> Job | None:
        """Return the job for the next engine. None: all rows have ended."""
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
            must_confirm=self.can_resume,
        )

    def report_admission(self, refusal: ServiceError | None) -> None:
        """Report the job's admission or final refusal. The admission by a further engine is not reported."""
        if self.is_admitted:
            if refusal is not None:
                self._sink(JobEvents(job_id=self.job.job_id, deltas=[], done=True, error=refusal.info))
            return
        self.is_admitted = refusal is None
        self._admitted(refusal)

    def forward(self, events: JobEvents) -> bool:
        """Record events and pass them on. Returns whether the turn must be confirmed (`Job.must_confirm`)."""
        if self.can_resume:
            events = self._progress.record(events)
        shown = without_turn_starts(events)
        if shown.deltas or shown.done:
            self._sink(shown)
        return shown is not events and (self.may_be_stored or not self._is_branch)

    @property
    def _is_branch(self) -> bool:
        return any(row.session is not None and row.session.branch_from is not None for row in self.job.rows)

    @property
    def may_be_stored(self) -> bool:
        """Whether a lost engine may have stored this branch. Then it must not run again."""
        return self._progress.has_complete_branch

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
