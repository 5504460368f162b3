"""The layer between handlers and Robyn, without either: errors, first byte, disconnects."""

from __future__ import annotations

import asyncio
import functools
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
from robyn.robyn import QueryParams

from routes.config import HttpConfig
from routes.context import Context, Readiness, RequestLimiter
from routes.request.json_body import validate
from routes.request_context import RequestContext, set_current_request
from routes.response import generate
from routes.response.event_stream import DecodedRow, EventStream, OutputDecoder
from routes.response.generate import ResponseFormatter, SseChunks, run_full
from routes.response.http_response import (
    BLANK,
    DONE,
    HEARTBEAT,
    NATIVE_ERRORS,
    HandlerResponse,
    HttpResponse,
    StreamedResponse,
)
from routes.response.task_stream import SharedAnswers, stream_events, with_early_head
from routes.route import Upload, full_response, response_or_error
from routes.serving import active_requests, http
from routes.serving.access import ClientIdentity, header_grant, shows_secret
from routes.serving.browser import BrowserRules
from routes.state import ImportQuery, import_session
from rwkv_batch.errors import ErrorInfo, ErrorKind, ServiceError
from rwkv_batch.request import Delta, Finish, FinishReason, GenerateRequest, Job, JobEvents
from sampling.params import SamplingParams
from test.routes.test_dispatch import BY_PATH, Engine, ask
from test.serving import wait_for

CHAT, STATE = "/v1/chat/completions", "/state/chat/completions"
BUSY = ErrorInfo(kind=ErrorKind.SESSION_BUSY, message="session 's' is busy")
FAILED = Finish(reason=FinishReason.ERROR, prompt_tokens=1, completion_tokens=0, error=BUSY)
ENDED = Finish(reason=FinishReason.STOP, prompt_tokens=1, completion_tokens=1)


def context_of(engine: Engine, config: HttpConfig | None = None) -> Context:
    return Context(engine, config or HttpConfig(), RequestLimiter(8), Readiness(0))  # type: ignore[arg-type]


def test_a_bug_is_a_500_in_the_routes_format() -> None:
    async def breaks() -> HandlerResponse:
        raise LookupError("a fault of the program")

    answer = asyncio.run(response_or_error(BY_PATH[CHAT], breaks()))
    assert isinstance(answer, HttpResponse)
    assert (answer.status, b"internal error" in answer.body) == (500, True)


def test_only_the_bearer_scheme_is_accepted() -> None:
    context = context_of(Engine(), HttpConfig(password="s3cret"))
    assert header_grant(context, {"authorization": "Bearer s3cret"}.get) is not None
    for scheme in ("Basic", "Token", "", "s3cret"):
        assert header_grant(context, {"authorization": f"{scheme} s3cret"}.get) is None


@pytest.mark.parametrize(
    ("peer", "headers", "is_shown"),
    [
        ("9.9.9.9", b"Authorization: Bearer s3cret", True),
        ("9.9.9.9", b"Accept: */*\r\nX-API-Key:s3cret", True),
        ("9.9.9.9", b"Authorization: Bearer s3cre", False),
        ("9.9.9.9", b"A: \xff\xff\r\nno colon\r\n:", False),
        ("9.9.9.9", b"Accept: */*\r\n\r\nAuthorization: Bearer s3cret", False),
        ("9.9.9.9", b"x-rwkv-front: its key", True),
        ("9.9.9.9", b"x-rwkv-front: a guess", False),
        ("10.0.0.7", b"Accept: */*", True),
    ],
)
def test_the_head_of_a_request_shows_a_secret_or_a_trusted_proxy(peer: str, headers: bytes, is_shown: bool) -> None:
    config = HttpConfig(password="s3cret", proxy_key="its key", trusted_proxies=("10.0.0.0/8",))
    head = b"POST / HTTP/1.1\r\n" + headers + b"\r\n\r\n"
    assert shows_secret(context_of(Engine(), config), ClientIdentity(config), peer, head) is is_shown
    assert not shows_secret(context_of(Engine(), config), ClientIdentity(config), "9.9.9.9", head[:20])


