"""/openai/v1/files and /batches with the official SDK. Also after a process has ended."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from programs.backends.backend import UNREACHABLE, Reply
from programs.batch.lines import LineWorker, Outcome
from programs.record import Record
from programs.serve.batches.batch_format import BatchTask
from routes.config import HttpConfig
from routes.context import MAX_FILE_DOWNLOADS, Context, Readiness, RequestLimiter
from routes.file_store import Store
from routes.openai.batches import ENDPOINTS
from routes.openai.batches import ROUTES as BATCHES
from routes.openai.files import ROUTES as FILES
from routes.request.json_body import validate
from routes.response.http_response import HttpResponse
from routes.route import response_or_error
from test.programs.batch.runs import fake_service
from test.serving import Service, wait_for

pytestmark = pytest.mark.slow

CHAT, NATIVE = "/v1/chat/completions", "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


def client_of(service: Service, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.url}/openai/v1", api_key=key, max_retries=0)


def chat_line(index: int, **body: Any) -> dict[str, Any]:
    asked = {"model": "rwkv7", "messages": [{"role": "user", "content": f"Hi {index}"}], "max_tokens": 4, **body}
    return {"custom_id": f"c{index}", "method": "POST", "url": CHAT, "body": asked}


def native_line(index: int, max_tokens: int = 3) -> dict[str, Any]:
    body = {"contents": [f"n{index}"], "max_tokens": max_tokens}
    return {"custom_id": f"c{index}", "method": "POST", "url": NATIVE, "body": body}


def begun(client: openai.OpenAI, lines: list[Any], endpoint: Any = CHAT, **fields: Any) -> Any:
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("lines.jsonl", content), purpose="batch")
    fields.setdefault("completion_window", "24h")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, **fields)


def ended(client: openai.OpenAI, batch_id: str) -> Any:
    def look() -> Any:
        batch = client.batches.retrieve(batch_id)
        return batch if batch.status in ENDED else None

    return wait_for(look, 60, "the batch has ended")


def lines_of(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    """Return the lines of a result by custom_id; each exists once."""
    if file_id is None:
        return {}
    lines = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


def test_upload_create_poll_download(service: Service) -> None:
    client = client_of(service)
    lines = [chat_line(i) for i in range(12)] + [chat_line(12, temperature=-1), chat_line(13, stream=True)]
    batch = begun(client, lines, metadata={"for": "a test"})
    assert (batch.object, batch.endpoint, batch.metadata) == ("batch", CHAT, {"for": "a test"})
    assert batch.expires_at == batch.created_at + 24 * 3600
    done = ended(client, batch.id)
    assert done.status == "completed" and done.in_progress_at and done.finalizing_at and done.completed_at
    assert done.request_counts.model_dump() == {"total": 14, "completed": 12, "failed": 2}
    answers, errors = lines_of(client, done.output_file_id), lines_of(client, done.error_file_id)
    assert set(answers) == {f"c{i}" for i in range(12)} and set(errors) == {"c12", "c13"}
    body = answers["c3"]["response"]["body"]
    assert answers["c3"]["response"]["status_code"] == 200 and answers["c3"]["error"] is None
    assert body["object"] == "chat.completion" and body["usage"]["completion_tokens"] <= 4
    assert errors["c12"]["response"]["status_code"] == 400
    assert errors["c12"]["response"]["body"]["error"]["param"] == "temperature"
    assert "stream" in errors["c13"]["response"]["body"]["error"]["message"]
    found = client.files.retrieve(done.output_file_id)
    assert (found.purpose, found.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert batch.id in [one.id for one in client.batches.list(limit=3)]


def test_responses_and_scores_are_answered_too(service: Service) -> None:
    client = client_of(service)
    asked = {
        "/v1/responses": {"model": "rwkv7", "input": "Hi", "max_output_tokens": 3},
        "/v1/score": {"contents": ["Hi"], "candidates": ["a", "b"]},
    }
    batches = {
        url: begun(client, [{"custom_id": "c", "method": "POST", "url": url, "body": body}], url)
        for url, body in asked.items()
    }
    answers = {url: lines_of(client, ended(client, one.id).output_file_id) for url, one in batches.items()}
    assert answers["/v1/responses"]["c"]["response"]["body"]["output"][0]["type"] == "message"
    assert len(answers["/v1/score"]["c"]["response"]["body"]["scores"][0]["candidates"]) == 2


def test_result_lines_have_no_other_line_breaks(fake: Service) -> None:
    """Readers such as `splitlines` split at Unicode's line breaks too."""
    client, breaks = client_of(fake), "\u0085\u2028\u2029"
    good, bad = native_line(0, 1), native_line(1, -1)
    good["body"]["contents"], bad["custom_id"] = [f"a{breaks}b"], f"c{breaks}"
    done = ended(client, begun(client, [good, bad]).id)
    answer = lines_of(client, done.output_file_id)["c0"]["response"]["body"]
    assert answer["choices"][0]["message"]["content"] == f"a{breaks}b"
    assert set(lines_of(client, done.error_file_id)) == {f"c{breaks}"}


