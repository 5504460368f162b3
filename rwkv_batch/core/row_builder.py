"""Checks jobs and creates their rows. No torch."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import msgspec
import numpy as np

from rwkv_batch.core.output import RowOutput, StopRulesCache
from rwkv_batch.core.scheduler import Scheduler
from rwkv_batch.core.sequence import NOTHING_SCORED, RunningJob, Sequence
from rwkv_batch.errors import ErrorKind, ServiceError, invalid
from rwkv_batch.request import GenerateRequest, Job
from rwkv_batch.tokenizer import END_OF_TEXT, Tokenizer
from sampling.grammar.constraint import THINK_END, Constraint
from sampling.grammar.matcher import Matcher, ThoughtBudget


class RowBuilder:
    """Checks jobs and creates their rows. Engine thread."""

    def __init__(
        self, scheduler: Scheduler, check_states: Callable[[GenerateRequest], None], tokenizer: Tokenizer, vocab: int
    ) -> None:
        self._scheduler = scheduler
        self._check_states = check_states
        self._byte_table = tokenizer.byte_table
        self._thought_end = tokenizer.encode_bytes(f"\n{THINK_END}".encode())
        self._stop_rules = StopRulesCache(tokenizer.byte_table)
        self._vocab = vocab

    def check(self, job: Job) -> None:
        """Check that a job can be admitted. Raises ServiceError."""
        if not job.was_admitted:
            self._check_queue(job)
        for request in job.rows:
            self._check_row(request)
            check_scoring(request, self._vocab)
            check_resumed(request)
        if any(request.session is not None for request in job.rows) and job.num_rows != 1:
            raise ServiceError(
                ErrorKind.INVALID_FIELD,
                f"a request with a session must have one row, {job.num_rows} were given; send one request per row",
                field="session_id",
            )

    def _check_queue(self, job: Job) -> None:
        limit = self._scheduler.limits.max_waiting_rows
        waiting = self._scheduler.admission.waiting_rows
        if waiting + job.num_rows > limit:
            raise _queue_is_full(f"{waiting} rows wait", job.num_rows, f"{limit} (max_waiting_rows)")
        share = self._scheduler.limits.waiting_rows_per_client
        waiting = self._scheduler.admission.waiting_rows_of(job.client) if job.client else 0
        if job.client and waiting + job.num_rows > share:
            limit_text = f"{share} for one client (max_waiting_rows_per_client)"
            raise _queue_is_full(f"{waiting} rows of this client wait", job.num_rows, limit_text)

    def _check_row(self, request: GenerateRequest) -> None:
        self._check_states(request)
        resume = request.session.resume_prompt if request.session else request.prompt
        if not request.prompt or not resume:
            raise ServiceError(ErrorKind.INVALID_FIELD, "a prompt is empty; give at least one token", field="prompt")
        sampling = request.sampling
        bad_words = () if sampling.filters is None else sampling.filters.bad_words
        named = [
            ("prompt", request.prompt),
            ("session", [] if resume is request.prompt else resume),
            ("stop_tokens", request.stop_ids),
            ("logit_bias", list(sampling.logit_bias)),
            ("resumed", request.resumed.token_ids if request.resumed is not None else []),
            ("prediction", request.prediction),
        ]
        named += [("candidates", candidate) for candidate in request.candidates]
        named += [("bad_words", list(word)) for word in bad_words]
        for field, ids in named:
            if ids and not _are_below(ids, self._vocab):
                wrong = next(i for i in ids if not 0 <= i < self._vocab)
                raise invalid(field, f"token id {wrong} is outside the model's vocabulary 0..{self._vocab - 1}", wrong)

    def build(self, job: RunningJob) -> list[Sequence]:
        """Create the rows to start with. Several continuations of a longer prompt start as one shared row."""
        rows: list[Sequence] = []
        number = 0
        for request in job.spec.rows:
            if request.num_rows > 1 and len(request.prompt) > 1 and not request.mixture:
                shared = self._sequence(job, number, request, request.prompt[:-1], may_sample=False)
                shared.fork_count, shared.scored = request.num_rows, scored_positions(request)
                rows.append(shared)
            else:
                rows.extend(self.continuations(job, number, request))
            number += request.num_rows
        return rows

    def continuations(self, job: RunningJob, first: int, request: GenerateRequest) -> list[Sequence]:
        """Create the rows of a request. If a shared row read the prompt, that row already reported its scores."""
        rows: list[Sequence] = []
        for i in range(request.num_rows):
            own = self._nth(request, i)
            rows.append(self._sequence(job, first + i, own, list(own.prompt), may_sample=True))
            rows[-1].scored = scored_positions(own)
        return rows

    @staticmethod
    def _nth(request: GenerateRequest, i: int) -> GenerateRequest:
        """Return the request of continuation `i`, with its own seed or candidate.

        ignore_eos bans the end token, so it is never read.
        """
        if request.candidates:
            request = msgspec.structs.replace(request, prompt=request.prompt + request.candidates[i], candidates=[])
        sampling = request.sampling
        if i:
            sampling = msgspec.structs.replace(sampling, seed=(sampling.seed + i) % (1 << 64))
        if request.ignore_eos:
            sampling = msgspec.structs.replace(sampling, logit_bias={**sampling.logit_bias, END_OF_TEXT: float("-inf")})
        return request if sampling is request.sampling else msgspec.structs.replace(request, sampling=sampling)

    def _sequence(
        self, job: RunningJob, row: int, request: GenerateRequest, token_ids: list[int], may_sample: bool
    ) -> Sequence:
        output = RowOutput(row, request, self._stop_rules.build(request), self._byte_table, job.spec.return_token_ids)
        prompt_tokens = len(request.prompt)
        sequence = Sequence(job, row, request, token_ids, output, may_sample=may_sample, prompt_tokens=prompt_tokens)
        if request.constraint is not None and may_sample:
            sequence.matcher = job.grammars[request.constraint].matcher(request.max_tokens)
            self._limit_thought(sequence.matcher, request.constraint)
            for token in request.resumed.token_ids if request.resumed is not None else ():
                sequence.matcher.advance(token)
        return sequence

    def _limit_thought(self, matcher: object, constraint: Constraint) -> None:
        if constraint.thought_tokens is not None and isinstance(matcher, Matcher):
            matcher.budget = ThoughtBudget(constraint.thought_tokens, self._thought_end, self._byte_table)


def check_resumed(request: GenerateRequest) -> None:
    """Check a row that continues another engine's tokens. Raises ServiceError if they leave nothing to generate."""
    if request.resumed is not None and (request.num_rows > 1 or len(request.resumed.token_ids) >= request.max_tokens):
        count = len(request.resumed.token_ids)
        allowed = f"allowed are fewer than max_tokens ({request.max_tokens}) and one row"
        raise invalid("resumed", f"{count} tokens for {request.num_rows} rows; {allowed}", count)


