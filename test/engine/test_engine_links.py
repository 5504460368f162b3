"""A lost link: waiting callbacks get one error, running jobs are cancelled, nothing is kept."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from msgspec import Raw
from msgspec.msgpack import encode
from msgspec.structs import replace

from rwkv_batch.calls import AcquireQuota, GetStatus
from rwkv_batch.errors import MAY_BE_KEPT, ErrorInfo, ErrorKind, ServiceError
from rwkv_batch.ipc.client import EngineClient
from rwkv_batch.ipc.quotas import Balance
from rwkv_batch.ipc.server import EngineServer
from rwkv_batch.ipc.wire import (
    Admitted,
    Answer,
    Arrived,
    Call,
    Cancel,
    EventBatch,
    FrameTooLong,
    Heartbeat,
    Hello,
    LinkFull,
    NotSent,
    Observe,
    SocketLink,
    Submit,
    UsageReport,
    to_engine_decoder,
    to_worker_decoder,
)
from rwkv_batch.request import ClientLimits, Delta, Job, JobEvents, Load, SessionTurn, Usage
from test.harness import make_request
from test.serving import wait_for

HERE = Heartbeat(Load(0, 0))
FULL = ErrorInfo(kind=ErrorKind.OVERLOADED, message="the queue is full")


class Scripted:
    """A link that delivers a test's messages, then is lost."""

    num_pieces = 0
    before_wait: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, messages: Iterable[Any], refusal: NotSent | None = None) -> None:
        self._messages = messages
        self._failure: Exception | None = None
        self._refusal = refusal
        self.sent: list[Any] = []

    def send(self, *messages: Any) -> None:
        self.sent.extend(messages)

    def offer(self, message: Any, max_bytes: int | None = None) -> None:
        if self._refusal is not None:
            raise self._refusal
        self.sent.append(message)

    def receive(self) -> Iterator[Any]:
        try:
            for message in self._messages:
                yield message
                self.before_wait()
        except Exception as failure:  # both ends survive it; the test must not
            self._failure = failure
            raise

    def check(self) -> None:
        """Raise the script's error."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None: ...


def job(name: str, **fields: Any) -> Job:
    return Job(job_id=name, rows=[make_request([1], **fields)])


def num_jobs(client: EngineClient) -> int:
    """Return the jobs that wait for events."""
    return len(client._waiting.listeners)


class Worker:
    """An engine's client with everything that it received."""

    def __init__(self) -> None:
        self.changes: list[bool] = []
        self.received: list[JobEvents] = []
        self.admitted: list[ServiceError | None] = []
        self.answers: list[Any] = []
        self.client = EngineClient(lambda: None, self.changes.append)

    def submit(self, asked: Job) -> None:
        self.client.submit(asked, self.received.append, self.admitted.append)

    def serve(self, messages: Iterable[Any], refusal: NotSent | None = None) -> None:
        """Serve one connection, from its first message to its loss."""
        link = Scripted(messages, refusal)
        self.client._serve(link)
        link.check()


def test_each_waiting_callback_gets_one_error_when_the_engine_is_lost() -> None:
    worker = Worker()

    def messages() -> Iterator[Any]:
        yield HERE
        assert worker.client.is_connected
        worker.submit(job("running"))
        worker.submit(job("a turn", session=SessionTurn(session_id="s", resume_prompt=[1])))
        for name in ("running", "a turn"):
            yield Admitted(name, None)
        worker.submit(job("not admitted"))
        worker.submit(job("a turn not admitted", session=SessionTurn(session_id="t", resume_prompt=[1])))
        worker.client.call(GetStatus(), worker.answers.append)

    worker.serve(messages())
    assert not worker.client.is_connected
    assert worker.changes == [True, False]
    errors = {events.job_id: events.error for events in worker.received}
    assert set(errors) == {"running", "a turn"}
    assert all(
        events.done and events.error and events.error.kind is ErrorKind.ENGINE_LOST for events in worker.received
    )
    kept = {name: MAY_BE_KEPT in error.message for name, error in errors.items() if error is not None}
    assert kept == {"running": False, "a turn": True}
    assert [error and error.info.kind for error in worker.admitted] == [None, None, *[ErrorKind.ENGINE_LOST] * 2]
    assert [MAY_BE_KEPT in str(error) for error in worker.admitted[2:]] == [False, True]
    assert [answer.info.kind for answer in worker.answers] == [ErrorKind.ENGINE_LOST]
    worker.serve([HERE])
    assert worker.changes == [True, False] * 2
    assert (len(worker.received), len(worker.admitted), len(worker.answers)) == (2, 4, 1)


