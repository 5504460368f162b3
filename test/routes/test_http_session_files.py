"""Export and import of sessions over HTTP."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load as load_safetensors

from routes.config import HttpConfig
from routes.context import MAX_SESSION_TRANSFERS, Context, Readiness, RequestLimiter
from routes.request_context import RequestContext, set_current_request
from routes.response.http_response import HttpResponse
from routes.route import Upload
from routes.state import ExportQuery, ImportQuery, export_session, import_session
from rwkv_batch.calls import ExportSession
from rwkv_batch.errors import ErrorKind, ServiceError
from state_pool.session_file import SessionFile, decode
from test.malformed_files import malformed_files
from test.serving import REQUEST_TIMEOUT_S, Service

pytestmark = pytest.mark.slow

TURN = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


def say(service: Service, session_id: str, text: str) -> str:
    body = {**TURN, "session_id": session_id, "contents": [text]}
    answer = service.post("/state/chat/completions", body)
    answer.raise_for_status()
    content: str = answer.json()["choices"][0]["message"]["content"]
    return content


def export(service: Service, session_id: str) -> httpx.Response:
    return service.get("/state/export", params={"session_id": session_id})


def bring(service: Service, session_id: str, content: bytes) -> httpx.Response:
    return service.post("/state/import", params={"session_id": session_id}, content=content)


def test_an_imported_session_continues(service: Service) -> None:
    say(service, "carried", "User: one\n\nAssistant:")
    file = export(service, "carried")
    assert file.status_code == 200
    assert load_safetensors(file.content), "any safetensors reader can open it"
    received = bring(service, "carried: copy ✿", file.content)
    assert received.status_code == 200 and received.json()["num_tokens"] > 0
    assert say(service, "carried: copy ✿", "User: two") == say(service, "carried", "User: two")


def test_head_shows_whether_the_session_exists(service: Service) -> None:
    say(service, "headed", "User: one")
    url = f"{service.url}/state/export"
    found = httpx.head(url, params={"session_id": "headed"}, timeout=REQUEST_TIMEOUT_S)
    assert (found.status_code, found.content) == (200, b"")
    assert found.headers["Content-Disposition"] == export(service, "headed").headers["Content-Disposition"]
    assert httpx.head(url, params={"session_id": "nobody"}, timeout=REQUEST_TIMEOUT_S).status_code == 404


def test_head_creates_no_file() -> None:
    """And the transfer limit is released."""

    async def scenario() -> None:
        engine: Any = Holding()
        context = Context(engine, HttpConfig(), RequestLimiter(1), Readiness(0))
        set_current_request(RequestContext(method="HEAD"))
        for answer in (b"", ServiceError(ErrorKind.SESSION_NOT_FOUND, "no session")) * MAX_SESSION_TRANSFERS:
            task = asyncio.create_task(export_session(context, ExportQuery(session_id="s")))
            await asyncio.sleep(0)
            call, reply = engine.calls.pop(), engine.replies.pop()
            reply(answer)
            (outcome,) = await asyncio.gather(task, return_exceptions=True)
            assert call == ExportSession("s", include_file=False)
            assert type(outcome) is (HttpResponse if answer == b"" else ServiceError)

    asyncio.run(scenario())


def test_invalid_imports_are_refused_by_name(service: Service) -> None:
    say(service, "whole", "User: one")
    content = export(service, "whole").content
    assert export(service, "nobody").status_code == 404
    assert bring(service, "whole", content).status_code == 409, "the name is taken"
    flipped = content[:-50] + bytes([content[-50] ^ 1]) + content[-49:]
    for broken in (b"", b"hello", content[:-1], content[:40], flipped):
        refused = bring(service, "broken", broken)
        assert (refused.status_code, refused.json()["field"]) == (422, "body")
    refused = service.get("/state/export")
    assert (refused.status_code, refused.json()["field"]) == (422, "session_id")
    assert service.post("/state/import", content=content).status_code == 422


def test_a_state_with_nan_is_refused(service: Service) -> None:
    say(service, "sound", "User: one")
    file = decode(export(service, "sound").content)
    name, data = max(file.parts.items(), key=lambda part: len(part[1]))
    number = struct.pack("<f", float("nan"))
    broken = replace(file, parts={**file.parts, name: data[:-8] + number + data[-4:]})
    refused = bring(service, "unsound", broken.encode())
    assert (refused.status_code, refused.json()["field"]) == (422, "body")
    assert name in refused.json()["error"] and "NaN" in refused.json()["error"]
    assert bring(service, "unsound", replace(file).encode()).status_code == 200, "nothing is left of the refused one"


def test_any_invalid_file_is_a_4xx(service: Service) -> None:
    """There are more imports than transfer slots: each slot is released, and turns still work."""
    say(service, "sound", "User: one")
    content = export(service, "sound").content
    for what, file in malformed_files(content):
        refused = bring(service, "hostile", file)
        assert (refused.status_code, refused.json().get("field")) == (422, "body"), what
        assert len(refused.content) < 4000, what
    poisoned = SessionFile(decode(content).fingerprint, 2, [1, 65536], {}, {}).encode()
    refused = bring(service, "hostile", poisoned)
    assert refused.status_code == 422 and "outside the model's vocabulary of 65536" in refused.json()["error"]
    foreign = bring(service, "hostile", replace(decode(content), fingerprint="of another").encode())
    assert foreign.status_code == 422 and "another model" in foreign.json()["error"]
    assert bring(service, "sound again", content).status_code == 200
    say(service, "sound again", "User: two")


@pytest.mark.timeout(300)
def test_a_dead_writer_ends_the_engine_and_a_new_one_serves(tmp_path: Path, tiny_model: Path) -> None:
    flags: list[Any] = ["--model-path", str(tiny_model), "--http-workers", "1"]
    with Service(tmp_path, *flags, RWKV_CRASH_AT="before_append:1:thread") as running:
        engine = running.pids()["engine"]
        body = {**TURN, "session_id": "s", "contents": ["User: one"]}
        answer = running.post("/state/chat/completions", body)
        assert "the thread state-pool-writer has died" in answer.json()["error"]
        running.wait(lambda: running.get("/readyz").status_code == 503, 30)
        running.wait_ready()
        assert running.pids()["engine"] != engine


def test_a_list_of_sessions_is_bounded(service: Service) -> None:
    for field, maximum in (("offset", 2**53 - 1), ("limit", 10_000)):
        assert service.post("/state/status", {field: maximum}).status_code == 200
        for beyond in (maximum + 1, 2**63 - 1, 10**30, -1):
            refused = service.post("/state/status", {field: beyond})
            assert (refused.status_code, refused.json()["field"]) == (422, field)
    exported = service.get("/state/export", params={"session_id": "none", "dialogue_idx": 2**63 - 1})
    assert exported.status_code == 404


class Holding:
    """An engine that answers on command."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.replies: list[Any] = []

    def call(self, call: Any, reply: Any) -> None:
        self.calls.append(call)
        self.replies.append(reply)


