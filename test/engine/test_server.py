"""The engine's end of its links: status, metrics, refused answers, and the supervisor's commands."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from typing import Any

import msgspec
import pytest

from rwkv_batch.calls import GetMetrics, GetStatus
from rwkv_batch.config import EngineConfig
from rwkv_batch.errors import ErrorInfo, ErrorKind, ServiceError, StartupError
from rwkv_batch.ipc import server
from rwkv_batch.ipc.held_ledger import Arrivals
from rwkv_batch.ipc.quotas import CountedJob
from rwkv_batch.ipc.server import BATCHES, EngineMonitor, EngineServer, started_engine
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
    Observe,
    RestoreQuotas,
    Submit,
)
from rwkv_batch.request import ClientLimits, Delta, Job, JobEvents, Load, Usage
from test.engine.test_engine_links import Scripted, job
from test.harness import make_request
from test.serving import wait_for

FULL = ServiceError(ErrorKind.OVERLOADED, "the queue is full")


class Engine:
    """Answers calls with a status. Admits jobs when the test says so."""

    def __init__(self, status: Any = None) -> None:
        self.load = Load(2, 30)
        self.status = {"running_rows": 3, "jobs": {}} if status is None else status
        self.asked: list[Any] = []
        self.admitted: dict[str, Callable[[ServiceError | None], None]] = {}
        self.sinks: dict[str, Callable[[JobEvents], None]] = {}
        self.cancelled: list[str] = []
        self.is_alive, self.loop_count = True, None
        self.seen: list[str] = []

    def on_delivered(self, callback: Callable[[], None]) -> None:
        self.deliver = callback

    def submit(self, asked: Job, sink: Any, admitted: Any) -> None:
        self.sinks[asked.job_id], self.admitted[asked.job_id] = sink, admitted

    def cancel(self, job_id: str) -> None:
        self.cancelled.append(job_id)

    def call(self, call: Any, reply: Callable[[Any], None]) -> None:
        self.asked.append(call)
        reply(self.status)

    def drain(self, timeout_s: float) -> None:
        self.seen.append(f"drains {timeout_s:g} s")

    def stop(self) -> None:
        self.seen.append("stops")


def serve(engine: Engine, messages: Any, **options: Any) -> list[Any]:
    link = Scripted(messages, **options)
    EngineServer(engine).serve(link)  # type: ignore[arg-type]
    link.check()
    return link.sent


def answers(sent: list[Any]) -> list[Any]:
    return [message.error or msgspec.msgpack.decode(message.value) for message in sent if isinstance(message, Answer)]


def test_the_status_names_the_processes() -> None:
    engine = Engine()
    made = EngineServer(engine)  # type: ignore[arg-type]

    def messages() -> Iterator[Any]:
        yield Call(1, GetStatus())  # before its Hello, a worker is not listed
        yield Hello("http-1", 7)
        yield Submit(job("a"))
        made.serve(Scripted([Hello(BATCHES, 9), Call(2, GetStatus())]))  # type: ignore[arg-type]
        yield Call(3, GetStatus())

    link = Scripted(messages())
    made.serve(link)  # type: ignore[arg-type]
    link.check()
    first, last = answers(link.sent)
    assert first["running_rows"] == 3
    assert first["processes"]["engine"]["pid"] == os.getpid() and 0 <= first["processes"]["engine"]["up_s"] < 60
    assert (first["processes"]["http_workers"], first["processes"]["batches"]) == ([], None)
    (worker,) = last["processes"]["http_workers"]
    assert (worker["name"], worker["pid"], worker["jobs"]) == ("http-1", 7, 1) and 0 <= worker["connected_s"] < 60
    assert last["processes"]["batches"] is None


def test_the_batch_process_is_listed_by_itself() -> None:
    made = EngineServer(Engine())  # type: ignore[arg-type]
    seen: list[Any] = []

    def inner() -> Iterator[Any]:
        yield Hello(BATCHES, 9)
        seen.append(made._with_processes({"a": 1}))

    def outer() -> Iterator[Any]:
        yield Hello("http-0", 7)
        link = Scripted(inner())
        made.serve(link)  # type: ignore[arg-type]
        link.check()

    link = Scripted(outer())
    made.serve(link)  # type: ignore[arg-type]
    link.check()
    (status,) = seen
    processes = status["processes"]
    assert status["a"] == 1 and [one["name"] for one in processes["http_workers"]] == ["http-0"]
    assert (processes["batches"]["name"], processes["batches"]["pid"]) == (BATCHES, 9)


def test_restored_jobs_end_with_their_connection() -> None:
    made = EngineServer(Engine())  # type: ignore[arg-type]
    usage = Usage("a", "key", ClientLimits(rows=1), 1, 10)
    seen: list[int] = []

    def messages() -> Iterator[Any]:
        yield RestoreQuotas([], [CountedJob(usage)])
        seen.append(len(made._ledger._owners))

    made.serve(Scripted(messages()))  # type: ignore[arg-type]
    assert seen == [1] and not made._ledger._owners
    assert made._ledger.acquire(msgspec.structs.replace(usage, job_id="b"), "other") is None


def test_metrics_are_rendered_where_they_are_counted() -> None:
    engine = Engine()
    text, other = answers(serve(engine, [Observe("/r", 200, 0.1, 0.0), Call(1, GetMetrics()), Call(2, GetStatus())]))
    assert 'rwkv_http_requests_total{route="/r",status="200"} 1.0' in text and "rwkv_running_rows 3.0" in text
    assert engine.asked == [GetStatus(), GetStatus()] and other["running_rows"] == 3
    failed = serve(Engine(FULL), [Call(1, GetMetrics()), Call(2, GetStatus())])
    assert answers(failed) == [FULL.info] * 2, "a failure is passed on"


@pytest.mark.parametrize(
    ("refusal", "kind"), [(LinkFull(9), ErrorKind.OVERLOADED), (FrameTooLong(9, 8), ErrorKind.BODY_TOO_LARGE)]
)
def test_an_answer_that_cannot_be_sent_is_an_error(refusal: Any, kind: ErrorKind) -> None:
    (error,) = answers(serve(Engine(), [Call(1, GetStatus())], refusal=refusal))
    assert error.kind is kind and error.message == f"the answer cannot be sent: {refusal}"


def test_a_jobs_way_from_arrival_to_its_end() -> None:
    engine = Engine()
    made = EngineServer(engine)  # type: ignore[arg-type]
    events = JobEvents(job_id="a", deltas=[Delta(0, b"x", 1)])

    def messages() -> Iterator[Any]:
        yield Submit(job("a"))
        yield Submit(job("refused"))
        engine.admitted["a"](None)
        engine.admitted["refused"](FULL)
        engine.sinks["a"](events)
        engine.deliver()
        engine.deliver()  # nothing new
        yield Cancel("a")

    link = Scripted(messages())
    made.serve(link)  # type: ignore[arg-type]
    link.check()
    first, *sent = link.sent
    assert isinstance(first, Heartbeat) and first.load == Load(2, 30) and 0 < first.started <= time.time()
    assert sent == [
        Arrived("a", Load(3, 31)),
        Arrived("refused", Load(4, 32)),
        Admitted("a", None),
        Admitted("refused", FULL.info),
        EventBatch([events], Load(2, 30)),
    ]
    assert engine.cancelled == ["a", "a"], "at its request, and after it has left"


def test_an_answer_of_a_job_that_is_too_long_ends_the_job() -> None:
    engine = Engine()
    made = EngineServer(engine)  # type: ignore[arg-type]

    class Narrow(Scripted):
        def send(self, *sent: Any) -> None:
            if any(isinstance(message, EventBatch) and message.events[0].deltas for message in sent):
                raise FrameTooLong(9, 8)
            super().send(*sent)

    def messages() -> Iterator[Any]:
        yield Submit(job("a"))
        engine.sinks["a"](JobEvents(job_id="a", deltas=[Delta(0, b"x", 1)], done=True))
        engine.deliver()

    link = Narrow(messages())
    made.serve(link)  # type: ignore[arg-type]
    link.check()
    message = "the answer cannot be sent: a message between processes has 9 bytes, the limit is 8; request less at once"
    info = ErrorInfo(kind=ErrorKind.INTERNAL, message=message)
    assert link.sent[-1] == EventBatch([JobEvents(job_id="a", deltas=[], done=True, error=info)])
    assert engine.cancelled == ["a"]


def test_an_invalid_message_ends_the_connection_and_not_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    class Torn(Scripted):
        closed = 0

        def receive(self) -> Iterator[Any]:
            yield Hello("http-3", 7)
            raise msgspec.DecodeError("torn")

        def close(self) -> None:
            self.closed += 1

    link = Torn([])
    EngineServer(Engine()).serve(link)  # type: ignore[arg-type]
    assert link.closed == 1 and "the connection of HTTP worker http-3 failed; closing it" in caplog.text


def test_workers_get_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.wire, "HEARTBEAT_S", 0.01)

    def messages() -> Iterator[Any]:
        wait_for(lambda: sum(isinstance(message, Heartbeat) for message in link.sent) >= 3, 10, "heartbeats")
        yield from ()

    link = Scripted(messages())
    EngineServer(Engine()).serve(link)  # type: ignore[arg-type]
    link.check()
    assert all(message.balances == [] for message in link.sent if isinstance(message, Heartbeat))


def test_arrivals_count_until_they_are_admitted() -> None:
    arrivals = Arrivals(lambda: Load(1, 10))
    two = Job(job_id="two", rows=[make_request([1, 2], n=3), make_request([1])])
    arrivals.add(two)
    arrivals.add(job("one"))
    assert arrivals.load == Load(1 + 4 + 1, 10 + 3 + 1)
    arrivals.remove(two)
    assert arrivals.load == Load(2, 11)


# The process --------------------------------------------------------------------------------------------------------


def test_the_supervisor_drains_the_engine() -> None:
    engine, (ours, theirs) = Engine(), Pipe()
    config = EngineConfig(model_path="", drain_timeout_s=7)
    follows = threading.Thread(target=server._follow_supervisor, args=(engine, config, theirs), daemon=True)
    follows.start()
    ours.send("drain")
    assert ours.poll(60) and ours.recv() == ("drained", None)
    assert engine.seen == ["drains 7 s", "stops"] and follows.is_alive(), "it ends when it may"
    ours.send("end")
    follows.join(60)
    assert not follows.is_alive()


def test_the_engine_is_watched_between_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread may die or hang at any time."""
    engine, (ours, theirs) = Engine(), Pipe()
    died = threading.Event()

    def die(reason: str, *arguments: object) -> None:
        died.set()
        raise EOFError(reason)

    monkeypatch.setattr(server, "_die", die)
    engine.is_alive = False
    with pytest.raises(EOFError, match="the engine's thread has died; ending the process"):
        server._follow_supervisor(engine, EngineConfig(model_path=""), theirs)  # type: ignore[arg-type]
    assert died.is_set()
    ours.close()
    engine.is_alive = True
    with pytest.raises(EOFError):
        server._follow_supervisor(engine, EngineConfig(model_path=""), theirs)  # type: ignore[arg-type]