@pytest.mark.parametrize("bad", ["listener", "admission", "call"])
def test_a_callback_that_raises_does_not_stop_the_others(bad: str) -> None:
    """Nor does it end the client's thread: the client connects to the next engine."""
    worker = Worker()

    def fault(*_: Any) -> None:
        raise ValueError("a fault of one waiter")

    def messages() -> Iterator[Any]:
        yield HERE
        for name in ("first", "second"):
            raises = name == "first"
            worker.client.submit(
                job(f"{name} running"),
                fault if raises and bad == "listener" else worker.received.append,
                lambda error: None,
            )
            yield Admitted(f"{name} running", None)
            worker.client.submit(
                job(f"{name} waiting"),
                worker.received.append,
                fault if raises and bad == "admission" else worker.admitted.append,
            )
            worker.client.call(GetStatus(), fault if raises and bad == "call" else worker.answers.append)

    worker.serve(messages())
    assert [len(received) for received in (worker.received, worker.admitted, worker.answers)] == [
        2 - (bad == "listener"),
        2 - (bad == "admission"),
        2 - (bad == "call"),
    ]
    worker.serve([HERE])
    assert worker.changes == [True, False] * 2


def test_refused_and_ended_jobs_are_removed() -> None:
    worker = Worker()

    def messages() -> Iterator[Any]:
        yield HERE
        worker.submit(job("refused"))
        assert num_jobs(worker.client) == 1
        yield Admitted("refused", FULL)
        assert num_jobs(worker.client) == 0
        worker.submit(job("ended"))
        yield Admitted("ended", None)
        yield EventBatch([JobEvents(job_id="ended", deltas=[], done=True)], Load(0, 0))
        assert num_jobs(worker.client) == 0

    worker.serve(messages())
    assert [error and error.info for error in worker.admitted] == [FULL, None]
    assert [events.error for events in worker.received] == [None]


@pytest.mark.parametrize(
    ("refusal", "kind", "retry_s", "message"),
    [
        (LinkFull(9), ErrorKind.OVERLOADED, 1.0, "9 bytes wait for the other process, .*; retry in 1 s"),
        (FrameTooLong(9, 8), ErrorKind.BODY_TOO_LARGE, None, "has 9 bytes, the limit is 8; send less at once"),
    ],
)
def test_what_cannot_be_sent_is_refused_once(
    refusal: NotSent, kind: ErrorKind, retry_s: float | None, message: str
) -> None:
    worker = Worker()

    def messages() -> Iterator[Any]:
        yield HERE
        worker.submit(job("large"))
        worker.client.call(GetStatus(), worker.answers.append)
        assert num_jobs(worker.client) == 0

    worker.serve(messages(), refusal)
    assert worker.received == []
    for [error] in (worker.admitted, worker.answers):
        assert error is not None and (error.info.kind, error.info.retry_after_s) == (kind, retry_s)
        assert re.search(f"^the request cannot be sent to the engine: .*{message}$", error.info.message)


def test_the_error_says_that_the_service_shuts_down() -> None:
    worker = Worker()

    def messages() -> Iterator[Any]:
        yield HERE
        worker.submit(job("row"))
        worker.submit(job("turn", session=SessionTurn(session_id="s", resume_prompt=[1])))
        worker.client.is_shutting_down = True

    worker.serve(messages())
    assert [error and error.info.kind for error in worker.admitted] == [ErrorKind.DRAINING] * 2
    assert [MAY_BE_KEPT in str(error) for error in worker.admitted] == [False, True]
    worker.submit(job("late"))
    late = worker.admitted[-1]
    assert late is not None and (late.info.kind, late.info.retry_after_s) == (ErrorKind.DRAINING, 5.0)


def test_loads_and_the_engines_start_are_reported() -> None:
    loads: list[tuple[Load, str | None]] = []
    client = EngineClient(lambda: None, on_load=lambda load, job_id: loads.append((load, job_id)))
    known = [Balance("key", ClientLimits(), 1.0, 2.0)]
    seen: list[Any] = []

    def messages() -> Iterator[Any]:
        yield Heartbeat(Load(1, 2), 7.0, known)
        seen.append((client.engine_started, client.balances))
        yield Arrived("job", Load(3, 4))
        yield EventBatch([JobEvents(job_id="unknown", deltas=[])], Load(5, 6))

    client._serve(Scripted(messages()))
    assert loads == [(Load(1, 2), None), (Load(3, 4), "job"), (Load(5, 6), None)]
    assert seen == [(7.0, known)] and client.balances == [], "a lost engine has no ledger"


