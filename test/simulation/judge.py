"""Whether what a world's clients are told is right: each answer, refusal and failure, by what the world knows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rwkv_batch.core.sequence import Sequence
from rwkv_batch.errors import ErrorInfo, ErrorKind
from rwkv_batch.request import Finish, FinishReason, GenerateRequest, Job
from state_pool.sessions import SessionKey
from test.simulation.history import History
from test.simulation.oracle import Answer, predict, predict_scores, prompt_of
from test.simulation.violation import demand

if TYPE_CHECKING:
    from test.simulation.world import World

RETRY_S = 3.0
"""A delete that the disk refused is tried again so soon; until then its name cannot be used again."""


@dataclass(eq=False)
class Asked:
    """A job and what came back so far."""

    job: Job
    at: float
    rows: list[tuple[GenerateRequest, int]]
    """per row: its request and which continuation of it"""
    admitted: bool | None = None
    sequences: dict[int, Sequence] = field(default_factory=dict)
    texts: dict[int, bytes] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    scores: dict[int, list[float]] = field(default_factory=dict)
    finishes: dict[int, Finish] = field(default_factory=dict)
    cancelled: bool = False
    done: bool = False


class Judge:
    """Raises Violation for what is wrong."""

    def __init__(self, world: World, counts: dict[str, int]) -> None:
        """`counts`: in which turns and errors are counted."""
        self._world = world
        self._counts = counts
        self.deletes: list[tuple[float, str, bool]] = []
        """that clients have asked for: when, the name, and whether of all that begin with it"""

    def check_call_error(self, error: ErrorInfo, at: float, name: str, importing: bool = False) -> None:
        """A call about a session that was made then has failed: for a reason?"""
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

    def check_refusal(self, asked: Asked, error: ErrorInfo) -> None:
        """The engine did not take a job: for a reason?"""
        world, turn = self._world, asked.rows[0][0].session
        branches = turn is not None and turn.branch_from not in (None, 0)
        admission, limits = world.engine.scheduler.admission, world.engine.scheduler.limits
        fine = {
            ErrorKind.OVERLOADED: admission.waiting_rows + len(asked.rows) > limits.max_waiting_rows
            or admission.waiting_rows_of(asked.job.client) + len(asked.rows) > limits.waiting_rows_per_client,
            ErrorKind.SESSION_BUSY: turn is not None and not turn.wait,
            ErrorKind.SESSION_NOT_FOUND: branches,
            ErrorKind.SESSION_UNUSABLE: world.faults.since(0.0, "read", "disk", "thread", "unload"),
            ErrorKind.ENGINE_LOST: world.faults.since(asked.at, "read", "disk", "thread"),
            ErrorKind.DRAINING: world.faults.since(asked.at, "restart"),
            ErrorKind.STATE_NOT_FOUND: self._is_missing(asked),
            ErrorKind.ADAPTER_NOT_FOUND: self._is_missing(asked) or world.faults.since(0.0, "unload"),
            ErrorKind.INVALID_FIELD: self._is_other(asked),
        }
        demand(fine.get(error.kind, False), f"{asked.job.job_id} was refused: {error}")
        if error.kind is ErrorKind.SESSION_NOT_FOUND:
            assert turn is not None and turn.branch_from is not None
            known = SessionKey(turn.session_id, turn.branch_from) in world.ledger.by_key
            demand(not known, f"{asked.job.job_id}: a dialogue that exists is not found")

    def _is_missing(self, asked: Asked) -> bool:
        own = self._world.own
        return own is not None and any(own.is_missing(request) for request, _ in asked.rows)

    def _is_other(self, asked: Asked) -> bool:
        """Whether a turn names what its session did not begin from, or a mixture has too many members."""
        own, request = self._world.own, asked.rows[0][0]
        if own is None:
            return False
        most = self._world.pool.num_slots // 2
        if any(len(one.mixture) > most for one, _ in asked.rows):
            return True
        if request.session is None:
            return False
        name, ledger = request.session.session_id, self._world.ledger
        return name in ledger.arrived or own.is_other(request, ledger.began_as(name))

    def check_finish(self, asked: Asked, row: int, finish: Finish) -> None:
        """A row has ended: as it may, and with all that it was to say?"""
        request, i = asked.rows[row]
        name = f"{asked.job.job_id} row {row}"
        demand(asked.tokens[row] == finish.completion_tokens, f"{name}: {asked.tokens[row]} tokens were told")
        self.check_part(asked, row, request, i)
        if finish.reason is FinishReason.TIMEOUT:
            limit = asked.job.timeout_s
            demand(limit is not None and self._world.tasks.now >= asked.at + limit, f"{name}: timed out too early")
        elif finish.reason is FinishReason.CANCELLED:
            demand(asked.cancelled, f"{name}: nobody has cancelled it")
        elif finish.reason is FinishReason.ERROR:
            self._counts["errors"] += 1
            assert finish.error is not None
            self.explain(asked, request, finish.error)
        else:
            self._check_whole(asked, row, request, i, finish)
        turn = self._world.ledger.turns.get(asked.sequences[row]) if request.session is not None else None
        if turn is not None and finish.reason is FinishReason.TIMEOUT:
            demand(not turn.told or not turn.kept, f"{name}: a turn that was kept is told as timed out")

    def _answer(self, asked: Asked, row: int, request: GenerateRequest, i: int) -> Answer | None:
        """What an uninterrupted row would say; None: it never began, so nothing is known of what came before."""
        if request.session is None:
            return predict(History(prompt_of(request, i), self._world.beginning(request)), request, i)
        sequence = asked.sequences[row]
        turn = self._world.ledger.turns.get(sequence)
        if turn is not None:
            return turn.answer
        before = self._world.before.get(sequence)
        if before is None:
            return None
        return predict(before + (request.session.resume_prompt if before else request.prompt), request)

    def check_part(self, asked: Asked, row: int, request: GenerateRequest, i: int) -> None:
        """What a row has said by now is what it would say first."""
        answer = self._answer(asked, row, request, i)
        text = asked.texts.get(row, b"")
        right = not text if answer is None else answer.raw.startswith(text)
        demand(right, f"{asked.job.job_id} row {row}: {text!r} is no beginning of {answer}")
        told, scores = asked.scores.get(row, []), predict_scores(request, i, self._world.beginning(request))
        demand(told == scores[: len(told)], f"{asked.job.job_id} row {row}: scores {told} are no beginning of {scores}")

    def _check_whole(self, asked: Asked, row: int, request: GenerateRequest, i: int, finish: Finish) -> None:
        answer, name = self._answer(asked, row, request, i), f"{asked.job.job_id} row {row}"
        assert answer is not None
        said = (finish.reason, asked.texts[row], finish.completion_tokens)
        wanted = (answer.reason, answer.text, len(answer.drawn))
        demand(said == wanted, f"{name}: {said}, not {wanted}")
        missing = len(predict_scores(request, i, self._world.beginning(request))) - len(asked.scores.get(row, []))
        demand(not missing, f"{name}: {missing} of its scores are missing")
        if request.session is None:
            demand(finish.prompt_tokens == len(prompt_of(request, i)), f"{name}: {finish.prompt_tokens} prompt tokens")
            demand(request.use_prefix_cache or not finish.cached_tokens, f"{name}: it began from a cached state")
            return
        self._counts["turns"] += 1
        turn = self._world.ledger.turns[asked.sequences[row]]
        demand(turn.told and turn.kept, f"{name}: a turn was acknowledged that is not kept")
        prompt = request.session.resume_prompt if turn.before else request.prompt
        cached = len(turn.before) if request.mixture else finish.cached_tokens
        told = (finish.prompt_tokens, cached)
        demand(told == (len(turn.before) + len(prompt), len(turn.before)), f"{name}: {told} prompt and cached tokens")
        if request.session.branch_from is not None:
            demand(finish.dialogue_idx == turn.session.key.dialogue, f"{name}: dialogue {finish.dialogue_idx}")

    def explain(self, asked: Asked, request: GenerateRequest, error: ErrorInfo) -> None:
        """Every error has a reason that the world knows."""
        faults, turn = self._world.faults, request.session
        fine = {
            ErrorKind.INTERNAL: faults.since(asked.at, "step", "memory", "restart")
            or (turn is not None and faults.since(asked.at - RETRY_S, "disk", "thread", "read")),
            ErrorKind.OVERLOADED: faults.since(asked.at, "memory"),
            ErrorKind.SESSION_NOT_FOUND: turn is not None and self._deleted_since(asked.at, turn.session_id),
            ErrorKind.SESSION_UNUSABLE: turn is not None and faults.since(0.0, "read", "thread", "disk", "unload"),
            ErrorKind.ENGINE_LOST: turn is not None and faults.since(asked.at, "read", "thread", "disk"),
            ErrorKind.ADAPTER_NOT_FOUND: turn is not None and faults.since(0.0, "unload"),
            ErrorKind.INVALID_FIELD: turn is not None and self._is_other(asked),
            ErrorKind.DRAINING: faults.since(asked.at, "restart"),
        }
        demand(fine.get(error.kind, False), f"{asked.job.job_id} failed without a reason: {error}")

    def _deleted_since(self, at: float, name: str) -> bool:
        return any(
            when >= at - 1.0 and (name.startswith(doomed) if prefix else name == doomed)
            for when, doomed, prefix in self.deletes
        )
