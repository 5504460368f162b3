"""Clients of a fleet's HTTP workers, and what they must receive."""

from __future__ import annotations

import random
import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rwkv_batch.calls import AddState, DeleteSessions
from rwkv_batch.errors import ErrorInfo, ErrorKind, ServiceError
from rwkv_batch.request import ClientLimits, FinishReason, GenerateRequest, Job, JobEvents, SessionTurn
from sampling.params import SamplingParams
from test.simulation.device import ALPHABET
from test.simulation.history import Beginning, History
from test.simulation.linear import DELETED, LinearSession
from test.simulation.oracle import predict
from test.simulation.processes import Worker
from test.simulation.violation import demand

if TYPE_CHECKING:
    from test.simulation.fleet_world import FleetWorld

MAX_OPEN = 20
KEYS = 2
GONE = (ErrorKind.ENGINE_LOST, ErrorKind.DRAINING)
FAULT_S = 20.0
"""A fault explains errors for so long: jobs wait for an engine, and sessions for a lost one's turns."""


@dataclass(eq=False)
class Request:
    """A job and what its client received."""

    number: int
    job: Job
    worker: Worker
    at: float
    rows: list[tuple[GenerateRequest, int]]
    session: str = ""
    is_cancelled: bool = False
    is_admitted: bool | None = None
    is_done: bool = False
    texts: dict[int, bytes] = field(default_factory=dict)
    num_tokens: int = 0
    ended: set[int] = field(default_factory=set)

    @property
    def cost(self) -> int:
        """What its key pays."""
        usage = self.job.usage
        return 0 if usage is None or not self.is_admitted else usage.prompt_tokens + self.num_tokens

    @property
    def max_cost(self) -> int:
        usage = self.job.usage
        return 0 if usage is None else usage.prompt_tokens + sum(row.max_tokens for row, _ in self.rows)