def _are_below(ids: list[int], vocab: int) -> bool:
    """Return whether all token ids are in 0..vocab - 1. Four times as fast as `min` and `max` of a long prompt."""
    try:
        return bool(np.frombuffer(array("I", ids), np.uint32).max() < vocab)
    except OverflowError:
        return False


def _queue_is_full(waiting: str, more: int, limit: str) -> ServiceError:
    return ServiceError(
        ErrorKind.OVERLOADED,
        f"the queue is full: {waiting}, {more} more would exceed the limit of {limit}; retry in 1 s or send fewer rows",
        retry_after_s=1,
    )


def scored_positions(request: GenerateRequest) -> range:
    scoring = request.prompt_logprobs
    return NOTHING_SCORED if scoring is None else range(scoring.start, len(request.prompt))


def check_scoring(request: GenerateRequest, vocab: int) -> None:
    """Check a request's scoring fields. Raises ServiceError."""
    scoring, session = request.prompt_logprobs, request.session
    if request.max_tokens < 1 and (request.max_tokens < 0 or session is not None):
        least = "at least 0, and at least 1 in a session"
        raise invalid("max_tokens", f"must be {least}, got {request.max_tokens}", request.max_tokens)
    if session is not None and (scoring is not None or request.candidates):
        message = "a session's turn cannot be scored; leave the session out"
        raise invalid("session_id", message, session.session_id)
    if request.candidates and (request.n != 1 or not all(request.candidates)):
        raise invalid("candidates", "each must have at least one token, and n must be 1", request.n)
    if scoring is not None and not (scoring.start >= 1 and 0 <= scoring.top <= vocab):
        given = f"start {scoring.start}, top {scoring.top}"
        raise invalid("prompt_logprobs", f"start must be at least 1 and top 0..{vocab}, got {given}", given)
