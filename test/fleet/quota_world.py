"""A world of HTTP workers, engines and the limits' ledger. One seed drives it.

Fleets, clients, the engines' ends of the links and the ledger are real. Engines give tokens without a model. Messages
arrive one by one, in the order of each link and in any order over all of them.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import pytest

from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.fleet import fleet, member
from rwkv_batch.fleet.fleet import Fleet
from rwkv_batch.fleet.routing import FleetLimits
from rwkv_batch.ipc import held_ledger
from rwkv_batch.ipc.served_model import ModelStatus
from rwkv_batch.ipc.server import EngineServer, Peer
from rwkv_batch.ipc.wire import to_engine_decoder, to_worker_decoder
from rwkv_batch.request import ClientLimits, Delta, Finish, FinishReason, Job, JobEvents, Load, original_id
from test.fleet.fake_clients import engine_info
from test.harness import make_request

ROWS, TOKENS = 6, 200
LIMITS = ClientLimits(rows=ROWS, tokens_per_minute=TOKENS)
"""The clock stands still, so a minute's tokens are all there are."""
FULL = ServiceError(ErrorKind.OVERLOADED, "the queue is full", retry_after_s=1)


@dataclass
class Request:
    """A client's request and what it received."""

    job: Job
    answer: ServiceError | bool | None = None
    tokens: int = 0
    done: bool = False

    @property
    def cost(self) -> int:
        """What its key pays: the prompt and all tokens, if it was admitted."""
        return self.job.rows[0].num_prompt_tokens * len(self.job.rows) + self.tokens if self.answer is True else 0

    def on_admitted(self, refusal: ServiceError | None) -> None:
        assert self.answer is None, "answered twice"
        self.answer, self.done = refusal or True, refusal is not None

    def sink(self, events: JobEvents) -> None:
        assert not self.done and events.error is None and not events.num_replayed
        self.tokens += events.num_sampled
        self.done = events.done