def test_a_hanging_loop_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, reasons, made = Engine(), [], []

    class Hangs:
        def __init__(self, *arguments: Any) -> None:
            made.append(arguments)

        def hangs(self, loop_count: int | None) -> bool:
            return loop_count == 5

    monkeypatch.setattr(server, "Watchdog", Hangs)
    monkeypatch.setattr(server, "_die", lambda *reason: reasons.append(reason))
    monkeypatch.setattr(server.faulthandler, "dump_traceback", lambda: reasons.append("stacks"))
    monitor = EngineMonitor(engine, EngineConfig(model_path="", step_timeout_s=0.5))  # type: ignore[arg-type]
    monitor()
    assert (made, reasons) == ([(0.5, time.monotonic, server.MONITOR_INTERVAL_S)], [])
    engine.loop_count = 5  # type: ignore[assignment]
    monitor()
    assert reasons == ["stacks", ("the engine's loop has hung for %g s (step_timeout_s); ending the process", 0.5)]


HINT = "; --verbose shows the traceback"


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("no.module:Engine", "the engine did not start: ModuleNotFoundError: No module named 'no'" + HINT),
        (f"{__name__}:Refused", "the model file is damaged"),
        (f"{__name__}:Empty", "MemoryError"),
        (f"{__name__}:Broken", "the engine did not start: KeyError: 'odd'" + HINT),
    ],
)
def test_a_failed_start_is_one_line(factory: str, message: str) -> None:
    with pytest.raises(StartupError) as caught:
        started_engine(EngineConfig(model_path=""), factory)
    assert str(caught.value) == message


class Refused:
    error: BaseException = StartupError("the model file is damaged")

    def __init__(self, config: EngineConfig) -> None:
        raise self.error


class Empty(Refused):
    error = MemoryError()


class Broken(Refused):
    error = KeyError("odd")
