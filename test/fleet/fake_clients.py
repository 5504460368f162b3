"""Fake engine clients that tests control, and a fleet of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rwkv_batch.errors import ErrorInfo, ErrorKind, ServiceError
from rwkv_batch.fleet import member
from rwkv_batch.fleet.fleet import Fleet
from rwkv_batch.fleet.routing import FleetLimits
from rwkv_batch.ipc.quotas import Balance
from rwkv_batch.ipc.served_model import ModelSpec, ModelStatus, ServedModel
from rwkv_batch.ipc.wire import ReleaseQuotas, RestoreQuotas, UsageReport
from rwkv_batch.request import Delta, Finish, FinishReason, Job, JobEvents, Load
from test.harness import RunningJob, make_request

LOST = ErrorInfo(kind=ErrorKind.ENGINE_LOST, message="lost")


class FakeClient:
    """An engine's client, as a fleet sees it."""

    def __init__(self, address: str, on_change: Callable[[bool], None], on_load: Callable[[Load], None]) -> None:
        self.name = address
        self.on_change, self.on_load = on_change, on_load
        self.is_connected = self.is_shutting_down = False
        self.num_received = 0
        self.jobs: list[tuple[Job, Any]] = []
        self.cancelled: list[str] = []
        self.confirmed: list[str] = []
        self.refusal_info: ErrorInfo | None = None
        self.reason = LOST
        self.was_dropped = False
        self.received_calls: list[Any] = []
        self.usage_reports: list[UsageReport | RestoreQuotas | ReleaseQuotas] = []
        self.engine_started = 0.0
        self.balances: list[Balance] = []
        self.limit: ErrorInfo | None = None

    def start(self, name: str) -> None:
        """Do nothing: tests connect it."""

    def stop(self) -> None:
        self.connect(False)

    def drop(self) -> None:
        self.was_dropped = True
        self.lose()

    def connect(self, is_connected: bool = True) -> None:
        self.is_connected = is_connected
        self.on_change(is_connected)

    def submit(self, job: Job, sink: Any, on_admitted: Any) -> None:
        if self.refusal_info is not None:
            on_admitted(ServiceError.from_info(self.refusal_info))
            return
        self.jobs.append((job, sink))
        on_admitted(None)

    def call(self, call: Any, reply: Any) -> None:
        self.received_calls.append(call)
        reply(True if self.limit is None else ServiceError.from_info(self.limit))

    def report_usage(self, *usage_reports: UsageReport | RestoreQuotas | ReleaseQuotas) -> None:
        self.usage_reports.extend(usage_reports)

    def cancel(self, job_id: str) -> None:
        self.cancelled.append(job_id)

    def confirm_turn(self, job_id: str) -> None:
        self.confirmed.append(job_id)

    def send_text(self, text: bytes, ids: list[int], *, ends: bool = False) -> None:
        """Send text of the row of its latest job."""
        finish = Finish(reason=FinishReason.LENGTH, prompt_tokens=1, completion_tokens=1) if ends else None
        spec, sink = self.jobs[-1]
        sink(JobEvents(job_id=spec.job_id, deltas=[Delta(0, text, len(ids), finish, token_ids=ids)], done=ends))

    def lose(self, error: ErrorInfo = LOST) -> None:
        self.connect(False)
        jobs, self.jobs = self.jobs, []
        for job, sink in jobs:
            sink(JobEvents(job_id=job.job_id, deltas=[], done=True, error=error))


FakeFleet = tuple[Fleet, list[FakeClient]]


def use_fake_clients(monkeypatch: pytest.MonkeyPatch, client_class: type[FakeClient]) -> None:
    """Replace the clients of members, each under its address."""
    monkeypatch.setattr(member, "dial", lambda address: address)
    monkeypatch.setattr(member, "EngineClient", client_class)


def make_fleet(
    limits: FleetLimits, count: int = 2, on_change: Callable[[bool], None] = lambda is_connected: None
) -> FakeFleet:
    fleet = Fleet(limits, on_change)
    fleet.update([engine_info(f"engine-{number}") for number in range(count)])
    engines: list[Any] = [one.client for one in fleet.members]
    for engine in engines:
        engine.connect()
    return fleet, engines


def engine_info(name: str, status: ModelStatus = ModelStatus.READY) -> ServedModel:
    return ServedModel(spec=ModelSpec(name="m", file=""), status=status, address=name, since=0, engine=name)


def submit(fleet: Fleet, row: Any = None) -> RunningJob:
    running = RunningJob(Job(job_id="job", rows=[row or make_request("Once", chunk_size=1)]))
    fleet.submit(running.job, running.sink, running.on_admitted)
    return running


def client_with_job(engines: list[FakeClient]) -> FakeClient:
    (found,) = [engine for engine in engines if engine.jobs]
    return found
