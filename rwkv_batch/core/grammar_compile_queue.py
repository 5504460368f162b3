"""Compiles the constraints of new jobs on threads, before their admission.

A job waits here only if one of its constraints is not compiled yet. Every job gets exactly one reply.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rwkv_batch.core.error_mapping import error_translator
from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.protocol import OnAdmitted
from rwkv_batch.request import Job
from sampling.grammar.constraint import Constraint, Form, GrammarError
from sampling.grammar.error_location import schema_at
from sampling.grammar.required_text import RequiredTextGrammar

if TYPE_CHECKING:
    from sampling.grammar.compiler import GrammarCompiler
    from sampling.grammar.matcher import Grammar
    from sampling.grammar.required_text import AnyGrammar, RequiredTexts

_to_service_error = error_translator("the grammar could not be compiled")

Grammars = Mapping[Constraint, "AnyGrammar"]
_Compiled = Mapping[Constraint, "Grammar"]
THREADS = 2
MAX_WAITING_GROUPS = 256
"""Groups that wait to be compiled. The jobs of a group have one client, hence one tenant, and the same constraints."""
MAX_WAITING_GROUPS_PER_CLIENT = 64
MAX_WAITING_JOBS = 4096
MAX_WAITING_JOBS_PER_CLIENT = 1024
_MAX_QUOTED_CHARACTERS = 200
"""Characters of a constraint that an error repeats."""


@dataclass(slots=True, eq=False)
class _WaitingJob:
    job: Job
    constraints: frozenset[Constraint]
    on_admitted: OnAdmitted
    then: Callable[[Grammars], None]
    is_cancelled: bool = False


_ClientQueue = dict[frozenset[Constraint], list[_WaitingJob]]


class GrammarCompileQueue:
    """Compiles one group of each client in turn. Loads llguidance at the first constraint."""

    def __init__(
        self,
        make_compiler: Callable[[], GrammarCompiler],
        make_required_texts: Callable[[], RequiredTexts],
        closed_error: Callable[[], ServiceError],
    ) -> None:
        """
        make_compiler: called once, with the first constraint that must be compiled
        make_required_texts: called once, with the first `RequiredText`
        closed_error: returns the error for jobs after `close`
        """
        self._make_compiler = make_compiler
        self._make_required_texts = make_required_texts
        self._required_texts: RequiredTexts | None = None
        self._closed_error = closed_error
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None
        self._threads = ThreadPoolExecutor(THREADS, "grammars")
        self._jobs: dict[str, _WaitingJob] = {}
        self._queues: dict[str, _ClientQueue] = {}
        """waiting jobs by client, the next client first"""

    def prepare(self, job: Job, on_admitted: OnAdmitted, then: Callable[[Grammars], None]) -> None:
        """Call `then` when the job's grammars are compiled, or refuse the job. Any thread.

        `then` may run on another thread and must not block.
        """
        constraints = frozenset(row.constraint for row in job.rows if row.constraint is not None)
        required = self._required_grammars(constraints)
        if required:  # they need no compilation
            constraints, put = constraints.difference(required), then

            def then(grammars: Grammars) -> None:
                put({**grammars, **required})

        cached = self._cached_grammars(constraints, job.tenant)
        if len(cached) == len(constraints):
            self._add_lexers_later(job, cached)
            then(cached)
            return
        with self._lock:
            queue = self._queues.get(job.client, {})
            is_new = constraints not in queue
            if error := self._queue_full_error(job, queue, is_new):
                on_admitted(error)
                return
            self._queues[job.client] = queue
            self._jobs[job.job_id] = waiting = _WaitingJob(job, constraints, on_admitted, then)
            queue.setdefault(constraints, []).append(waiting)
        if not is_new:
            return
        try:
            self._threads.submit(self._serve_next)
        except RuntimeError:  # closed
            self._refuse_waiting()

    def _required_grammars(self, constraints: frozenset[Constraint]) -> dict[Constraint, RequiredTextGrammar]:
        required = [one for one in constraints if one.form is Form.REQUIRED_TEXT]
        if required and self._required_texts is None:
            texts = self._make_required_texts()
            with self._lock:
                self._required_texts = self._required_texts or texts
        return {one: RequiredTextGrammar(self._required_texts, one) for one in required if self._required_texts}

    def _queue_full_error(self, job: Job, queue: _ClientQueue, is_new: bool) -> ServiceError | None:
        """Return why a job may not wait. A job that another engine has admitted always may."""
        if job.was_admitted:
            return None
        groups, jobs = len(queue), sum(map(len, queue.values()))
        if (is_new and groups >= MAX_WAITING_GROUPS_PER_CLIENT) or jobs >= MAX_WAITING_JOBS_PER_CLIENT:
            return _overloaded_error(f"{jobs} of your requests, with {groups} different constraints,")
        groups = sum(map(len, self._queues.values()))
        if (is_new and groups >= MAX_WAITING_GROUPS) or len(self._jobs) >= MAX_WAITING_JOBS:
            return _overloaded_error(f"{len(self._jobs)} requests, with {groups} different constraints,")
        return None

    def cancel(self, job_id: str) -> None:
        """Refuse the job if it waits here. Any thread."""
        with self._lock:
            if job_id in self._jobs:
                self._jobs[job_id].is_cancelled = True

    def close(self) -> None:
        """Refuse jobs that are not compiled yet."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._refuse_waiting()
        if self._compiler is not None:
            self._compiler.close()

    def _cached_grammars(self, constraints: frozenset[Constraint], tenant: str) -> dict[Constraint, Grammar]:
        compiler = self._compiler
        if compiler is None:
            return {}
        found = {constraint: compiler.cached(constraint, tenant) for constraint in constraints}
        return {constraint: grammar for constraint, grammar in found.items() if grammar and not grammar.is_too_slow}

    def _serve_next(self) -> None:
        group = self._next()
        if not group:
            return
        grammars: dict[Constraint, Grammar] = {}
        error: BaseException | None = None
        try:
            if not all(waiting.is_cancelled for waiting in group):
                grammars = self._compile(group[0].constraints, group[0].job.tenant)
                self._add_lexers(grammars, _rows_of([waiting.job for waiting in group]))
        except BaseException as caught:  # noqa: BLE001 - the job needs a reply in any case
            error = caught
        for waiting in group:
            self._done(waiting, grammars, error)

    def _next(self) -> list[_WaitingJob]:
        """Remove and return the next client's oldest group."""
        with self._lock:
            if not self._queues:
                return []
            client = next(iter(self._queues))
            queue = self._queues.pop(client)
            group = queue.pop(next(iter(queue)))
            if queue:
                self._queues[client] = queue  # now last
            return group

    def _refuse_waiting(self) -> None:
        while group := self._next():
            for waiting in group:
                self._done(waiting, {}, self._closed_error())

    def _compile(self, constraints: frozenset[Constraint], tenant: str) -> dict[Constraint, Grammar]:
        compiler = self._get_compiler()
        grammars = {}
        for constraint in constraints:
            try:
                grammars[constraint] = compiler.compile(constraint, tenant)
            except GrammarError as error:
                raise _compile_error(constraint, error) from error
        return grammars

    def _add_lexers_later(self, job: Job, grammars: _Compiled) -> None:
        """Add lexers in the background: later masks of these grammars are computed in parallel."""
        compiler, rows = self._compiler, _rows_of([job])
        if compiler is not None and any(compiler.needs_lexers(grammars[one], rows[one]) for one in grammars):
            with contextlib.suppress(RuntimeError):  # closed
                self._threads.submit(self._add_lexers, grammars, rows)

    def _add_lexers(self, grammars: _Compiled, rows: Counter[Constraint]) -> None:
        compiler = self._get_compiler()
        for constraint, grammar in grammars.items():
            compiler.add_lexers(constraint, grammar, rows[constraint])

    def _get_compiler(self) -> GrammarCompiler:
        with self._lock:
            if self._compiler is None:
                self._compiler = self._make_compiler()
            return self._compiler

    def _done(self, waiting: _WaitingJob, grammars: dict[Constraint, Grammar], error: BaseException | None) -> None:
        with self._lock:
            self._jobs.pop(waiting.job.job_id, None)
            if error is None and not waiting.is_cancelled:
                waiting.then(grammars)  # under the lock, so that `cancel` finds it either here or admitted
                return
        if waiting.is_cancelled:
            waiting.on_admitted(ServiceError(ErrorKind.CANCELLED, "the request was cancelled before it started"))
        elif error is not None:
            waiting.on_admitted(_to_service_error(error))


