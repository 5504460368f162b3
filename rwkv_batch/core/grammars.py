"""Constraints of jobs that come in: compiled beside the engine's thread, before the job is admitted.

Only a job with a constraint that is not compiled yet waits here; whatever happens, it has one answer.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.protocol import Admitted
from rwkv_batch.request import Job
from sampling.grammar.constraint import Constraint
from sampling.grammar.errors import GrammarError

if TYPE_CHECKING:
    from sampling.grammar.compiler import GrammarCompiler
    from sampling.grammar.matcher import Grammar

logger = logging.getLogger(__name__)

Grammars = Mapping[Constraint, "Grammar"]
THREADS = 2
MOST_WAITING = 256
"""Jobs whose constraints wait to be compiled."""


class GrammarDesk:
    """Compiles what jobs ask for. llguidance is loaded with the first."""

    def __init__(self, make_compiler: Callable[[], GrammarCompiler], refusal: Callable[[], ServiceError]) -> None:
        """`make_compiler` is called once, at the first need; `refusal`: what is told once nothing is taken any more."""
        self._make_compiler = make_compiler
        self._refusal = refusal
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None
        self._threads = ThreadPoolExecutor(THREADS, "grammars")
        self._waiting: dict[str, bool] = {}
        """by job id: whether it was cancelled meanwhile"""

    def prepare(self, job: Job, admitted: Admitted, then: Callable[[Grammars], None]) -> None:
        """Any thread. Go on with `then` when all its grammars are there, perhaps on another thread, or refuse it.

        `then` only hands over; it must not wait.
        """
        constraints = {row.constraint for row in job.rows if row.constraint is not None}
        kept = self._kept(constraints)
        if len(kept) == len(constraints):
            then(kept)
            return
        with self._lock:
            if len(self._waiting) >= MOST_WAITING:
                admitted(_too_many())
                return
            self._waiting[job.job_id] = False
        try:
            self._threads.submit(self._compile, constraints).add_done_callback(
                lambda future: self._done(job, future, admitted, then)
            )
        except RuntimeError:  # closed
            self._waiting.pop(job.job_id, None)
            admitted(self._refusal())

    def cancel(self, job_id: str) -> None:
        """Any thread. A job that waits here is refused."""
        with self._lock:
            if job_id in self._waiting:
                self._waiting[job_id] = True

    def close(self) -> None:
        """Begin nothing more; what has not begun is refused."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._compiler is not None:
            self._compiler.close()

    def _kept(self, constraints: set[Constraint]) -> dict[Constraint, Grammar]:
        compiler = self._compiler
        if compiler is None:
            return {}
        found = {constraint: compiler.kept(constraint) for constraint in constraints}
        return {constraint: grammar for constraint, grammar in found.items() if grammar and not grammar.is_too_slow}

    def _compile(self, constraints: set[Constraint]) -> dict[Constraint, Grammar]:
        compiler = self._ready_compiler()
        grammars = {}
        for constraint in constraints:
            try:
                grammars[constraint] = compiler.compile(constraint)
            except GrammarError as error:
                raise _refused(constraint, error) from error
        return grammars

    def _ready_compiler(self) -> GrammarCompiler:
        with self._lock:
            if self._compiler is None:
                self._compiler = self._make_compiler()
            return self._compiler

    def _done(
        self,
        job: Job,
        future: Future[dict[Constraint, Grammar]],
        admitted: Admitted,
        then: Callable[[Grammars], None],
    ) -> None:
        with self._lock:
            cancelled = self._waiting.pop(job.job_id, False)
            if not (cancelled or future.cancelled() or future.exception()):
                then(future.result())  # before the lock is let go: whoever cancels now finds it admitted
                return
        if cancelled:
            admitted(ServiceError(ErrorKind.CANCELLED, "the request was cancelled before it began"))
        else:
            error = None if future.cancelled() else future.exception()
            admitted(self._refusal() if error is None else _as_service_error(error))


def _refused(constraint: Constraint, error: GrammarError) -> ServiceError:
    field = error.field or constraint.field or constraint.form
    message = f"{field}{error.place}: cannot be served: {error}"
    return ServiceError(ErrorKind.INVALID_FIELD, message, field=f"{field}{error.place}")


def _as_service_error(error: BaseException) -> ServiceError:
    if isinstance(error, ServiceError):
        return error
    logger.error("compiling a grammar failed", exc_info=error)
    return ServiceError(ErrorKind.INTERNAL, f"the grammar could not be compiled: {type(error).__name__}: {error}")


def _too_many() -> ServiceError:
    return ServiceError(
        ErrorKind.OVERLOADED,
        f"{MOST_WAITING} requests wait for their grammars to be compiled; try again in a moment",
        retry_after_s=1,
    )
