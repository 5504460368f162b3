"""Records a job's output so that another engine can continue it with the same text."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from rwkv_batch.request import Delta, GenerateRequest, Job, JobEvents, PromptLogprobs, Resumed, SessionTurn


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
    session_tokens: int | None = None
    """length of its session before the turn; None: the turn has not begun"""
    has_ended: bool = False

    @property
    def has_begun(self) -> bool:
        has_output = self.token_ids or self.prompt_logprobs or self.has_ended
        return bool(has_output or self.session_tokens is not None)

    def record(self, delta: Delta) -> None:
        self.token_ids.fromlist(delta.token_ids)
        self.shown += len(delta.text)
        self.logprobs += len(delta.logprobs or ())
        self.prompt_logprobs += len(delta.prompt_logprobs or ())
        if delta.session_tokens is not None:
            self.session_tokens = delta.session_tokens
        self.has_ended = delta.finish is not None


def without_turn_starts(events: JobEvents) -> JobEvents:
    """Return the events without the deltas that only say that a turn begins."""
    if not any(delta.session_tokens is not None for delta in events.deltas):
        return events
    return msgspec.structs.replace(events, deltas=[delta for delta in events.deltas if delta.session_tokens is None])


class Progress:
    """One thread at a time."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._rows = [RowProgress() for _ in range(job.num_rows)]
        self._numbers: list[int] | None = None
        """None: unchanged"""

    def record(self, events: JobEvents) -> JobEvents:
        """Returns the events with the original row numbers."""
        if self._numbers is not None:
            deltas = [msgspec.structs.replace(delta, row=self._numbers[delta.row]) for delta in events.deltas]
            events = msgspec.structs.replace(events, deltas=deltas)
        for delta in events.deltas:
            self._rows[delta.row].record(delta)
        return events

    def remaining_job(self) -> Job | None:
        """None: every row has ended."""
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
        """Yield the unfinished parts of a request, each with the number of its first row."""
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
    """Return the turn, which then fails if it was kept before its engine was lost."""
    return turn if turn is None else msgspec.structs.replace(turn, expected_tokens=progress.session_tokens)


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