def test_transfers_are_limited() -> None:
    """14 files of 110 MB at once exceeded the engine link's limit. That broke every stream."""

    async def scenario() -> None:
        engine: Any = Holding()
        context = Context(engine, HttpConfig(), RequestLimiter(1), Readiness(0))

        def begin(client: int) -> asyncio.Task[Any]:
            set_current_request(RequestContext(client=f"c{client}"))  # the task needs it too
            return asyncio.create_task(import_session(context, Upload(ImportQuery(session_id="s"), b"content")))

        async def answer(value: object) -> None:
            await asyncio.sleep(0)
            engine.replies.pop(0)(value)

        begun = [begin(client) for client in range(MAX_SESSION_TRANSFERS)]
        await asyncio.sleep(0)
        fetched = export_session(context, ExportQuery(session_id="s"))
        for refused in (begin(0), begin(MAX_SESSION_TRANSFERS), asyncio.create_task(fetched)):
            with pytest.raises(ServiceError) as refusal:
                await asyncio.wait_for(refused, 10)
            assert refusal.value.info.kind is ErrorKind.OVERLOADED and refusal.value.info.retry_after_s
        await answer(ServiceError(ErrorKind.INVALID_FIELD, "no session"))
        await answer(7)
        assert [type(one) for one in await asyncio.gather(*begun, return_exceptions=True)] == [
            ServiceError,
            HttpResponse,
        ]
        again = [begin(client) for client in range(MAX_SESSION_TRANSFERS)]
        for _ in again:
            await answer(7)
        await asyncio.wait_for(asyncio.gather(*again), 10)

    asyncio.run(scenario())
