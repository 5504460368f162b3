"""Checks each answer, refusal and error of a world's clients. It compares them with the world's knowledge."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rwkv_batch.core.sequence import Sequence
from rwkv_batch.errors import ErrorInfo, ErrorKind
from rwkv_batch.request import Finish, FinishReason, GenerateRequest, Job
from state_pool.session_key import SessionKey
from test.simulation.history import History
from test.simulation.oracle import Answer, predict, predict_scores, prompt_of
from test.simulation.violation import demand

if TYPE_CHECKING:
    from test.simulation.world import World

RETRY_S = 3.0
"""Seconds until a refused delete is tried again. Until then its name cannot be reused."""


@dataclass(eq=False)
class Submission:
    """A job and everything received so far."""

    job: Job
    at: float
    rows: list[tuple[GenerateRequest, int]]
    """per row: its request and its continuation number"""
    admitted: bool | None = None
    sequences: dict[int, Sequence] = field(default_factory=dict)
    texts: dict[int, bytes] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    scores: dict[int, list[float]] = field(default_factory=dict)
    replayed: int = 0
    """tokens of its session that are charged because they are read again"""
    finishes: dict[int, Finish] = field(default_factory=dict)
    cancelled: bool = False
    done: bool = False


class Judge:
    """Raises Violation for wrong events."""

    def __init__(self, world: World, counts: dict[str, int]) -> None:
        """counts: counter of turns and errors"""
        self._world = world
        self._counts = counts
        self.deletes: list[tuple[float, str, bool]] = []
        """requested deletes: time, name, and whether it is a prefix"""

    def check_call_error(self, error: ErrorInfo, at: float, name: str, importing: bool = False) -> None:
        """Check that a failed call about a session has a reason."""
        world = self._world
        fine = {
            ErrorKind.OVERLOADED: True,
            ErrorKind.SESSION_BUSY: importing,
            ErrorKind.INVALID_FIELD: importing and world.settings.bad_import > 0,
            ErrorKind.SESSION_NOT_FOUND: self._deleted_since(at, name),
            ErrorKind.SESSION_UNUSABLE: world.faults.since(0.0, "read", "thread", "disk", "unload")
            or self._was_mixture(name),
            ErrorKind.ADAPTER_NOT_FOUND: world.faults.since(0.0, "unload"),
            ErrorKind.ENGINE_LOST: world.faults.since(at, "disk", "thread", "read"),
            ErrorKind.INTERNAL: world.faults.since(0.0, "disk", "thread", "read"),
            ErrorKind.DRAINING: world.faults.since(at, "restart"),
        }
        demand(fine.get(error.kind, False), f"a call failed: {error}")

    def _was_mixture(self, name: str) -> bool:
        return any(began.is_mixture for began in self._world.ledger.began_as(name))

    def check_refusal(self, submission: Submission, error: ErrorInfo) -> None:
        world, turn = self._world, submission.rows[0][0].session
        branches = turn is not None and turn.branch_from not in (None, 0)
        admission, limits = world.engine.scheduler.admission, world.engine.scheduler.limits
        fine = {
            ErrorKind.OVERLOADED: admission.waiting_rows + len(submission.rows) > limits.max_waiting_rows
            or admission.waiting_rows_of(submission.job.client) + len(submission.rows) > limits.waiting_rows_per_client,
            ErrorKind.SESSION_BUSY: turn is not None and not turn.wait,
            ErrorKind.SESSION_NOT_FOUND: branches,
            ErrorKind.SESSION_UNUSABLE: world.faults.since(0.0, "read", "disk", "thread", "unload"),
            ErrorKind.ENGINE_LOST: world.faults.since(submission.at, "read", "disk", "thread"),
            ErrorKind.DRAINING: world.faults.since(submission.at, "restart"),
            ErrorKind.STATE_NOT_FOUND: self._is_missing(submission),
            ErrorKind.ADAPTER_NOT_FOUND: self._is_missing(submission) or world.faults.since(0.0, "unload"),
            ErrorKind.INVALID_FIELD: self._is_other(submission),
        }
        demand(fine.get(error.kind, False), f"{submission.job.job_id} was refused: {error}")
        if error.kind is ErrorKind.SESSION_NOT_FOUND:
            assert turn is not None and turn.branch_from is not None
            known = SessionKey(turn.session_id, turn.branch_from) in world.ledger.by_key
            demand(not known, f"{submission.job.job_id}: a dialogue that exists is not found")

    def _is_missing(self, submission: Submission) -> bool:
        own = self._world.own
        return own is not None and any(own.is_missing(request) for request, _ in submission.rows)

    def _is_other(self, submission: Submission) -> bool:
        """Return whether a turn names another initial state than its session's. Also true for too many members."""
        own, request = self._world.own, submission.rows[0][0]
        if own is None:
            return False
        maximum = self._world.pool.tiers.slots.num_usable // 2
        if any(len(one.mixture) > maximum for one, _ in submission.rows):
            return True
        if request.session is None:
            return False
        name, ledger = request.session.session_id, self._world.ledger
        return name in ledger.arrived or own.is_other(request, ledger.began_as(name))

    def check_finish(self, submission: Submission, row: int, finish: Finish) -> None:
        request, i = submission.rows[row]
        name = f"{submission.job.job_id} row {row}"
        demand(
            submission.tokens[row] == finish.completion_tokens, f"{name}: {submission.tokens[row]} tokens were reported"
        )
        self.check_part(submission, row, request, i)
        if finish.reason is FinishReason.TIMEOUT:
            limit = submission.job.timeout_s
            demand(limit is not None and self._world.tasks.now >= submission.at + limit, f"{name}: timed out too early")
        elif finish.reason is FinishReason.CANCELLED:
            demand(submission.cancelled, f"{name}: it was not cancelled")
        elif finish.reason is FinishReason.ERROR:
            self._counts["errors"] += 1
            assert finish.error is not None
            self.explain(submission, request, finish.error)
        else:
            self._check_whole(submission, row, request, i, finish)
        turn = self._world.ledger.turns.get(submission.sequences[row]) if request.session is not None else None
        if turn is not None and finish.reason is FinishReason.TIMEOUT:
            demand(not turn.reported or not turn.kept, f"{name}: a kept turn is reported as timed out")

    def _answer(self, submission: Submission, row: int, request: GenerateRequest, i: int) -> Answer | None:
        """Return the answer of an uninterrupted row; None if the row never began."""
        if request.session is None:
            return predict(History(prompt_of(request, i), self._world.beginning(request)), request, i)
        sequence = submission.sequences[row]
        turn = self._world.ledger.turns.get(sequence)
        if turn is not None:
            return turn.answer
        before = self._world.before.get(sequence)
        if before is None:
            return None
        return predict(before + (request.session.resume_prompt if before else request.prompt), request)

    def check_part(self, submission: Submission, row: int, request: GenerateRequest, i: int) -> None:
        """Check that a row's answer starts with its text so far."""
        answer = self._answer(submission, row, request, i)
        text = submission.texts.get(row, b"")
        right = not text if answer is None else answer.raw.startswith(text)
        demand(right, f"{submission.job.job_id} row {row}: {text!r} is no prefix of {answer}")
        reported, scores = submission.scores.get(row, []), predict_scores(request, i, self._world.beginning(request))
        demand(
            reported == scores[: len(reported)],
            f"{submission.job.job_id} row {row}: scores {reported} are no beginning of {scores}",
        )

    def _check_whole(self, submission: Submission, row: int, request: GenerateRequest, i: int, finish: Finish) -> None:
        answer, name = self._answer(submission, row, request, i), f"{submission.job.job_id} row {row}"
        assert answer is not None
        said = (finish.reason, submission.texts[row], finish.completion_tokens)
        expected = (answer.reason, answer.text, len(answer.sampled))
        demand(said == expected, f"{name}: {said}, not {expected}")
        missing = len(predict_scores(request, i, self._world.beginning(request))) - len(submission.scores.get(row, []))
        demand(not missing, f"{name}: {missing} of its scores are missing")
        if request.session is None:
            demand(finish.prompt_tokens == len(prompt_of(request, i)), f"{name}: {finish.prompt_tokens} prompt tokens")
            demand(request.use_prefix_cache or not finish.cached_tokens, f"{name}: it began from a cached state")
            return
        self._counts["turns"] += 1
        turn = self._world.ledger.turns[submission.sequences[row]]
        demand(turn.reported and turn.kept, f"{name}: an acknowledged turn is not kept")
        prompt = request.session.resume_prompt if turn.before else request.prompt
        reported = (finish.prompt_tokens, finish.cached_tokens + submission.replayed)
        demand(
            reported == (len(turn.before) + len(prompt), len(turn.before)),
            f"{name}: {reported} tokens of the prompt, and tokens of the session, cached or charged",
        )
        if request.session.branch_from is not None:
            demand(finish.dialogue_idx == turn.session.key.dialogue, f"{name}: dialogue {finish.dialogue_idx}")

    def explain(self, submission: Submission, request: GenerateRequest, error: ErrorInfo) -> None:
        faults, turn = self._world.faults, request.session
        fine = {
            ErrorKind.INTERNAL: faults.since(submission.at, "step", "memory", "restart")
            or (turn is not None and faults.since(submission.at - RETRY_S, "disk", "thread", "read")),
            ErrorKind.OVERLOADED: faults.since(submission.at, "memory"),
            ErrorKind.SESSION_NOT_FOUND: turn is not None and self._deleted_since(submission.at, turn.session_id),
            ErrorKind.SESSION_UNUSABLE: turn is not None and faults.since(0.0, "read", "thread", "disk", "unload"),
            ErrorKind.ENGINE_LOST: turn is not None
            and (
                faults.since(submission.at, "read", "thread", "disk")
                or ("could not be read" in error.message and self._shares_failed_read(submission.at, turn.session_id))
            ),
            ErrorKind.ADAPTER_NOT_FOUND: turn is not None and faults.since(0.0, "unload"),
            ErrorKind.INVALID_FIELD: turn is not None and self._is_other(submission),
            ErrorKind.DRAINING: faults.since(submission.at, "restart"),
        }
        demand(fine.get(error.kind, False), f"{submission.job.job_id} failed without a reason: {error}")

    def _shares_failed_read(self, at: float, name: str) -> bool:
        """Return whether a turn waited for a failed read of its session.

        The turn was sent at `at`. The read had met a fault before.
        """
        began, ended = self._world.failed_reads.get(name, (0.0, -1.0))
        return ended >= at and self._world.faults.since(began, "read", "thread")

    def _deleted_since(self, at: float, name: str) -> bool:
        return any(
            when >= at - 1.0 and (name.startswith(doomed) if prefix else name == doomed)
            for when, doomed, prefix in self.deletes
        )
