"""Calls over the socket: each arrives unchanged, and its answer has the declared type."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from rwkv_batch import calls
from rwkv_batch.config import EngineConfig
from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.ipc import wire
from rwkv_batch.ipc.client import EngineClient, unix_connector
from rwkv_batch.ipc.server import EngineServer
from rwkv_batch.ipc.wire import UsageReport
from rwkv_batch.request import ClientLimits, Delta, Job, JobEvents, Usage
from state_pool.session_key import SessionEntry, SessionPage, Tier
from test.fake_engine import FakeEngine

WAIT_S = 60.0
PAGE = SessionPage(total=4, in_slots=1, in_host_memory=1, on_disk=2, sessions=[SessionEntry("s:2", Tier.HOST, 1.5, 2)])
ANSWERS: dict[str, tuple[Any, Any]] = {
    repr(call): (call, answer)
    for call, answer in [
        (calls.GetStatus(), {"running_rows": 0, "jobs": {"/v1": 2}}),
        (calls.GetMetrics(), 'rwkv_jobs{label="/v1"} 2.0'),
        (calls.ListRequests(), []),
        (calls.ListSessions(10, 0), PAGE),
        (calls.FindSession(("owner=anna/s", "s")), "s"),
        (calls.DeleteSessions("s", True), 3),
        (calls.ExportSession("s", 2), b"\xff\x00bytes"),
        (calls.ImportSession("s", b"\xff\x00bytes"), 7),
        (calls.ListAdapters(), [calls.AdapterInfo(name="a", digest="d", scale=2.0, rank=16)]),
        (calls.AddAdapter("a", "a.pth", 2.0), calls.AdapterInfo(name="a")),
        (calls.RemoveAdapter("a"), calls.AdapterInfo(name="a", error="gone")),
        (calls.ListStates(), [calls.StateInfo(name="s", digest="d", created=7, in_slot=True)]),
        (calls.AddState("s", content=b"\xff\x00bytes"), calls.StateInfo(name="s", orientation="key_value")),
        (calls.RemoveState("s"), calls.StateInfo(name="s", error="of another model")),
        (calls.CheckModel("/models/a.pth", ("/models/b.pth:2",)), "RWKV-7, 2 layers of 64"),
        (calls.CancelJobs("big_batch"), 1),
        (calls.CountJobs("big_batch"), 4),
        (calls.AcquireQuota(Usage("elsewhere", "key", ClientLimits(rows=9), 1, 3)), True),
    ]
}


class TableEngine(FakeEngine):
    """Answers calls from a table, and fails for others."""

    def call(self, call: Any, reply: Any) -> None:
        unknown = ServiceError(ErrorKind.SESSION_NOT_FOUND, "no such session", field="session_id")
        reply(ANSWERS.get(repr(call), (call, unknown))[1])

    def submit(self, job: Job, sink: Any, admitted: Any) -> None:
        admitted(None)
        sink(JobEvents(job_id=job.job_id, deltas=[Delta(0, bytes(30_000), 1)]))
        self._delivered()


@pytest.fixture
def client(tmp_path: Path) -> Iterator[EngineClient]:
    address = str(tmp_path / "engine.sock")
    EngineServer(TableEngine(EngineConfig(model_path=""))).listen(address)
    client = EngineClient(unix_connector(address))
    client.start("test")
    deadline = time.monotonic() + WAIT_S
    while not client.is_connected:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield client
    client.stop()


def ask(client: EngineClient, call: calls.EngineCall[Any]) -> Any:
    answers: queue.Queue[Any] = queue.Queue()
    client.call(call, answers.put)
    return answers.get(timeout=WAIT_S)


def test_every_call_is_listed_and_answered_in_its_type(client: EngineClient) -> None:
    assert {type(call) for call, _ in ANSWERS.values()} == set(get_args(calls.AnyCall))
    for call, expected in ANSWERS.values():
        answer = ask(client, call)
        assert msgspec.convert(answer, call.answer_type()) == answer
        if isinstance(call, calls.GetMetrics):
            assert expected in answer.splitlines()
        elif isinstance(call, calls.GetStatus):
            assert answer == {**expected, "processes": answer["processes"]}
        else:
            assert answer == expected


def test_a_clients_limits_are_held_for_jobs_that_other_engines_run(client: EngineClient) -> None:
    one = Usage("a", "few", ClientLimits(rows=1), 1, 3)
    other = msgspec.structs.replace(one, job_id="b")
    assert ask(client, calls.AcquireQuota(one)) is True
    refused = ask(client, calls.AcquireQuota(other))
    assert isinstance(refused, ServiceError) and refused.info.kind is ErrorKind.OVERLOADED
    client.report_usage(UsageReport("a", 5, done=True))
    assert ask(client, calls.AcquireQuota(other)) is True


def test_a_call_that_fails_is_answered_with_its_failure(client: EngineClient) -> None:
    failure = ask(client, calls.ExportSession("unknown"))
    assert isinstance(failure, ServiceError)
    assert (failure.info.kind, failure.info.field) == (ErrorKind.SESSION_NOT_FOUND, "session_id")


def test_an_answer_that_is_too_long_is_reported(client: EngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    long = calls.ExportSession("long")
    monkeypatch.setitem(ANSWERS, repr(long), (long, bytes(3000)))
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 2000)
    failure = ask(client, calls.ExportSession("long"))
    assert isinstance(failure, ServiceError)
    assert failure.info.kind is ErrorKind.BODY_TOO_LARGE
    assert ask(client, calls.ExportSession("s", 2)) == ANSWERS[repr(calls.ExportSession("s", 2))][1], (
        "the link stays open"
    )


def test_a_call_that_is_too_long_is_reported(client: EngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 2000)
    failure = ask(client, calls.ImportSession("s", bytes(3000)))
    assert isinstance(failure, ServiceError)
    assert failure.info.kind is ErrorKind.BODY_TOO_LARGE
    assert not client._waiting.calls
    assert ask(client, calls.ExportSession("s", 2)) == ANSWERS[repr(calls.ExportSession("s", 2))][1], (
        "the link stays open"
    )


def test_events_that_are_too_long_end_their_job(client: EngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 20_000)
    events: queue.Queue[Any] = queue.Queue()
    client.submit(Job(job_id="j", rows=[]), events.put, lambda refusal: None)
    last = events.get(timeout=WAIT_S)
    assert (last.done, last.error.kind) == (True, ErrorKind.INTERNAL)
    assert "the limit is 20000" in last.error.message
    assert ask(client, calls.CountJobs("big_batch")) == 4, "the link stays open"