class End:
    """One end of a link: what it sends arrives at the other end later."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        self.sent: deque[Any] = deque()
        self._decoder = decoder

    def send(self, *messages: Any) -> None:
        self.sent.extend(self._decoder.decode(msgspec.msgpack.encode(messages)))

    def offer(self, message: Any, max_bytes: int | None = None) -> None:
        self.send(message)

    def receive(self) -> Iterator[Any]:
        """Nothing comes any more: the link is closed."""
        return iter(())

    def close(self) -> None: ...


class FakeEngine:
    """Gives each job a token per step. One that is full refuses jobs."""

    def __init__(self) -> None:
        self.jobs: dict[str, tuple[Job, Any, int]] = {}
        self.is_full = False
        self.replayed_tokens = 0
        """tokens of its session that each job reads again before its first token"""
        self.load = Load(0, 0)

    def on_delivered(self, callback: Any) -> None: ...

    def submit(self, job: Job, sink: Any, on_admitted: Any) -> None:
        if self.is_full and not job.was_admitted:
            on_admitted(FULL)
            return
        on_admitted(None)
        left = job.rows[0].max_tokens - sum(len(row.resumed.token_ids) for row in job.rows if row.resumed)
        self.jobs[job.job_id] = job, sink, left
        if self.replayed_tokens:
            begins = Delta(0, b"", 0, session_history=(9, 9), replayed_tokens=self.replayed_tokens)
            sink(JobEvents(job_id=job.job_id, deltas=[begins]))

    def confirm_turn(self, job_id: str) -> None: ...

    def cancel(self, job_id: str) -> None:
        if job_id in self.jobs:
            self._send(job_id, 0, ends=True)

    def step(self) -> None:
        for job_id, (_, _, left) in list(self.jobs.items()):
            self._send(job_id, min(1, left), ends=left <= 1)

    def _send(self, job_id: str, tokens: int, ends: bool) -> None:
        job, sink, left = self.jobs.pop(job_id)
        if not ends:
            self.jobs[job_id] = job, sink, left - tokens
        finish = Finish(reason=FinishReason.LENGTH, prompt_tokens=1, completion_tokens=1) if ends else None
        deltas = [Delta(0, b"x" * tokens, tokens, finish, token_ids=[1] * tokens)]
        deltas += [Delta(row, b"", 0, finish) for row in range(1, job.num_rows) if ends]
        sink(JobEvents(job_id=job_id, deltas=deltas, done=ends))


@dataclass
class Engine:
    number: int
    started: float
    fake: FakeEngine = field(default_factory=FakeEngine)
    peers: dict[int, tuple[Peer, End, End]] = field(default_factory=dict)
    """by worker: the engine's side, its end of the link, and the worker's"""

    def __post_init__(self) -> None:
        self.server = EngineServer(cast(Any, self.fake))
        self.server._ledger._quotas.clock = lambda: 0.0

    def connect(self, worker: int) -> None:
        ours, theirs = End(to_worker_decoder), End(to_engine_decoder)
        server = self.server
        peer = Peer(cast(Any, ours), cast(Any, self.fake), server._arrivals, server._metrics, server._ledger)
        self.peers[worker] = peer, ours, theirs
        self.heartbeat()

    def heartbeat(self) -> None:
        for peer, _, _ in self.peers.values():
            peer.send_heartbeat(self.started, self.server._ledger.balances())

    def step(self) -> None:
        self.fake.step()
        for peer, _, _ in self.peers.values():
            peer.flush_events()


class World:
    """Two HTTP workers and engines that come and go."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch, num_engines: int = 2) -> None:
        monkeypatch.setattr(member, "dial", lambda address: lambda: None)
        for module in (member, fleet):
            monkeypatch.setattr(module, "CONNECT_TIMEOUT_S", 1e9)
        monkeypatch.setattr(held_ledger, "CONNECT_S", 0.0)
        monkeypatch.setattr(held_ledger, "TAKEOVER_S", 1e9)
        self.rng = random.Random(seed)
        self.now = 0.0
        self.requests: list[Request] = []
        self.workers: list[Fleet] = []
        names = [f"engine-{number}" for number in range(num_engines)]
        self.rng.shuffle(names)  # the first name is not always the first engine
        self.names = names
        for _ in range(2):
            worker = Fleet(FleetLimits(resubmit=99, wait_s=1e9))
            worker._rng = self.rng
            worker._was_connected = True
            worker.quotas._copy.clock = lambda: 0.0
            self.workers.append(worker)
        self.engines: dict[int, Engine] = {}
        self._known: dict[str, ModelStatus] = {}
        """engines in the list that the workers received"""

    # What happens ------------------------------------------------------------------------------------------------

    def start(self, number: int, *workers: int) -> None:
        """Start an engine and connect workers to it, by default all."""
        self.now += 1.0
        engine = self.engines[number] = Engine(number, self.now)
        self._announce(number, ModelStatus.READY)
        for worker in workers or range(len(self.workers)):
            engine.connect(worker)

    def connect_all(self) -> None:
        """Start the engines that do not run. Connect every worker to each engine."""
        for number in range(len(self.names)):
            if number not in self.engines:
                self.start(number)
            for worker in {0, 1} - set(self.engines[number].peers):
                self.engines[number].connect(worker)

    def act(self) -> None:
        """Do something at random, except to kill an engine."""
        rng, action = self.rng, self.rng.random()
        if action < 0.15 and self.spent() < TOKENS // 2:
            self.submit(rng.randrange(2), rows=rng.choice((1, 1, 2, 4)), max_tokens=rng.randint(1, 6))
        elif action < 0.6:
            self.deliver_one()
        elif action < 0.75:
            rng.choice(list(self.engines.values())).step()
        elif action < 0.85:
            self.poll(rng.randrange(2))
        elif action < 0.9:
            engine = rng.choice(list(self.engines.values()))
            engine.fake.is_full = rng.random() < 0.5
            engine.heartbeat()
        else:
            number, worker = rng.randrange(2), rng.randrange(2)
            if number not in self.engines:
                self.start(number, worker)
            elif worker not in self.engines[number].peers:
                self.engines[number].connect(worker)

    def kill(self, number: int) -> None:
        """End an engine's process. All workers notice."""
        engine = self.engines.pop(number)
        for worker in engine.peers:
            self.lose(worker, engine)
        self._announce(number, ModelStatus.LOADING)

    def lose(self, worker: int, engine: Engine) -> None:
        """A worker notices that its connection has ended."""
        client = self._client(worker, engine)
        if client.is_connected:
            client._report_engine_lost()

    def _announce(self, number: int, status: ModelStatus) -> None:
        self._known[self.names[number]] = status
        for worker in self.workers:
            worker.update([engine_info(*known) for known in self._known.items()])

    def submit(self, worker: int, rows: int = 1, max_tokens: int = 3, prompt: int = 2) -> Request:
        row = make_request([1] * prompt, max_tokens=max_tokens, chunk_size=1)
        job = Job(job_id=f"job{len(self.requests)}", rows=[row] * rows, client="key", limits=LIMITS)
        request = Request(job)
        self.requests.append(request)
        self.workers[worker].submit(job, request.sink, request.on_admitted)
        return request

    def poll(self, worker: int) -> None:
        self.workers[worker].quotas.poll()
        self.workers[worker]._dispatch_waiting()

    def deliver_one(self) -> bool:
        """Deliver the oldest message of a random link. Returns whether there was one."""
        links = [(worker, engine) for engine in self.engines.values() for worker in engine.peers]
        waiting = [(worker, engine, end) for worker, engine in links for end in engine.peers[worker][1:] if end.sent]
        if not waiting:
            return False
        worker, engine, end = self.rng.choice(waiting)
        peer, ours, theirs = engine.peers[worker]
        message = end.sent.popleft()
        if end is ours:
            self._client(worker, engine)._handle(cast(Any, theirs), message)
        else:
            peer._handle(message, lambda call, reply: None)
            peer.flush_answers()
        return True

    def _client(self, worker: int, engine: Engine) -> Any:
        return self.workers[worker]._members[self.names[engine.number]].client

    def settle(self) -> None:
        """Deliver everything, also the state of the ledger to all workers. Jobs stand still."""
        for _ in range(3):
            for engine in self.engines.values():
                engine.heartbeat()
            while self.deliver_one():
                pass
            for worker in range(len(self.workers)):
                self.poll(worker)

    def finish(self) -> None:
        """Run until every request has ended."""
        for _ in range(1000):
            self.settle()
            if all(request.done for request in self.requests):
                return
            for engine in self.engines.values():
                engine.fake.is_full = False
                engine.step()
        raise AssertionError("a request does not end")

    # What must hold ----------------------------------------------------------------------------------------------

    def running(self) -> Iterator[Job]:
        for engine in self.engines.values():
            for job, _, _ in engine.fake.jobs.values():
                yield job

    def check_rows(self) -> None:
        rows = sum({original_id(job.job_id): job.num_rows for job in self.running()}.values())
        assert rows <= ROWS, f"{rows} rows run"

    def spent(self) -> int:
        return sum(request.cost for request in self.requests)

    def remaining(self) -> int:
        """Return the tokens that the key may still use. They are found by using them up."""
        for engine in self.engines.values():
            engine.fake.is_full = False
        for used in range(TOKENS + 1):
            request = self.submit(self.rng.randrange(2), max_tokens=0, prompt=1)
            self.finish()
            if isinstance(request.answer, ServiceError):
                assert "tokens a minute" in request.answer.info.message
                return used
        raise AssertionError("the key has no limit")
