"""Ended requests leave no objects in an HTTP worker, however they end."""

from __future__ import annotations

import asyncio
import gc
import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from routes.config import HttpConfig
from routes.context import Context, Readiness, RequestLimiter
from routes.request.json_body import validate
from routes.request_context import RequestContext, set_current_request
from routes.response.http_response import NATIVE_ERRORS, HttpResponse, StreamedResponse
from routes.route import response_or_error
from routes.serving.http import ActiveRequest, RobynChunks
from rwkv_batch.errors import ErrorKind, ServiceError
from rwkv_batch.request import Job
from rwkv_batch.translation.plan import CACHE_KEY, TranslationCache
from test.routes.test_dispatch import BODIES, BY_PATH, Engine

REQUESTS = 50


class Forgetful(Engine):
    """Keeps no job. `is_full`: refuses all."""

    def __init__(self, is_full: bool) -> None:
        super().__init__()
        self._is_full = is_full

    def submit(self, job: Job, sink: Any, admitted: Any) -> None:
        self.refusal = ServiceError(ErrorKind.OVERLOADED, "full", retry_after_s=7) if self._is_full else None
        super().submit(job, sink, admitted)
        self.jobs.clear()
        self.sinks.clear()
        self.cancelled.clear()


async def serve(context: Context, path: str, body: dict[str, Any], *, leaves: bool) -> None:
    """Run one request to its last byte. `leaves`: its client reads one chunk."""
    route, request_context = BY_PATH[path], RequestContext(client="somebody", route=path)
    set_current_request(request_context)
    active = ActiveRequest(context, request_context, "10.0.0.1", True)
    reply = await response_or_error(route, _respond(context, path, body))
    if isinstance(reply, HttpResponse):
        active.release()
        active.report(reply.status, "done")
        return
    assert isinstance(reply, StreamedResponse)
    chunks = RobynChunks(reply, active, None, NATIVE_ERRORS)
    for _ in zip(range(1 if leaves else 99), chunks, strict=False):
        pass


async def _respond(context: Context, path: str, body: dict[str, Any]) -> Any:
    return await BY_PATH[path].respond(context, validate(BY_PATH[path].body, body))


CHAT, TRANSLATE = "/v1/chat/completions", "/translate/v1/batch-translate"
STREAM = {"contents": ["a", "b"], "stream": True}


@pytest.mark.parametrize(
    ("path", "body", "is_full", "leaves"),
    [
        (CHAT, BODIES[CHAT], False, False),
        (CHAT, STREAM, False, False),
        (CHAT, STREAM, False, True),
        (CHAT, STREAM, True, False),
        (CHAT, {"contents": ["a"], "temperature": -1}, False, False),
        (TRANSLATE, BODIES[TRANSLATE], False, False),
    ],
)
def test_ended_requests_leave_no_objects(path: str, body: dict[str, Any], is_full: bool, leaves: bool) -> None:
    async def growth() -> int:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))  # more threads begin on a busy machine
        context = Context(Forgetful(is_full), HttpConfig(access_log=False), RequestLimiter(8), Readiness(0))  # type: ignore[arg-type]
        context.shared[CACHE_KEY] = TranslationCache(9)
        blocks = []
        for _ in range(4):
            gc.collect()
            blocks.append(sys.getallocatedblocks())
            for _ in range(REQUESTS):
                await serve(context, path, body, leaves=leaves)
                await asyncio.sleep(0)
        # The first requests fill caches, and free lists grow a little. An object of each request is a block or more.
        return min(last - first for first, last in itertools.pairwise(blocks[1:]))

    assert asyncio.run(growth()) < REQUESTS