@pytest.mark.parametrize("url", ENDPOINTS)
@pytest.mark.parametrize("field", ["contents", "messages", "nothing"])
def test_a_line_selects_its_route_without_required_fields(url: str, field: str) -> None:
    """The route then reports the error in the body."""
    path = BatchTask().request(Record(0, 1, {"url": url, "body": {field: "x"}})).path
    is_openais = url in ("/v1/chat/completions", "/v1/completions", "/v1/responses") and field != "contents"
    assert path == (f"/openai{url}" if is_openais else url)


def test_files_are_listed_read_and_deleted(fake: Service) -> None:
    client = client_of(fake)
    content = b'{"a": "\xff"}\r\n\x00'
    files = [client.files.create(file=(f"f{i}.jsonl", content), purpose="batch") for i in range(5)]
    assert files[0].bytes == len(content) and files[0].expires_at == files[0].created_at + 30 * 86400
    assert client.files.content(files[0].id).content == content
    large = client.files.create(file=("large.jsonl", content * 100_000), purpose="batch")
    assert client.files.content(large.id).content == content * 100_000
    head = f"{fake.url}/openai/v1/files/{large.id}/content"
    assert {httpx.head(head).status_code for _ in range(2 * MAX_FILE_DOWNLOADS)} == {200}, "none takes a place"
    client.files.delete(large.id)
    assert [one.id for one in client.files.list(limit=2, order="asc", after=files[1].id)][:2] == [
        files[2].id,
        files[3].id,
    ]
    newest = client.files.list(limit=2)
    assert [one.id for one in newest.data] == [files[4].id, files[3].id] and newest.has_more
    assert client.files.delete(files[0].id).deleted
    for ask in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            ask(files[0].id)
    for name in ("../batches.db", "..%2fbatches.db", "file-x/../../batches.db"):
        assert fake.get(f"/openai/v1/files/{name}/content").status_code == 404
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("f.jsonl", b"x"), purpose="assistants")


def test_errors_in_a_file_name_the_line(fake: Service) -> None:
    client = client_of(fake)
    wrong = [native_line(0), native_line(0), {**native_line(1), "url": "/v1/completions"}, {"custom_id": "x"}]
    content = "".join(json.dumps(line) + "\n" for line in wrong).encode() + b"{\n"
    file = client.files.create(file=("f.jsonl", content), purpose="batch")
    batch = ended(client, client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h").id)
    assert batch.status == "failed" and batch.failed_at
    reported = [(one.line, one.param) for one in batch.errors.data]
    assert reported == [(2, "custom_id"), (3, "url"), (4, "method"), (5, None)]
    with pytest.raises(openai.BadRequestError, match="input_file_id"):
        client.batches.create(input_file_id="file-none", endpoint=CHAT, completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="completion_window"):
        client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="1y")  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError, match="endpoint"):
        client.batches.create(input_file_id=file.id, endpoint="/v1/images", completion_window="24h")  # type: ignore[arg-type]