def test_without_an_engine_requests_are_refused_with_the_reason() -> None:
    worker = Worker()
    worker.submit(job("early"))
    worker.client.call(GetStatus(), worker.answers.append)
    worker.client.cancel("early")
    worker.client.observe(Observe("/r", 200, 0.1, 0.0))
    for [error] in (worker.admitted, worker.answers):
        assert error is not None and error.info == worker.client.reason
    assert (worker.client.reason.kind, worker.client.reason.retry_after_s) == (ErrorKind.ENGINE_LOST, 2.0)
    assert worker.client.reason.message == "the engine is still loading the model; retry in 2 s"
    assert (num_jobs(worker.client), worker.client.num_received, worker.client.is_connected) == (0, 0, False)
    worker.serve([HERE])
    expected = "the engine process was lost and is being restarted; send the request again"
    assert (worker.client.reason.message, worker.client.reason.retry_after_s) == (expected, 2.0)


def test_messages_to_the_engine() -> None:
    worker, link = Worker(), Scripted([])
    report, observed = UsageReport("a", 5), Observe("/r", 200, 0.1, 0.0)
    seen: list[int] = []

    def messages() -> Iterator[Any]:
        yield HERE
        link.num_pieces = 4
        seen.append(worker.client.num_received)
        worker.submit(job("a"))
        worker.client.call(GetStatus(), worker.answers.append)
        worker.client.call(GetStatus(), worker.answers.append)
        worker.client.cancel("a")
        worker.client.observe(observed)
        worker.client.report_usage()
        worker.client.report_usage(report, report)
        yield Answer(1, Raw(encode({"second": 1})), None)
        yield Answer(0, Raw(encode(3)), None)

    link._messages = messages()
    worker.client._name = "http-0"
    worker.client._serve(link)  # type: ignore[arg-type]
    link.check()
    assert seen == [4] and worker.client.num_received == 0
    assert link.sent == [
        Hello("http-0", os.getpid()),
        Submit(job("a")),
        Call(0, GetStatus()),
        Call(1, GetStatus()),
        Cancel("a"),
        observed,
        report,
        report,
    ]
    assert worker.answers[0] == {"second": 1}
    wrong = worker.answers[1].info
    assert wrong.kind is ErrorKind.INTERNAL
    assert wrong.message.startswith("the engine's answer to a call cannot be decoded: Expected `object`, got `int`")


def test_a_client_that_stops_or_drops_closes_its_link() -> None:
    for end in ("drop", "stop"):
        worker, closed = Worker(), []
        link = Scripted([])
        link.close = lambda closed=closed: closed.append(1)  # type: ignore[method-assign]

        def messages(worker: Worker = worker, end: str = end, closed: list[int] = closed) -> Iterator[Any]:
            if end == "stop":
                worker.client.stop()
            yield HERE
            assert len(closed) == (end == "stop"), "not before its first message"
            getattr(worker.client, end)()
            assert len(closed) == 1 + (end == "stop")

        link._messages = messages()
        worker.client._serve(link)  # type: ignore[arg-type]
        link.check()


def test_an_engine_that_cannot_be_reached_is_tried_again() -> None:
    attempts: list[int] = []
    reached = threading.Event()

    def connect() -> Any:
        attempts.append(1)
        if len(attempts) == 1:
            raise OSError("no route")
        if len(attempts) == 2:
            return None
        reached.set()
        return Scripted([HERE])

    changes: list[bool] = []
    client = EngineClient(connect, changes.append)
    client.start("http-0")
    assert reached.wait(60)
    wait_for(lambda: changes[:2] == [True, False], 60, "it connected and lost the link")
    client.stop()
    client._thread.join(60)
    assert not client._thread.is_alive()


class Engine:
    """Admits every job and keeps its sink."""

    load = Load(0, 0)

    def __init__(self) -> None:
        self.sinks: dict[str, Any] = {}
        self.cancelled: list[str] = []

    def on_delivered(self, callback: Any) -> None: ...

    def submit(self, asked: Job, sink: Any, admitted: Any) -> None:
        self.sinks[asked.job_id] = sink
        admitted(None)

    def cancel(self, job_id: str) -> None:
        self.cancelled.append(job_id)


