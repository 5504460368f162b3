"""An HTTP worker's view of an engine's load. Meanwhile, other workers send jobs to the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.fleet.member import Member
from rwkv_batch.ipc.held_ledger import Arrivals
from rwkv_batch.ipc.server import EngineServer, Peer
from rwkv_batch.ipc.wire import Arrived, EventBatch, Submit
from rwkv_batch.request import Job, JobEvents, Load
from test.fleet.fake_clients import engine_info
from test.harness import make_request
from test.serving import wait_for


class BusyEngine:
    """An engine whose thread handles nothing before `end_step`."""

    def __init__(self) -> None:
        self.waiting: list[Any] = []
        self.load = Load(0, 0)

    def on_delivered(self, callback: Any) -> None: ...

    def cancel(self, job_id: str) -> None: ...

    def submit(self, job: Job, sink: Any, admitted: Any) -> None:
        self.waiting.append((job, admitted))

    def end_step(self, refusal: ServiceError | None = None) -> None:
        for job, admitted in self.waiting:
            if refusal is None:
                self.load = Load(self.load.rows + job.num_rows, self.load.prompt_tokens)
            admitted(refusal)
        self.waiting.clear()


@pytest.fixture
def engine() -> BusyEngine:
    return BusyEngine()


@pytest.fixture
def two_workers(engine: BusyEngine, tmp_path: Path) -> Iterator[list[Member]]:
    """The engine as seen by two HTTP workers."""
    address = str(tmp_path / "engine")
    EngineServer(engine).listen(address)  # type: ignore[arg-type]  # as far as it is used here
    with contextlib.ExitStack() as stack:
        members = [Member(engine_info(address), lambda _, is_connected: None) for _ in range(2)]
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


def wait_for_reports(member: Member) -> None:
    """Wait until the engine has reported each of this worker's jobs."""
    wait_for(lambda: not member.num_unanswered, 30, "they have come")


def test_a_worker_sees_jobs_of_others_during_a_step(engine: BusyEngine, two_workers: list[Member]) -> None:
    one, other = two_workers
    give(one, *(f"one-{number}" for number in range(20)))
    wait_for(lambda: len(engine.waiting) == 20, 30, "they have come")
    give(other, "other")
    wait_for_reports(other)
    assert other.load == other.report.rows == 21, "all jobs are counted"
    wait_for(lambda: len(engine.waiting) == 21, 30, "the engine has that one too; its server reports it before")
    engine.end_step()
    assert engine.load.rows == 21
    give(other, "another")
    wait_for_reports(other)
    assert other.load == other.report.rows == 22, "no job is counted twice"


def test_refused_jobs_do_not_count(engine: BusyEngine, two_workers: list[Member]) -> None:
    one, other = two_workers
    give(one, "one", "two")
    wait_for(lambda: len(engine.waiting) == 2, 30, "they have come")
    engine.end_step(ServiceError(ErrorKind.OVERLOADED, "the queue is full"))
    give(other, "three")
    wait_for_reports(other)
    assert other.load == other.report.rows == 1, "only admitted jobs are counted"


def test_a_job_admitted_while_the_load_is_read_is_counted() -> None:
    job = Job(job_id="job", rows=[make_request("")])

    def engine_load() -> Load:
        arrivals.remove(job)  # from here on, the engine counts it
        return Load(0, 0)

    arrivals = Arrivals(engine_load)
    arrivals.add(job)
    assert arrivals.load.rows == 1


class FakeLink:
    """A worker's end. It records messages and runs a callback when the first events are sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.meanwhile: Any = None

    def send(self, message: Any) -> None:
        self.sent.append(message)
        if isinstance(message, EventBatch) and self.meanwhile is not None:
            self.meanwhile()


def test_loads_sent_after_an_arrival_include_it(engine: BusyEngine) -> None:
    server, any_engine = EngineServer(engine), cast(Any, engine)  # type: ignore[arg-type]  # as above
    links = [FakeLink(), FakeLink()]
    one, other = (
        Peer(cast(Any, link), any_engine, server._arrivals, server._metrics, server._ledger) for link in links
    )
    for peer in (one, other):
        peer._deliver(JobEvents(job_id="earlier", deltas=[]))
    links[0].meanwhile = lambda: other._handle(Submit(Job(job_id="late", rows=[make_request("")])), cast(Any, None))
    server._peers = cast(Any, [one, other])  # in this order
    server._flush_events()
    arrived, later = links[1].sent
    assert isinstance(arrived, Arrived) and isinstance(later, EventBatch)
    assert arrived.load.rows == later.load.rows == 1