def test_a_cancelled_batch_keeps_what_was_answered(fake: Service) -> None:
    client = client_of(fake)
    quick, endless = [native_line(i) for i in range(5)], [native_line(i, 100_000) for i in range(5, 9)]
    batch = begun(client, quick + endless)
    wait_for(lambda: client.batches.retrieve(batch.id).request_counts.completed == 5, 30, "the quick lines are done")
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    done = ended(client, batch.id)
    assert done.status == "cancelled" and done.cancelling_at and done.cancelled_at
    assert done.request_counts.model_dump() == {"total": 9, "completed": 5, "failed": 4}
    assert set(lines_of(client, done.output_file_id)) == {f"c{i}" for i in range(5)}
    errors = lines_of(client, done.error_file_id)
    assert {line["error"]["code"] for line in errors.values()} == {"batch_cancelled"} and len(errors) == 4
    wait_for(lambda: not fake.status()["running_rows"], 10, "no row runs")


def test_a_batch_cancelled_before_its_start_sends_no_requests(fake: Service) -> None:
    client = client_of(fake)
    batch = begun(client, [{"custom_id": "no body"}, native_line(1)])
    with contextlib.suppress(openai.BadRequestError):  # it was looked at, and has failed, before
        client.batches.cancel(batch.id)
    done = ended(client, batch.id)
    if done.in_progress_at is None and done.errors is None:
        assert done.status == "cancelled" and done.output_file_id is None
    else:
        assert [one.line for one in done.errors.data] == [1]