def test_a_lost_worker_leaves_nothing_behind() -> None:
    engine = Engine()
    server = EngineServer(engine)  # type: ignore[arg-type]

    def workers() -> list[tuple[str, int]]:
        return [(one["name"], one["jobs"]) for one in server._with_processes({})["processes"]["http_workers"]]

    def messages() -> Iterator[Any]:
        yield Hello("http-0", 7)
        for name in ("ended", "running"):
            yield Submit(job(name))
        assert workers() == [("http-0", 2)]
        engine.sinks["ended"](JobEvents(job_id="ended", deltas=[], done=True))
        assert workers() == [("http-0", 1)]

    link = Scripted(messages())
    server.serve(link)
    link.check()
    assert engine.cancelled == ["running"]
    assert workers() == []


def test_a_jobs_arrival_is_reported_with_a_load_that_includes_it() -> None:
    """Jobs that arrive together are reported together, and admitted together."""

    class Later(Engine):
        def __init__(self) -> None:
            super().__init__()
            self.waiting: list[Any] = []

        def submit(self, asked: Job, sink: Any, admitted: Any) -> None:
            self.waiting.append(admitted)

    engine, frames = Later(), []

    class Counted(Scripted):
        def send(self, *messages: Any) -> None:
            frames.append([message for message in messages if isinstance(message, Arrived | Admitted)])

        def receive(self) -> Iterator[Any]:
            yield from self._messages
            self.before_wait()
            for admitted in engine.waiting:
                admitted(None)
            server._flush_events()

    server = EngineServer(engine)  # type: ignore[arg-type]
    server.serve(Counted([Submit(job("a")), Submit(job("b"))]))
    together = [Arrived("a", Load(2, 2)), Arrived("b", Load(2, 2))]
    assert [frame for frame in frames if frame] == [together, [Admitted("a", None), Admitted("b", None)]]


def test_jobs_of_a_lost_worker_no_longer_count_against_its_keys() -> None:
    server = EngineServer(Engine())  # type: ignore[arg-type]
    answers = []
    for name in ("a", "b"):
        usage = Usage(name, "key", ClientLimits(rows=1), 1, 0)
        link = Scripted([Call(1, AcquireQuota(usage)), Call(2, AcquireQuota(replace(usage, job_id=f"{name}2")))])
        server.serve(link)
        answers.append([message.error and message.error.kind for message in link.sent if isinstance(message, Answer)])
    assert answers == [[None, ErrorKind.OVERLOADED]] * 2


@pytest.mark.parametrize("reads", [True, False])
def test_an_ending_process_waits_until_its_events_are_read(reads: bool) -> None:
    """The end of a long answer exceeds a socket's buffer. A worker that does not read does not block the end."""
    engine = Engine()
    server = EngineServer(engine)  # type: ignore[arg-type]
    ours, theirs = socket.socketpair()
    worker: Any = SocketLink(theirs, to_worker_decoder, "worker")
    serving = threading.Thread(target=server.serve, args=(SocketLink(ours, to_engine_decoder, "engine"),), daemon=True)
    serving.start()
    worker.send(Hello("http-0", 7), Submit(job("long")))
    wait_for(lambda: "long" in engine.sinks, 60, "the job has come")
    text = b"x" * (8 << 20)
    engine.sinks["long"](JobEvents(job_id="long", deltas=[Delta(0, text, 1)], done=True))
    server._flush_events()
    (peer,) = server._peers
    assert not peer.is_flushed
    if reads:
        ends = threading.Thread(target=server.finish, args=(3600,))
        ends.start()
        received = list(_until_batch(worker))
        assert isinstance(received[-1], EventBatch) and received[-1].events[0].deltas[0].text == text
        ends.join(60)
        assert not ends.is_alive() and peer.is_flushed
    else:
        server.finish(0.01)
        assert not peer.is_flushed
    worker.close()
    serving.join(60)


def _until_batch(link: Any) -> Iterator[Any]:
    with contextlib.closing(link.receive()) as messages:
        for message in messages:
            assert isinstance(message, Heartbeat | Arrived | Admitted | EventBatch)
            yield message
            if isinstance(message, EventBatch):
                return
