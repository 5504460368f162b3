"""Engines that are played by hand, and a fleet of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rwkv_batch.errors import ErrorInfo, ErrorKind, ServiceError
from rwkv_batch.fleet import member
from rwkv_batch.fleet.fleet import Fleet, FleetLimits
from rwkv_batch.ipc.served_model import ModelSpec, ModelStatus, ServedModel
from rwkv_batch.ipc.wire import UsageReport
from rwkv_batch.request import Delta, Finish, FinishReason, Job, JobEvents, Load
from test.harness import RunningJob, make_request

LOST = ErrorInfo(kind=ErrorKind.ENGINE_LOST, message="lost")


class Played:
    """An engine's client, as far as a fleet sees it."""

    def __init__(self, address: str, on_change: Callable[[bool], None], on_load: Callable[[Load], None]) -> None:
        self.name = address
        self.on_change, self.on_load = on_change, on_load
        self.is_connected = self.is_shutting_down = False
        self.num_received = 0
        self.jobs: list[tuple[Job, Any]] = []
        self.cancelled: list[str] = []
        self.refuses: ErrorInfo | None = None
        self.reason = LOST
        self.was_dropped = False
        self.asked: list[Any] = []
        self.spent: list[UsageReport] = []
        self.limit: ErrorInfo | None = None

    def start(self, name: str) -> None:
        """Nothing: tests connect it."""

    def stop(self) -> None:
        self.connect(False)

    def drop(self) -> None:
        self.was_dropped = True
        self.lose()

    def connect(self, is_connected: bool = True) -> None:
        self.is_connected = is_connected
        self.on_change(is_connected)

    def submit(self, job: Job, sink: Any, admitted: Any) -> None:
        if self.refuses is not None:
            admitted(ServiceError.from_info(self.refuses))
            return
        self.jobs.append((job, sink))
        admitted(None)

    def call(self, call: Any, reply: Any) -> None:
        self.asked.append(call)
        reply(True if self.limit is None else ServiceError.from_info(self.limit))

    def report_usage(self, spent: UsageReport) -> None:
        self.spent.append(spent)

    def cancel(self, job_id: str) -> None:
        self.cancelled.append(job_id)

    def says(self, text: bytes, ids: list[int], *, ends: bool = False, job: int = -1) -> None:
        """Tell of its latest job's row."""
        finish = Finish(reason=FinishReason.LENGTH, prompt_tokens=1, completion_tokens=1) if ends else None
        spec, sink = self.jobs[job]
        sink(JobEvents(job_id=spec.job_id, deltas=[Delta(0, text, len(ids), finish, token_ids=ids)], done=ends))

    def lose(self, error: ErrorInfo = LOST) -> None:
        """It is gone, and its jobs with it."""
        self.connect(False)
        jobs, self.jobs = self.jobs, []
        for job, sink in jobs:
            sink(JobEvents(job_id=job.job_id, deltas=[], done=True, error=error))


Made = tuple[Fleet, list[Played]]


def play(monkeypatch: pytest.MonkeyPatch, role: type[Played]) -> None:
    """Have engines played, each under its address."""
    monkeypatch.setattr(member, "dial", lambda address: address)
    monkeypatch.setattr(member, "EngineClient", role)


def made(limits: FleetLimits, count: int = 2, on_change: Callable[[bool], None] = lambda is_connected: None) -> Made:
    fleet = Fleet(limits, on_change)
    fleet.update([told(f"engine-{number}") for number in range(count)])
    engines: list[Any] = [one.client for one in fleet.members]
    for engine in engines:
        engine.connect()
    return fleet, engines


def told(name: str, status: ModelStatus = ModelStatus.READY) -> ServedModel:
    return ServedModel(spec=ModelSpec(name="m", file=""), status=status, address=name, since=0, engine=name)


def submit(fleet: Fleet, row: Any = None) -> RunningJob:
    running = RunningJob(Job(job_id="job", rows=[row or make_request("Once", chunk_size=1)]))
    fleet.submit(running.job, running.sink, running.admitted)
    return running


def having(engines: list[Played]) -> Played:
    """The one that has the job."""
    (found,) = [engine for engine in engines if engine.jobs]
    return found
