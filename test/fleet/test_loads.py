"""What an HTTP worker knows of an engine's load when others give it work at the same moment."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.fleet.member import Member
from rwkv_batch.ipc.arrivals import Arrivals
from rwkv_batch.ipc.server import EngineServer, Peer
from rwkv_batch.ipc.wire import Arrived, EventBatch, Submit
from rwkv_batch.request import Job, JobEvents, Load
from test.fleet.fake_clients import told
from test.harness import make_request
from test.serving import wait_for


class InAStep:
    """An engine whose thread looks at nothing before `end_step`."""

    def __init__(self) -> None:
        self.waiting: list[Any] = []
        self.load = Load(0, 0)

    def on_delivered(self, callback: Any) -> None:
        """Nothing is delivered."""

    def cancel(self, job_id: str) -> None:
        """Its rows are nobody's."""

    def submit(self, job: Job, sink: Any, admitted: Any) -> None:
        self.waiting.append((job, admitted))

    def end_step(self, refusal: ServiceError | None = None) -> None:
        for job, admitted in self.waiting:
            if refusal is None:
                self.load = Load(self.load.rows + job.num_rows, self.load.prompt_tokens)
            admitted(refusal)
        self.waiting.clear()


@pytest.fixture
def engine() -> InAStep:
    return InAStep()


@pytest.fixture
def two_workers(engine: InAStep, tmp_path: Path) -> Iterator[list[Member]]:
    """The engine as two HTTP workers see it."""
    address = str(tmp_path / "engine")
    EngineServer(engine).listen(address)  # type: ignore[arg-type]  # as far as it is used here
    with contextlib.ExitStack() as stack:
        members = [Member(told(address), lambda _, is_connected: None) for _ in range(2)]
        for member in members:
            member.client.start("test")
            stack.callback(member.client.stop)
        wait_for(lambda: all(member.client.is_connected for member in members), 30, "both are connected")
        yield members


def give(member: Member, *job_ids: str) -> None:
    for job_id in job_ids:
        job = Job(job_id=job_id, rows=[make_request("")])
        member.on_sent(job)
        member.client.submit(job, lambda events: None, lambda refusal: None)


def wait_for_its_word(member: Member) -> None:
    """Until the engine has told of each job that this worker gave to it: what it tells then counts them."""
    wait_for(lambda: not member.num_unanswered, 30, "they have come")


def test_it_knows_what_others_gave_to_an_engine_in_the_midst_of_a_step(
    engine: InAStep, two_workers: list[Member]
) -> None:
    one, other = two_workers
    give(one, *(f"one-{number}" for number in range(20)))
    wait_for(lambda: len(engine.waiting) == 20, 30, "they have come")
    give(other, "other")
    wait_for_its_word(other)
    assert other.load == other.report.rows == 21, "all are counted"
    wait_for(lambda: len(engine.waiting) == 21, 30, "the engine has that one too, of which its server tells before")
    engine.end_step()
    assert engine.load.rows == 21
    give(other, "another")
    wait_for_its_word(other)
    assert other.load == other.report.rows == 22, "none is counted twice"


def test_what_an_engine_refuses_is_not_its_load(engine: InAStep, two_workers: list[Member]) -> None:
    one, other = two_workers
    give(one, "one", "two")
    wait_for(lambda: len(engine.waiting) == 2, 30, "they have come")
    engine.end_step(ServiceError(ErrorKind.OVERLOADED, "the queue is full"))
    give(other, "three")
    wait_for_its_word(other)
    assert other.load == other.report.rows == 1, "only what is there is counted"


def test_a_job_that_the_engine_takes_while_its_load_is_asked_for_is_counted() -> None:
    job = Job(job_id="job", rows=[make_request("")])

    class TakesIt:
        @property
        def load(self) -> Load:
            arrivals.remove(job)  # its own count has it from now on
            return Load(0, 0)

    arrivals = Arrivals(TakesIt())
    arrivals.add(job)
    assert arrivals.load.rows == 1


class PlayedLink:
    """A worker's end: what was sent to it, and something that happens as the first events are."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.meanwhile: Any = None

    def send(self, message: Any) -> None:
        self.sent.append(message)
        if isinstance(message, EventBatch) and self.meanwhile is not None:
            self.meanwhile()


def test_what_is_told_after_a_job_has_come_counts_it(engine: InAStep) -> None:
    server, any_engine = EngineServer(engine), cast(Any, engine)  # type: ignore[arg-type]  # as above
    links = [PlayedLink(), PlayedLink()]
    one, other = (
        Peer(cast(Any, link), any_engine, server._arrivals, server._metrics, server._quotas) for link in links
    )
    for peer in (one, other):
        peer._deliver(JobEvents(job_id="earlier", deltas=[]))
    links[0].meanwhile = lambda: other._handle(Submit(Job(job_id="late", rows=[make_request("")])), cast(Any, None))
    server._peers = cast(Any, [one, other])  # told in this order
    server._flush_events()
    arrived, told_later = links[1].sent
    assert isinstance(arrived, Arrived) and isinstance(told_later, EventBatch)
    assert arrived.load.rows == told_later.load.rows == 1
