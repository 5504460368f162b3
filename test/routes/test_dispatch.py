"""Handlers without HTTP: their jobs, priorities and errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from routes.config import HttpConfig
from routes.context import Context, Readiness, RequestLimiter
from routes.request_context import RequestContext, set_current_request
from routes.response.http_response import HttpResponse
from routes.route import full_response
from routes.table import ROUTES
from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.request import Delta, Finish, FinishReason, Job, JobEvents, Priority
from rwkv_batch.translation.plan import CACHE_KEY, TranslationCache

BY_PATH = {route.path: route for route in ROUTES if route.method == "POST"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"contents": ["a"]},
    "/FIM/v1/batch-FIM": {"prefix": ["a"], "suffix": ["b"]},
    "/translate/v1/batch-translate": {"source_lang": "en", "target_lang": "de", "text_list": ["a"]},
    "/openai/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/openai/v1/completions": {"prompt": "a"},
    "/big_batch/completions": {"contents": ["a"], "stream": False},
}


class Engine:
    """Answers every row with "ok" at once, or refuses, or stays silent. Records its jobs."""

    is_connected = True
    lost: list[str] = []  # noqa: RUF012

    def __init__(self, refusal: ServiceError | None = None, silent: bool = False) -> None:
        self.jobs: list[Job] = []
        self.sinks: list[Any] = []
        self.cancelled: list[str] = []
        self.submitted = asyncio.Event()
        self.refusal, self.silent = refusal, silent

    def submit(self, job: Job, sink: Any, admitted: Any) -> None:
        self.jobs.append(job)
        self.sinks.append(sink)
        self.submitted.set()
        admitted(self.refusal)
        if self.refusal is None and not self.silent:
            finish = Finish(reason=FinishReason.STOP, prompt_tokens=1, completion_tokens=1)
            deltas = [Delta(row, b"ok", 1, finish) for row in range(job.num_rows)]
            sink(JobEvents(job_id=job.job_id, deltas=deltas, done=True))

    def cancel(self, job_id: str) -> None:
        self.cancelled.append(job_id)

    def call(self, call: object, reply: Any) -> None:
        reply({"fingerprint": "0" * 12})

    def observe(self, observation: object) -> None: ...


def ask(engine: Engine, path: str, body: object, priority: Priority | None = None) -> HttpResponse:
    async def submitted() -> HttpResponse:
        context = Context(engine, HttpConfig(), RequestLimiter(8), Readiness(0))  # type: ignore[arg-type]
        context.shared[CACHE_KEY] = TranslationCache(0)
        set_current_request(RequestContext(client="somebody", priority=priority))
        return await full_response(context, BY_PATH[path], body)

    return asyncio.run(submitted())


@pytest.mark.parametrize("path", BODIES)
def test_the_body_sets_the_priority(path: str) -> None:
    engine = Engine()
    for given in ({}, {"priority": None}, {"priority": "interactive"}, {"priority": "batch"}):
        assert ask(engine, path, {**BODIES[path], **given}).status == 200
    assert [job.priority for job in engine.jobs] == ["auto", "auto", "interactive", "batch"]
    refused = ask(engine, path, {**BODIES[path], "priority": "now"})
    assert refused.status in (400, 422) and b"priority" in refused.body


def test_the_request_context_overrides_the_priority() -> None:
    engine = Engine()
    for path, body in BODIES.items():
        ask(engine, path, {**body, "priority": "interactive"}, Priority.BATCH)
    assert {job.priority for job in engine.jobs} == {Priority.BATCH}
    assert {job.client for job in engine.jobs} == {"somebody"}


def test_errors_are_answers_in_the_routes_format() -> None:
    native = ask(Engine(), "/v1/chat/completions", {"contents": ["a"], "temperature": -1})
    assert native.status == 422 and json.loads(native.body)["field"] == "temperature"
    openai = ask(Engine(), "/openai/v1/completions", {"prompt": "a", "temperature": -1})
    assert json.loads(openai.body)["error"]["param"] == "temperature"
    full = Engine(ServiceError(ErrorKind.OVERLOADED, "full", retry_after_s=7))
    answer = ask(full, "/v1/chat/completions", {"contents": ["a"]})
    assert (answer.status, answer.headers["Retry-After"]) == (429, "7")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/big_batch/completions", "/openai/v1/completions"])
def test_a_stream_is_refused_and_nothing_keeps_running(path: str) -> None:
    body = {name: value for name, value in BODIES[path].items() if name != "stream"}
    engine = Engine(silent=True)
    streams_unasked = path == "/big_batch/completions"
    answer = ask(engine, path, body if streams_unasked else {**body, "stream": True})
    assert answer.status == (400 if path.startswith("/openai") else 422) and b"stream" in answer.body
    assert engine.cancelled == [job.job_id for job in engine.jobs]


@pytest.mark.parametrize("turns", [0, 2])
def test_a_cancelled_request_cancels_its_job(turns: int) -> None:
    engine = Engine(silent=True)

    async def give_up() -> None:
        context = Context(engine, HttpConfig(), RequestLimiter(8), Readiness(0))  # type: ignore[arg-type]
        route = BY_PATH["/v1/chat/completions"]
        asking = asyncio.create_task(full_response(context, route, {"contents": ["a"]}))
        await engine.submitted.wait()
        for _ in range(turns):  # 2: after the admission
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(give_up())
    assert engine.cancelled == [engine.jobs[0].job_id]
