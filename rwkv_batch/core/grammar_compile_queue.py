"""Constraints of jobs that come in: compiled beside the engine's thread, before the job is admitted.

Only a job with a constraint that is not compiled yet waits here; whatever happens, it has one answer.
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
from rwkv_batch.protocol import Admitted
from rwkv_batch.request import Job
from sampling.grammar.constraint import Constraint, Form
from sampling.grammar.error_location import schema_at
from sampling.grammar.errors import GrammarError

if TYPE_CHECKING:
    from sampling.grammar.compiler import GrammarCompiler
    from sampling.grammar.matcher import Grammar

_to_service_error = error_translator("the grammar could not be compiled")

Grammars = Mapping[Constraint, "Grammar"]
THREADS = 2
MAX_WAITING_GROUPS = 256
"""Groups of jobs with the same constraints that wait to be compiled."""
MAX_WAITING_GROUPS_PER_CLIENT = 64
"""Of one client."""
MAX_WAITING_JOBS = 4096
"""Jobs that wait, those with the same constraints too."""
MAX_WAITING_JOBS_PER_CLIENT = 1024
_MAX_QUOTED_CHARACTERS = 200
"""Of a constraint, in its refusal."""


@dataclass(slots=True, eq=False)
class _WaitingJob:
    """A job whose constraints are not compiled yet."""

    job: Job
    constraints: frozenset[Constraint]
    admitted: Admitted
    then: Callable[[Grammars], None]
    is_cancelled: bool = False


_ClientQueue = dict[frozenset[Constraint], list[_WaitingJob]]
"""A client's jobs that wait; those with the same constraints are compiled for together."""