class FleetClients:
    """Sends requests to the HTTP workers and judges the answers."""

    def __init__(self, world: FleetWorld, rng: random.Random) -> None:
        self.log: deque[str] = deque(maxlen=60)
        self.digest = 0
        self.counts = {"jobs": 0, "turns": 0, "errors": 0, "refused": 0, "states": 0}
        self.open: dict[int, Request] = {}
        self.requests: list[Request] = []
        """those of keys with limits"""
        self.sessions: dict[str, LinearSession] = {}
        self.states: dict[str, None] = {}
        """acknowledged tuned states"""
        self.open_calls: dict[int, Worker] = {}
        self._world = world
        self._rng = rng
        self._number = 0
        rows, tokens = rng.choice((3, 6)), rng.choice((60, 300))
        self.limits = ClientLimits(rows=rows, tokens_per_minute=tokens)

    def log_event(self, text: str) -> None:
        """Record a line for readers of a failure."""
        line = f"{self._world.tasks.now:8.3f} {text}"
        self.digest = zlib.crc32(line.encode(), self.digest)
        self.log.append(line)

    def describe(self) -> str:
        return f"jobs {[one.job.job_id for one in self.open.values()]}, calls {sorted(self.open_calls)}"

    # Requests ------------------------------------------------------------------------------------------------

    def act(self) -> None:
        rng = self._rng
        if self._world.has_unknown_engine and len(self.open) < MAX_OPEN:  # what keys use now must count for all engines
            for key in range(KEYS):
                self._rows(key)
        for _ in range(rng.choice((0, 0, 1, 2))):
            kind = rng.random()
            if len(self.open) >= MAX_OPEN:
                return
            if kind < 0.4:
                self._rows()
            elif kind < 0.75:
                self.turn(f"s{rng.randrange(6)}")
            elif kind < 0.80:
                self._delete(f"s{rng.randrange(6)}")
            elif kind < 0.86 and self.open:
                self._cancel(rng.choice(list(self.open.values())))
            elif kind < 0.97 and len(self.states) + len(self.open_calls) < 12:
                self._add_state()

    def _session(self, name: str) -> LinearSession:
        return self.sessions.setdefault(name, LinearSession())

    def _tokens(self, maximum: int) -> list[int]:
        return [self._rng.choice(ALPHABET) for _ in range(self._rng.randint(1, maximum))]

    def _request(self, **fields: Any) -> GenerateRequest:
        rng = self._rng
        return GenerateRequest(
            **{
                "prompt": self._tokens(12),
                "max_tokens": rng.choice((1, 5, 30)),
                "sampling": SamplingParams(seed=rng.randrange(1 << 64)),
                "stop_strings": rng.sample([b"ab", b"\n\n", b"aba"], rng.choice((0, 0, 1))),
                "ignore_eos": rng.random() < 0.5,
                "chunk_size": rng.choice((1, 4)),
                **fields,
            }
        )

    def _rows(self, key: int | None = None) -> None:
        rng = self._rng
        state = rng.choice(list(self.states)) if self.states and rng.random() < 0.5 else ""
        rows = [self._request(n=rng.choice((1, 1, 2)), state=state) for _ in range(rng.choice((1, 1, 2)))]
        key = rng.randrange(KEYS + 1) if key is None else key
        limits = self.limits if key < KEYS and sum(row.n for row in rows) <= (self.limits.rows or 0) else None
        self._submit(rows, client=f"key{key}", limits=limits, timeout_s=rng.choice((None, None, 0.5)))

    def turn(self, name: str, worker: Worker | None = None) -> None:
        session = self._session(name)
        if session.is_unclear:
            return
        turn = SessionTurn(session_id=name, resume_prompt=self._tokens(8))
        self._submit([self._request(session=turn)], session=name, worker=worker)

    def _submit(
        self, rows: list[GenerateRequest], session: str = "", worker: Worker | None = None, **fields: Any
    ) -> None:
        world = self._world
        self._number += 1
        self.counts["jobs"] += 1
        number, worker = self._number, worker or self._rng.choice(world.workers)
        job = Job(job_id=f"job{number}", rows=rows, **fields)
        numbered = [(request, i) for request in rows for i in range(request.num_rows)]
        request = self.open[number] = Request(number, job, worker, world.tasks.now, numbered, session)
        if job.limits is not None:
            self.requests.append(request)
        if session:
            self.sessions[session].begin(number, rows[0])
        self.log_event(f"{job.job_id} of {job.client!r} {session} to {worker.name}: {len(numbered)} rows")
        with world.acting_for(worker):
            worker.fleet.submit(
                job, lambda events: self._receive(request, events), lambda refusal: self._admitted(request, refusal)
            )

    def _cancel(self, request: Request) -> None:
        request.is_cancelled = True
        self.log_event(f"{request.job.job_id} is cancelled")
        with self._world.acting_for(request.worker):
            request.worker.fleet.cancel(request.job.job_id)

    def _call(self, worker: Worker, call: Any, answered: Any) -> None:
        self._number += 1
        number = self._number
        self.open_calls[number] = worker

        def reply(value: Any) -> None:
            if worker not in self._world.workers:
                return
            demand(number in self.open_calls, "a call was answered twice")
            del self.open_calls[number]
            self.log_event(f"{call}: {value}")
            answered(value)

        self.log_event(f"{call} to {worker.name}")
        with self._world.acting_for(worker):
            worker.fleet.call(call, reply)

    def _delete(self, name: str) -> None:
        session = self._session(name)
        if session.is_unclear:
            return
        number = self._number + 1
        session.begin(number, None)

        def answered(value: Any) -> None:
            if isinstance(value, ServiceError):
                self._explain(value.info, self._world.tasks.now)
                session.failed(number, may_be_kept=True)
            else:
                session.answered(number, DELETED)

        self._call(self._rng.choice(self._world.workers), DeleteSessions(name, False), answered)

    def _add_state(self) -> None:
        name = f"state{self._number}"
        self._world.numbers[name] = self._rng.getrandbits(120)

        def answered(value: Any) -> None:
            if not isinstance(value, ServiceError):
                self.states[name] = None
                self.counts["states"] += 1

        self._call(self._rng.choice(self._world.workers), AddState(name), answered)

    # Answers -------------------------------------------------------------------------------------------------

    def _admitted(self, request: Request, refusal: ServiceError | None) -> None:
        if request.number not in self.open:
            return
        demand(request.is_admitted is None, f"{request.job.job_id} was admitted twice")
        request.is_admitted = refusal is None
        if refusal is not None:
            self.counts["refused"] += 1
            self._failed(request, refusal.info, may_be_kept=refusal.info.kind in (*GONE, ErrorKind.CANCELLED))

    def _receive(self, request: Request, events: JobEvents) -> None:
        if request.number not in self.open:
            demand(not request.is_done, f"{request.job.job_id}: events after its end")
            return
        demand(request.is_admitted, f"{request.job.job_id}: events before its admission")
        last = None
        for delta in events.deltas:
            demand(delta.row not in request.ended, f"{request.job.job_id} row {delta.row}: events after its finish")
            text = request.texts[delta.row] = request.texts.get(delta.row, b"") + delta.text
            request.num_tokens += delta.num_tokens
            last = delta.finish
            if not request.session:
                self._check_row(request, delta.row, text, last)
            if last is not None:
                request.ended.add(delta.row)
        if events.error is not None:
            self._failed(request, events.error, may_be_kept=True)
        elif events.done:
            demand(len(request.ended) == len(request.rows), f"{request.job.job_id} is done without all its rows")
            self._done(request)
            if request.session:
                self._turn_ended(request, last)

    def _check_row(self, request: Request, row: int, text: bytes, finish: Any) -> None:
        """Check that a row's text follows from its prompt and seed. It does not matter which engines ran it."""
        spec, i = request.rows[row]
        began = Beginning((self._world.numbers[spec.state] if spec.state else 0,))
        answer = predict(History(spec.prompt, began), spec, i)
        name = f"{request.job.job_id} row {row}"
        demand(answer.raw.startswith(text), f"{name}: {text!r} is no prefix of {answer}")
        if finish is None:
            return
        if finish.error is not None:
            self._explain(finish.error, request.at)
        elif finish.reason in (FinishReason.STOP, FinishReason.LENGTH):
            said = (finish.reason, text, finish.completion_tokens)
            demand(said == (answer.reason, answer.text, len(answer.sampled)), f"{name}: {said}, not {answer}")
        elif finish.reason is FinishReason.CANCELLED:
            demand(request.is_cancelled, f"{name}: it was not cancelled")
        else:
            limit = request.job.timeout_s
            demand(limit is not None and self._world.tasks.now >= request.at + limit, f"{name} ends too early")

    def _turn_ended(self, request: Request, finish: Any) -> None:
        session = self.sessions[request.session]
        self.log_event(f"{request.job.job_id} {request.session}: {finish.reason} {request.texts.get(0)!r}")
        if finish.error is None and finish.reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.counts["turns"] += 1
            session.answered(request.number, (request.texts[0], finish.prompt_tokens))
            return
        if finish.error is not None:
            self._explain(finish.error, request.at, request.session)
        session.failed(request.number, may_be_kept=True)

    def _done(self, request: Request) -> None:
        request.is_done = True
        del self.open[request.number]

    def _failed(self, request: Request, error: ErrorInfo, may_be_kept: bool) -> None:
        self.counts["errors"] += 1
        self.log_event(f"{request.job.job_id} failed: {error.kind} {error.message}")
        self._done(request)
        if request.session:
            self.sessions[request.session].failed(request.number, may_be_kept)
        if "tokens a minute" in error.message:
            maximum = sum(one.max_cost for one in self.requests if one.job.client == request.job.client)
            used = maximum - request.max_cost
            if self._world.counts["kills"]:  # the ledger's holder was lost: counts on their way are sent again
                used += sum(
                    one.job.usage.prompt_tokens
                    for one in self.requests
                    if one.job.client == request.job.client and one.job.usage is not None
                )
            demand(used >= (self.limits.tokens_per_minute or 0), f"{request.job.client} is refused after {used} tokens")
        elif not (error.kind is ErrorKind.CANCELLED and request.is_cancelled):
            self._explain(error, request.at, request.session)

    def _explain(self, error: ErrorInfo, at: float, session: str = "") -> None:
        had_fault = self._world.last_fault >= at - FAULT_S
        has_delete = any(request is None for request in self.sessions[session].requests.values()) if session else False
        fine = {
            ErrorKind.OVERLOADED: True,
            ErrorKind.ENGINE_LOST: had_fault,
            ErrorKind.DRAINING: had_fault,
            ErrorKind.INTERNAL: had_fault,
            ErrorKind.SESSION_NOT_FOUND: has_delete,
            ErrorKind.SESSION_UNUSABLE: has_delete,
            ErrorKind.SESSION_BUSY: had_fault or has_delete,
        }
        demand(fine.get(error.kind, False), f"a request failed without a reason: {error}")

    def lost(self, worker: Worker) -> None:
        """A worker was killed: its clients see their connections closed."""
        self.open_calls = {number: one for number, one in self.open_calls.items() if one is not worker}
        for request in [one for one in self.open.values() if one.worker is worker]:
            del self.open[request.number]
            if request.session:
                self.sessions[request.session].failed(request.number, may_be_kept=True)