def _rows_of(jobs: Iterable[Job]) -> Counter[Constraint]:
    rows: Counter[Constraint] = Counter()
    for request in (request for job in jobs for request in job.rows):
        if request.constraint is not None:
            rows[request.constraint] += request.num_rows
    return rows


def _compile_error(constraint: Constraint, error: GrammarError) -> ServiceError:
    field = error.field or constraint.field or constraint.form
    message = f"{field}{error.place}: cannot be served: {error}"
    return ServiceError(
        ErrorKind.INVALID_FIELD, message, field=f"{field}{error.place}", given=_given(constraint, error)
    )


def _given(constraint: Constraint, error: GrammarError) -> str | None:
    """Return the invalid part of the client's constraint. None: the server wrote it."""
    schemas = [rule.source for rule in constraint.rules if rule.field == error.field and error.field]
    if constraint.form is Form.JSON_SCHEMA:
        schemas.append(constraint.source)
    if constraint.rules and not schemas:
        return None
    text = schema_at(schemas[0], error.place) if schemas else constraint.source
    return (
        text if len(text) <= _MAX_QUOTED_CHARACTERS else f"{text[:_MAX_QUOTED_CHARACTERS]}... ({len(text)} characters)"
    )


def _overloaded_error(waiting: str) -> ServiceError:
    return ServiceError(
        ErrorKind.OVERLOADED, f"{waiting} wait for their grammars to be compiled; retry in 1 s", retry_after_s=1
    )