def test_a_batch_whose_file_cannot_be_read_fails(fake: Service) -> None:
    client = client_of(fake)
    content = gzip.compress(os.urandom(5000))[:3000]
    file = client.files.create(file=("lines.jsonl.gz", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    failed = ended(client, batch.id)
    assert failed.status == "failed" and file.id in failed.errors.data[0].message, failed


def test_a_batch_expires(fake: Service, tmp_path: Path) -> None:
    """The window is at least an hour. So the test changes the times in the store."""
    client = client_of(fake)
    batch = begun(client, [native_line(0), native_line(1, 100_000)], completion_window="1h")
    wait_for(lambda: client.batches.retrieve(batch.id).request_counts.completed == 1, 30, "one line is done")
    store = Store(Path(f"{fake.state_db}.files"), 1 << 30, 100)
    store.update(batch.id, lambda one: msgspec.structs.replace(one, expires_at=int(time.time())))
    kill_runner(fake)  # the next one reads the file from its start
    done = ended(client, batch.id)
    assert done.status == "expired" and done.expired_at
    assert lines_of(client, done.error_file_id)["c1"]["error"]["code"] == "batch_expired"
    assert set(lines_of(client, done.output_file_id)) == {"c0"}


def runner_of(service: Service) -> int:
    """Return the process that runs batches: the one with the store's files open."""
    runs = f"{service.state_db}.files/runs/"
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(str(file.readlink()).startswith(runs) for file in (process / "fd").iterdir()):
                return int(process.name)
    raise AssertionError("no process runs batches")


def kill_runner(service: Service) -> None:
    os.kill(runner_of(service), signal.SIGKILL)


def test_a_batch_resumes_after_its_process_or_the_service_ended(tmp_path: Path) -> None:
    with fake_service(tmp_path) as service:
        client = client_of(service)
        batch = begun(client, [native_line(i, 3 if i < 100 else 200) for i in range(300)])
        wait_for(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 100, 30, "some are done")
        kill_runner(service)
        wait_for(lambda: client.batches.retrieve(batch.id).request_counts.completed > 150, 60, "it goes on")
        assert service.terminate() == 0
    with fake_service(tmp_path, state_db=service.state_db) as again:
        client = client_of(again)
        done = ended(client, batch.id)
        assert done.request_counts.model_dump() == {"total": 300, "completed": 300, "failed": 0}
        answers = lines_of(client, done.output_file_id)
        assert set(answers) == {f"c{i}" for i in range(300)}
        text = answers["c7"]["response"]["body"]["choices"][0]["message"]["content"]
        assert text == "n7" * 3


def test_a_batch_whose_file_is_deleted_keeps_what_was_answered(fake: Service) -> None:
    client = client_of(fake)
    batch = begun(client, [native_line(0), native_line(1, 100_000)])
    wait_for(lambda: client.batches.retrieve(batch.id).request_counts.completed == 1, 30, "one line is done")
    client.files.delete(batch.input_file_id)
    kill_runner(fake)  # the next one has to open the file
    failed = ended(client, batch.id)
    assert failed.status == "failed" and batch.input_file_id in failed.errors.data[0].message
    assert set(lines_of(client, failed.output_file_id)) == {"c0"}
    assert not list(Path(f"{fake.state_db}.files/runs").glob(f"{batch.id}*"))


def test_the_batch_process_is_in_the_status(fake: Service) -> None:
    client = client_of(fake)
    batch = begun(client, [native_line(0, 100_000)])

    def busy() -> dict[str, Any] | None:
        process = fake.status()["processes"]["batches"]
        return process if process and process["jobs"] == 1 else None

    process = wait_for(busy, 30, "it has a job")
    assert process["pid"] == runner_of(fake)
    client.batches.cancel(batch.id)
    ended(client, batch.id)


def test_a_line_that_always_gets_429_fails_alone() -> None:
    class Full:
        """Refuses one line. Is unreachable for a moment when another line is first requested."""

        tries = 0

        async def model(self) -> str:
            return ""

        async def open(self) -> int:
            return 4

        async def request(self, path: str, body: dict[str, Any]) -> Reply:
            self.tries += 1
            if body["contents"] == ["n1"]:
                return Reply(429, {"error": "the queue is full"}, 0.0)
            return Reply(200, {"choices": []}) if self.tries > 2 else Reply(UNREACHABLE, "away", 0.0)

        async def close(self) -> None: ...

    async def both() -> list[Outcome]:
        worker = LineWorker(Full(), BatchTask(), 3, max_busy_retries=10**6, max_refused_s=0.8)
        records = [Record(i, i, fields=native_line(i)) for i in range(2)]
        return await asyncio.gather(*map(worker.outcome, records))

    good, bad = asyncio.run(asyncio.wait_for(both(), 30))
    assert good.answer is not None and not good.problem
    assert bad.answer is None and bad.status == 429 and "queue is full" in bad.problem


@pytest.mark.parametrize("method, path", [(one.method, one.path) for one in (*FILES, *BATCHES)])
def test_an_unusable_store_is_reported_with_a_remedy(tmp_path: Path, method: str, path: str) -> None:
    """For example a full disk on which SQLite cannot start. This is not an internal error."""
    (tmp_path / "file").touch()
    route = next(one for one in (*FILES, *BATCHES) if (one.method, one.path) == (method, path))
    context = Context(None, HttpConfig(), RequestLimiter(8), Readiness(0))  # type: ignore[arg-type]
    context.files = Store(tmp_path / "file" / "below", 2**30, 10)
    if route.body is None:
        assert route.query is not None
        asked: object = validate(route.query, {"file_id": "file-1", "batch_id": "batch_1/cancel"})
    else:
        line = {"input_file_id": "file-1", "endpoint": CHAT, "completion_window": "24h"}
        asked = validate(route.body, {"content": b"{}", "purpose": "batch", **line})
    answer = asyncio.run(response_or_error(route, route.respond(context, asked)))
    assert isinstance(answer, HttpResponse)
    error = json.loads(answer.body)["error"]
    assert (answer.status, error["type"], error["code"]) == (503, "server_error", "storage_failed")
    message = error["message"]
    assert answer.headers["Retry-After"] == "10"
    assert "cannot be " in message and "File exists" in message and "--files-dir" in message