class Chunks:
    """A route's stream."""

    ended = False

    def __init__(self, *chunks: bytes) -> None:
        self._chunks = iter(chunks)
        self.closed = 0

    def __iter__(self) -> Chunks:
        return self

    def __next__(self) -> bytes:
        return next(self._chunks)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def active_request(monkeypatch: pytest.MonkeyPatch) -> http.ActiveRequest:
    monkeypatch.setattr(active_requests, "keep_state", lambda: None)  # this thread belongs to Python
    request_context = RequestContext(client="somebody")
    request_context.started -= 1
    return http.ActiveRequest(context_of(Engine()), request_context, "10.0.0.1", True)


def outgoing_of(chunks: Chunks, active_request: http.ActiveRequest) -> http.RobynChunks:
    """Return the stream for Robyn, of an unknown connection."""
    return http.RobynChunks(StreamedResponse(chunks), active_request, None, NATIVE_ERRORS)


def test_heartbeats_are_not_the_first_byte(active_request: http.ActiveRequest) -> None:
    outgoing = outgoing_of(Chunks(HEARTBEAT, BLANK, b"data"), active_request)
    assert [next(outgoing), next(outgoing), active_request.request_context.first_byte_s] == [HEARTBEAT, BLANK, 0]
    assert next(outgoing) == b"data"
    assert active_request.request_context.first_byte_s >= 1


def test_a_disconnect_closes_the_stream(active_request: http.ActiveRequest) -> None:
    chunks = Chunks(b"data")
    outgoing = outgoing_of(chunks, active_request)
    next(outgoing)
    del outgoing  # as Robyn does
    assert chunks.closed == 1
    assert active_request._context.limiter.num_active == 0


def test_the_limiter_is_released_before_the_rows_end(active_request: http.ActiveRequest) -> None:
    num_active: list[int] = []

    class ClosingStream(Chunks):
        def close(self) -> None:
            num_active.append(active_request._context.limiter.num_active)

    outgoing = outgoing_of(ClosingStream(b"data"), active_request)
    next(outgoing)
    del outgoing
    assert num_active == [0]


def test_a_waiting_writer_is_not_a_stalled_client() -> None:
    """As after a pause of the whole process: items arrive before the writer can wait for them."""
    engine, job = Engine(), Job(job_id="j", rows=[])
    piece = JobEvents(job_id="j", deltas=[])

    async def made() -> EventStream:
        return EventStream(context_of(engine, HttpConfig(stall_timeout_s=1)), job)

    stream = asyncio.run(made())
    reading = threading.Thread(target=lambda: stream.pull(600), daemon=True)
    reading.start()
    wait_for(lambda: stream._mailbox.has_waiting_reader, 30, "it waits")
    assert stream._last_read is not None
    stream._last_read -= 100
    stream.sink(piece)
    assert engine.cancelled == []
    reading.join()
    stream.sink(piece)  # it is writing and has not returned
    assert engine.cancelled == ["j"]


class Request:
    ip_addr = None
    body = b'{"contents": ["a"]}'
    headers: dict[str, str] = {}  # noqa: RUF012
    files: dict[str, bytes] = {}  # noqa: RUF012
    path_params: dict[str, str] = {}  # noqa: RUF012
    query_params = QueryParams()


def test_requests_that_wait_for_the_engine_are_refused_at_shutdown() -> None:
    engine = Engine()

    class ComesLate(Readiness):
        async def wait_for_engine(self) -> None:
            context.limiter.draining = True

    async def run_request() -> HandlerResponse:
        set_current_request(RequestContext())
        return await http._run(context, BY_PATH[CHAT], BrowserRules(context.config), Request())  # type: ignore[arg-type]

    context = Context(engine, HttpConfig(), RequestLimiter(8), ComesLate(0))  # type: ignore[arg-type]
    with pytest.raises(ServiceError) as refused:
        asyncio.run(run_request())
    assert refused.value.info.kind is ErrorKind.DRAINING
    assert engine.jobs == []


