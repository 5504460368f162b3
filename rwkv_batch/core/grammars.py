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

from rwkv_batch.core.failures import as_table
from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.protocol import Admitted
from rwkv_batch.request import Job
from sampling.grammar.constraint import Constraint, Form
from sampling.grammar.errors import GrammarError
from sampling.grammar.schema_place import written_at

if TYPE_CHECKING:
    from sampling.grammar.compiler import GrammarCompiler
    from sampling.grammar.matcher import Grammar

_as_told = as_table("the grammar could not be compiled")

Grammars = Mapping[Constraint, "Grammar"]
THREADS = 2
MOST_WAITING = 256
"""Groups of jobs with the same constraints that wait to be compiled."""
MOST_OF_CLIENT = 64
"""Of one client."""
MOST_JOBS = 4096
"""Jobs that wait, those with the same constraints too."""
MOST_JOBS_OF_CLIENT = 1024
_SHOWN_CHARACTERS = 200
"""Of a constraint, in its refusal."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A job whose constraints are not compiled yet."""

    job: Job
    constraints: frozenset[Constraint]
    admitted: Admitted
    then: Callable[[Grammars], None]
    is_cancelled: bool = False


_Line = dict[frozenset[Constraint], list[_Waiting]]
"""A client's jobs that wait; those with the same constraints are compiled for together."""


class GrammarDesk:
    """Compiles what jobs ask for, of each client in turn. llguidance is loaded with the first."""

    def __init__(self, make_compiler: Callable[[], GrammarCompiler], refusal: Callable[[], ServiceError]) -> None:
        """`make_compiler` is called once, at the first need; `refusal`: what is told once nothing is taken any more."""
        self._make_compiler = make_compiler
        self._refusal = refusal
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None
        self._threads = ThreadPoolExecutor(THREADS, "grammars")
        self._jobs: dict[str, _Waiting] = {}
        """those that wait or are compiled, by id"""
        self._lines: dict[str, _Line] = {}
        """those that wait, by client; the client whose turn is next comes first"""

    def prepare(self, job: Job, admitted: Admitted, then: Callable[[Grammars], None]) -> None:
        """Any thread. Go on with `then` when all its grammars are there, perhaps on another thread, or refuse it.

        `then` only hands over; it must not wait.
        """
        constraints = frozenset(row.constraint for row in job.rows if row.constraint is not None)
        kept = self._kept(constraints)
        if len(kept) == len(constraints):
            self._widen_soon(job, kept)
            then(kept)
            return
        with self._lock:
            line = self._lines.get(job.client, {})
            is_new = constraints not in line
            if refusal := self._too_many(job, line, is_new):
                admitted(refusal)
                return
            self._lines[job.client] = line
            self._jobs[job.job_id] = waiting = _Waiting(job, constraints, admitted, then)
            line.setdefault(constraints, []).append(waiting)
        if not is_new:
            return
        try:
            self._threads.submit(self._serve_next)
        except RuntimeError:  # closed
            self._refuse_waiting()

    def _too_many(self, job: Job, line: _Line, is_new: bool) -> ServiceError | None:
        """Why a job may not wait. One that another engine has admitted may: its client has been answered."""
        if job.attempt:
            return None
        groups, jobs = len(line), sum(map(len, line.values()))
        if (is_new and groups >= MOST_OF_CLIENT) or jobs >= MOST_JOBS_OF_CLIENT:
            return _waits_too_much(f"{jobs} of your requests, with {groups} different constraints,")
        groups = sum(map(len, self._lines.values()))
        if (is_new and groups >= MOST_WAITING) or len(self._jobs) >= MOST_JOBS:
            return _waits_too_much(f"{len(self._jobs)} requests, with {groups} different constraints,")
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

    def _kept(self, constraints: frozenset[Constraint]) -> dict[Constraint, Grammar]:
        compiler = self._compiler
        if compiler is None:
            return {}
        found = {constraint: compiler.kept(constraint) for constraint in constraints}
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
                self._widen(grammars, _rows_of([waiting.job for waiting in group]))
        except BaseException as caught:  # noqa: BLE001 - whatever it was, the job is told
            error = caught
        for waiting in group:
            self._done(waiting, grammars, error)

    def _next(self) -> list[_Waiting]:
        """Jobs with the same constraints, of the client whose turn it is; none: nobody waits."""
        with self._lock:
            if not self._lines:
                return []
            client = next(iter(self._lines))
            line = self._lines.pop(client)
            group = line.pop(next(iter(line)))
            if line:
                self._lines[client] = line  # behind the others
            return group

    def _refuse_waiting(self) -> None:
        while group := self._next():
            for waiting in group:
                self._done(waiting, {}, self._refusal())

    def _compile(self, constraints: frozenset[Constraint]) -> dict[Constraint, Grammar]:
        compiler = self._ready_compiler()
        grammars = {}
        for constraint in constraints:
            try:
                grammars[constraint] = compiler.compile(constraint)
            except GrammarError as error:
                raise _refused(constraint, error) from error
        return grammars

    def _widen_soon(self, job: Job, grammars: Grammars) -> None:
        """The same for a job that need not wait for it: later rows will find it done."""
        compiler, rows = self._compiler, _rows_of([job])
        if compiler is not None and any(compiler.lacks_lexers(grammars[one], rows[one]) for one in grammars):
            with contextlib.suppress(RuntimeError):  # closed
                self._threads.submit(self._widen, grammars, rows)

    def _widen(self, grammars: Grammars, rows: Counter[Constraint]) -> None:
        """Have masks of so many rows computed by as many threads as that helps."""
        compiler = self._ready_compiler()
        for constraint, grammar in grammars.items():
            compiler.widen(constraint, grammar, rows[constraint])

    def _ready_compiler(self) -> GrammarCompiler:
        with self._lock:
            if self._compiler is None:
                self._compiler = self._make_compiler()
            return self._compiler

    def _done(self, waiting: _Waiting, grammars: dict[Constraint, Grammar], error: BaseException | None) -> None:
        with self._lock:
            self._jobs.pop(waiting.job.job_id, None)
            if error is None and not waiting.is_cancelled:
                waiting.then(grammars)  # before the lock is let go: whoever cancels now finds it admitted
                return
        if waiting.is_cancelled:
            waiting.admitted(ServiceError(ErrorKind.CANCELLED, "the request was cancelled before it began"))
        elif error is not None:
            waiting.admitted(_as_told(error))


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
    text = written_at(schemas[0], error.place) if schemas else constraint.source
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}... ({len(text)} characters)"


def _waits_too_much(what: str) -> ServiceError:
    return ServiceError(
        ErrorKind.OVERLOADED,
        f"{what} wait for their grammars to be compiled; try again in a moment",
        retry_after_s=1,
    )