class GrammarCompileQueue:
    """Compiles what jobs ask for, of each client in turn. llguidance is loaded with the first."""

    def __init__(self, make_compiler: Callable[[], GrammarCompiler], refusal: Callable[[], ServiceError]) -> None:
        """`make_compiler` is called once, at the first need; `refusal`: what is told once nothing is taken any more."""
        self._make_compiler = make_compiler
        self._refusal = refusal
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None
        self._threads = ThreadPoolExecutor(THREADS, "grammars")
        self._jobs: dict[str, _WaitingJob] = {}
        """those that wait or are compiled, by id"""
        self._queues: dict[str, _ClientQueue] = {}
        """those that wait, by client; the client whose turn is next comes first"""

    def prepare(self, job: Job, admitted: Admitted, then: Callable[[Grammars], None]) -> None:
        """Any thread. Go on with `then` when all its grammars are there, perhaps on another thread, or refuse it.

        `then` only hands over; it must not wait.
        """
        constraints = frozenset(row.constraint for row in job.rows if row.constraint is not None)
        cached = self._cached_grammars(constraints)
        if len(cached) == len(constraints):
            self._add_mask_threads_later(job, cached)
            then(cached)
            return
        with self._lock:
            queue = self._queues.get(job.client, {})
            is_new = constraints not in queue
            if refusal := self._queue_full_error(job, queue, is_new):
                admitted(refusal)
                return
            self._queues[job.client] = queue
            self._jobs[job.job_id] = waiting = _WaitingJob(job, constraints, admitted, then)
            queue.setdefault(constraints, []).append(waiting)
        if not is_new:
            return
        try:
            self._threads.submit(self._serve_next)
        except RuntimeError:  # closed
            self._refuse_waiting()

    def _queue_full_error(self, job: Job, queue: _ClientQueue, is_new: bool) -> ServiceError | None:
        """Why a job may not wait. One that another engine has admitted may: its client has been answered."""
        if job.attempt:
            return None
        groups, jobs = len(queue), sum(map(len, queue.values()))
        if (is_new and groups >= MAX_WAITING_GROUPS_PER_CLIENT) or jobs >= MAX_WAITING_JOBS_PER_CLIENT:
            return _overloaded_error(f"{jobs} of your requests, with {groups} different constraints,")
        groups = sum(map(len, self._queues.values()))
        if (is_new and groups >= MAX_WAITING_GROUPS) or len(self._jobs) >= MAX_WAITING_JOBS:
            return _overloaded_error(f"{len(self._jobs)} requests, with {groups} different constraints,")
        return None

    def cancel(self, job_id: str) -> None:
        """Any thread. A job that waits here is refused."""
        with self._lock:
            if job_id in self._jobs:
                self._jobs[job_id].is_cancelled = True

    def close(self) -> None:
        """Begin nothing more; what has not begun is refused."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._refuse_waiting()
        if self._compiler is not None:
            self._compiler.close()

    def _cached_grammars(self, constraints: frozenset[Constraint]) -> dict[Constraint, Grammar]:
        compiler = self._compiler
        if compiler is None:
            return {}
        found = {constraint: compiler.cached(constraint) for constraint in constraints}
        return {constraint: grammar for constraint, grammar in found.items() if grammar and not grammar.is_too_slow}

    def _serve_next(self) -> None:
        """Compile for the client whose turn it is."""
        group = self._next()
        if not group:
            return
        grammars: dict[Constraint, Grammar] = {}
        error: BaseException | None = None
        try:
            if not all(waiting.is_cancelled for waiting in group):
                grammars = self._compile(group[0].constraints)
                self._add_mask_threads(grammars, _rows_of([waiting.job for waiting in group]))
        except BaseException as caught:  # noqa: BLE001 - whatever it was, the job is told
            error = caught
        for waiting in group:
            self._done(waiting, grammars, error)

    def _next(self) -> list[_WaitingJob]:
        """Jobs with the same constraints, of the client whose turn it is; none: nobody waits."""
        with self._lock:
            if not self._queues:
                return []
            client = next(iter(self._queues))
            queue = self._queues.pop(client)
            group = queue.pop(next(iter(queue)))
            if queue:
                self._queues[client] = queue  # behind the others
            return group

    def _refuse_waiting(self) -> None:
        while group := self._next():
            for waiting in group:
                self._done(waiting, {}, self._refusal())

    def _compile(self, constraints: frozenset[Constraint]) -> dict[Constraint, Grammar]:
        compiler = self._get_compiler()
        grammars = {}
        for constraint in constraints:
            try:
                grammars[constraint] = compiler.compile(constraint)
            except GrammarError as error:
                raise _refused(constraint, error) from error
        return grammars

    def _add_mask_threads_later(self, job: Job, grammars: Grammars) -> None:
        """The same for a job that need not wait for it: later rows will find it done."""
        compiler, rows = self._compiler, _rows_of([job])
        if compiler is not None and any(compiler.needs_lexers(grammars[one], rows[one]) for one in grammars):
            with contextlib.suppress(RuntimeError):  # closed
                self._threads.submit(self._add_mask_threads, grammars, rows)

    def _add_mask_threads(self, grammars: Grammars, rows: Counter[Constraint]) -> None:
        """Have masks of so many rows computed by as many threads as that helps."""
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
                waiting.then(grammars)  # before the lock is let go: whoever cancels now finds it admitted
                return
        if waiting.is_cancelled:
            waiting.admitted(ServiceError(ErrorKind.CANCELLED, "the request was cancelled before it began"))
        elif error is not None:
            waiting.admitted(_to_service_error(error))


def _rows_of(jobs: Iterable[Job]) -> Counter[Constraint]:
    """How many rows each constraint holds."""
    rows: Counter[Constraint] = Counter()
    for request in (request for job in jobs for request in job.rows):
        if request.constraint is not None:
            rows[request.constraint] += request.num_rows
    return rows


def _refused(constraint: Constraint, error: GrammarError) -> ServiceError:
    field = error.field or constraint.field or constraint.form
    message = f"{field}{error.place}: cannot be served: {error}"
    return ServiceError(
        ErrorKind.INVALID_FIELD, message, field=f"{field}{error.place}", given=_given(constraint, error)
    )


def _given(constraint: Constraint, error: GrammarError) -> str | None:
    """What is at fault as it was sent, as far as an error repeats it; None: it is written here, from what was sent."""
    schemas = [rule.source for rule in constraint.rules if rule.field == error.field and error.field]
    if constraint.form is Form.JSON_SCHEMA:
        schemas.append(constraint.source)
    if constraint.rules and not schemas:
        return None
    text = schema_at(schemas[0], error.place) if schemas else constraint.source
    return (
        text if len(text) <= _MAX_QUOTED_CHARACTERS else f"{text[:_MAX_QUOTED_CHARACTERS]}... ({len(text)} characters)"
    )


def _overloaded_error(what: str) -> ServiceError:
    return ServiceError(
        ErrorKind.OVERLOADED,
        f"{what} wait for their grammars to be compiled; try again in a moment",
        retry_after_s=1,
    )