class Failing(Engine):
    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def submit(self, job: Job, sink: Any, admitted: Any) -> None:
        admitted(None)
        finishes = [FAILED if row < self._count else ENDED for row in range(job.num_rows)]
        deltas = [Delta(row, b"", 1, finish) for row, finish in enumerate(finishes)]
        sink(JobEvents(job_id=job.job_id, deltas=deltas, done=True))


@pytest.mark.parametrize(("count", "status"), [(2, 409), (1, 200)])
def test_an_answer_fails_if_all_rows_fail(count: int, status: int) -> None:
    assert ask(Failing(count), CHAT, {"contents": ["a", "b"]}).status == status


LOST = ErrorInfo(kind=ErrorKind.ENGINE_LOST, message="the engine process was lost", retry_after_s=2.0)
TURN = {"contents": ["a"], "session_id": "s"}


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, {"contents": ["a"]}), (STATE, TURN), (STATE, {**TURN, "stream": True})]
)
def test_an_engine_lost_before_the_first_token_gives_503(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    monkeypatch.setattr(generate, "START_WAIT_S", 600)
    engine, route = Engine(silent=True), BY_PATH[path]

    async def lost() -> HandlerResponse:
        context = context_of(engine)
        set_current_request(RequestContext())
        asking = asyncio.ensure_future(response_or_error(route, route.respond(context, validate(route.body, body))))
        await engine.submitted.wait()
        engine.sinks[0](JobEvents(job_id=engine.jobs[0].job_id, deltas=[], done=True, error=LOST))
        return await asking

    answer = asyncio.run(lost())
    assert isinstance(answer, HttpResponse) and answer.status == 503
    assert LOST.message.encode() in answer.body and engine.cancelled == []


class FakeStream:
    """A job's events."""

    def __init__(self, *batches: list[JobEvents]) -> None:
        self._batches = iter(batches)

    def pull(self, timeout_s: float) -> list[JobEvents]:
        return next(self._batches, [])

    def close(self) -> None: ...


class Silent(ResponseFormatter):
    def chunk(self, updates: list[DecodedRow]) -> bytes:
        return b""

    def full_body(self, rows: list[Any]) -> Any:
        return None


def test_a_stream_has_events_for_failed_rows_and_ends() -> None:
    news = FakeStream(
        [],
        [JobEvents(job_id="j", deltas=[Delta(1, b"", 1, FAILED)])],
        [JobEvents(job_id="j", deltas=[Delta(0, b"", 1, ENDED)], done=True)],
    )
    chunks = SseChunks(news, OutputDecoder(2), Silent())  # type: ignore[arg-type]
    first, second, third = (next(chunks) for _ in range(3))
    assert first == HEARTBEAT
    assert BUSY.message.encode() in second and b'"index":1' in second.replace(b" ", b"")
    assert third == DONE
    with pytest.raises(StopIteration):
        next(chunks)


async def slow(ending: asyncio.Event, error: ServiceError | None = None) -> HttpResponse:
    await ending.wait()
    if error is not None:
        raise error
    return HttpResponse(b"{}")


def test_a_head_is_early_only_where_clients_need_it() -> None:
    async def run() -> None:
        ending = asyncio.Event()
        early = await with_early_head(slow(ending), NATIVE_ERRORS, 0)
        failing = await with_early_head(slow(ending, ServiceError.from_info(BUSY)), NATIVE_ERRORS, 0)
        left = await with_early_head(slow(ending), NATIVE_ERRORS, 0)
        assert all(isinstance(one, StreamedResponse) for one in (early, failing, left))
        assert await asyncio.to_thread(next, early.chunks) == BLANK  # a write shows that the client has left
        left.chunks.close()
        ending.set()
        assert b"".join(await asyncio.to_thread(list, early.chunks)).strip() == b"{}"
        assert BUSY.message.encode() in b"".join(await asyncio.to_thread(list, failing.chunks))
        await asyncio.sleep(0)
        assert left.chunks._task.cancelled()  # type: ignore[attr-defined]
        assert (await with_early_head(slow(ending), NATIVE_ERRORS, 60)).status == 200  # type: ignore[union-attr]
        with pytest.raises(ServiceError):
            await with_early_head(slow(ending, ServiceError.from_info(BUSY)), NATIVE_ERRORS, 60)

    asyncio.run(run())


def test_a_repeated_request_gets_the_answer_that_is_being_made() -> None:
    async def run() -> None:
        running, ending, made = SharedAnswers(), asyncio.Event(), list[str]()

        def sent(name: str) -> asyncio.Task[HttpResponse]:
            async def make() -> HttpResponse:
                made.append(name)
                return await slow(ending)

            return asyncio.ensure_future(running.get(name, make))

        first, retry, other, left = sent("a"), sent("a"), sent("b"), sent("c")
        await asyncio.sleep(0.01)
        first.cancel()  # this client left; its second request waits
        left.cancel()
        await asyncio.sleep(0.01)
        assert made == ["a", "b", "c"] and set(running._running) == {"a", "b"}
        ending.set()
        assert (await retry) is not (await other) and first.cancelled() and left.cancelled()
        assert (await sent("a")).body == b"{}" and made == ["a", "b", "c", "a"] and not running._running

    asyncio.run(run())


def test_a_tasks_events_are_streamed() -> None:
    async def run() -> None:
        ending = asyncio.Event()

        async def work(send: Callable[[Any], None], error: Exception | None = None) -> None:
            send({"index": 0})
            await ending.wait()
            if error is not None:
                raise error

        async def failing(send: Callable[[Any], None]) -> None:
            raise ServiceError.from_info(BUSY)

        busy = ServiceError.from_info(BUSY)
        good, late, broken, left = [
            await stream_events(functools.partial(work, error=error), NATIVE_ERRORS)
            for error in (None, busy, RuntimeError("a bug"), None)
        ]
        with pytest.raises(ServiceError):  # before its first event, an error has its own status
            await stream_events(failing, NATIVE_ERRORS)
        assert all(isinstance(one, StreamedResponse) for one in (good, late, broken, left))
        first = b'data: {"index":0}\n\n'
        assert [await asyncio.to_thread(next, good.chunks) for _ in range(2)] == [first, HEARTBEAT]
        left.chunks.close()
        ending.set()
        assert await asyncio.to_thread(list, good.chunks) == [DONE]
        assert BUSY.message.encode() in (await asyncio.to_thread(list, late.chunks))[-1]
        assert b"server's log" in (await asyncio.to_thread(list, broken.chunks))[-1]
        assert (await asyncio.to_thread(list, left.chunks))[-1] == DONE

    asyncio.run(run())


def test_an_engine_lost_while_a_full_answer_waits_is_an_error() -> None:
    engine = Engine(silent=True)
    job = Job(job_id="j", rows=[GenerateRequest(prompt=[5], max_tokens=1, sampling=SamplingParams())])

    async def answer() -> None:
        waiting = asyncio.ensure_future(run_full(context_of(engine), job, OutputDecoder(1), len))
        await engine.submitted.wait()
        engine.sinks[-1](JobEvents(job_id="j", deltas=[], done=True, error=LOST))
        with pytest.raises(ServiceError):
            await waiting

    asyncio.run(answer())


class Refuses(Engine):
    def submit(self, job: Job, sink: Any, admitted: Any) -> None:
        admitted(ServiceError.from_info(BUSY))

    def call(self, call: object, reply: Any) -> None:
        reply(ServiceError.from_info(BUSY))


@pytest.mark.parametrize("is_file", [False, True], ids=["job", "file"])
def test_refused_requests_are_freed(is_file: bool) -> None:
    """An exception refers to the frames that it passed. These refer to whole files.

    No reference cycle may keep them.
    """
    context = context_of(Refuses())

    async def one() -> object:
        if is_file:
            return await response_or_error(
                BY_PATH["/state/import"], import_session(context, Upload(ImportQuery(session_id="s"), b"file"))
            )
        return await full_response(context, BY_PATH[CHAT], {"contents": ["a"]})

    async def left() -> int:
        set_current_request(RequestContext())
        assert getattr(await one(), "status", None) == 409
        gc.collect()
        gc.disable()
        try:
            for _ in range(20):
                await one()
            return gc.collect()
        finally:
            gc.enable()

    assert asyncio.run(left()) < 20
