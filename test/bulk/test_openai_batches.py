"""/openai/v1/files and /batches as the official SDK speaks them, and what becomes of them when processes end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gzip
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import openai
import pytest

from batch_store.records import UNDER_WAY, Batch, Purpose, Status, StoredFile
from batch_store.store import Store
from bulk.backends.backend import AWAY, Reply
from bulk.batches import process as runner_process
from bulk.batches.job import BatchJob
from bulk.batches.lines import BatchTask
from bulk.batches.process import Runner
from bulk.lines import LineWorker, Outcome
from bulk.records import Record
from bulk.sidecar import Progress, Sidecar
from routes.config import HttpConfig
from routes.context import STORED_FILES, Context, Gate
from routes.dispatch import settled
from routes.openai.batches import ENDPOINTS
from routes.openai.batches import ROUTES as BATCHES
from routes.openai.files import ROUTES as FILES
from routes.readiness import Readiness
from routes.request.bodies import validate
from routes.response.reply import Answer
from routes.route import Upload
from test.bulk.runs import fake_service
from test.serving import Service, wait_for

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
    """Lines of a result by their custom_id; each is there once."""
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


@pytest.mark.parametrize("url", ENDPOINTS)
@pytest.mark.parametrize("field", ["contents", "messages", "nothing"])
def test_a_line_means_a_route_whatever_its_body_lacks(url: str, field: str) -> None:
    """So that the route says what is wrong with the body."""
    path = BatchTask().ask(Record(0, 1, {"url": url, "body": {field: "x"}})).path
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
    assert {httpx.head(head).status_code for _ in range(2 * STORED_FILES)} == {200}, "none takes a place"
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
        client.files.create(file=("f.jsonl", b"x"), purpose="fine-tune")


def test_what_is_wrong_with_a_file_is_told_by_line(fake: Service) -> None:
    client = client_of(fake)
    wrong = [native_line(0), native_line(0), {**native_line(1), "url": "/v1/completions"}, {"custom_id": "x"}]
    content = "".join(json.dumps(line) + "\n" for line in wrong).encode() + b"{\n"
    file = client.files.create(file=("f.jsonl", content), purpose="batch")
    batch = ended(client, client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h").id)
    assert batch.status == "failed" and batch.failed_at
    told = [(one.line, one.param) for one in batch.errors.data]
    assert told == [(2, "custom_id"), (3, "url"), (4, "method"), (5, None)]
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


def test_a_batch_that_is_cancelled_before_it_was_looked_at_asks_nothing(fake: Service) -> None:
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
    """Its window is an hour at least: the clock is put forward in the store."""
    client = client_of(fake)
    batch = begun(client, [native_line(0), native_line(1, 100_000)], completion_window="1h")
    wait_for(lambda: client.batches.retrieve(batch.id).request_counts.completed == 1, 30, "one line is done")
    store = Store(Path(f"{fake.state_db}.files"), 1 << 30, 100)
    store.change(batch.id, lambda one: msgspec.structs.replace(one, expires_at=int(time.time())))
    kill_runner(fake)  # the next one reads it anew
    done = ended(client, batch.id)
    assert done.status == "expired" and done.expired_at
    assert lines_of(client, done.error_file_id)["c1"]["error"]["code"] == "batch_expired"
    assert set(lines_of(client, done.output_file_id)) == {"c0"}


def runner_of(service: Service) -> int:
    """The process that runs batches: it has the store's files under way open."""
    runs = f"{service.state_db}.files/runs/"
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(str(file.readlink()).startswith(runs) for file in (process / "fd").iterdir()):
                return int(process.name)
    raise AssertionError("no process runs batches")


def kill_runner(service: Service) -> None:
    os.kill(runner_of(service), signal.SIGKILL)


def test_a_batch_goes_on_after_its_process_and_after_the_service_ended(tmp_path: Path) -> None:
    service = fake_service(tmp_path)
    try:
        client = client_of(service)
        batch = begun(client, [native_line(i, 3 if i < 300 else 200) for i in range(700)])
        wait_for(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 300, 30, "some are done")
        kill_runner(service)
        wait_for(lambda: client.batches.retrieve(batch.id).request_counts.completed > 400, 60, "it goes on")
        assert service.terminate() == 0
        database = service.state_db
        service = fake_service(tmp_path, state_db=database)
        client = client_of(service)
        done = ended(client, batch.id)
        assert done.request_counts.model_dump() == {"total": 700, "completed": 700, "failed": 0}
        answers = lines_of(client, done.output_file_id)
        assert set(answers) == {f"c{i}" for i in range(700)}
        text = answers["c7"]["response"]["body"]["choices"][0]["message"]["content"]
        assert text == "n7" * 3
    finally:
        service.close()


def test_keys_see_their_own_files_and_batches_alone(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(
        '[[key]]\nname = "anna"\nkey = "sk-anna-0123456789"\nrows = 2\n'
        '[[key]]\nname = "ben"\nkey = "sk-ben-0123456789"\n'
    )
    service = fake_service(tmp_path, "--keys-file", str(keys), "--password", "secret", password="secret")
    try:
        anna, ben, admin = (client_of(service, key) for key in ("sk-anna-0123456789", "sk-ben-0123456789", "secret"))
        batch = begun(anna, [native_line(i) for i in range(12)])
        assert ended(anna, batch.id).request_counts.completed == 12  # within the rows that the key may have at once
        for ask in (ben.batches.retrieve, ben.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                ask(batch.id)
        with pytest.raises(openai.NotFoundError):
            ben.files.content(batch.input_file_id)
        assert not ben.files.list().data and not ben.batches.list().data
        with pytest.raises(openai.BadRequestError):
            ben.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
        assert admin.batches.retrieve(batch.id).id == batch.id
        assert httpx.get(f"{service.url}/openai/v1/files").status_code == 401
    finally:
        service.close()


def test_a_service_without_a_database_keeps_no_files(tmp_path: Path) -> None:
    service = fake_service(tmp_path, "--files-dir", "none")
    try:
        with pytest.raises(openai.NotFoundError, match="keeps no files"):
            client_of(service).files.list()
    finally:
        service.close()


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


class FullDisk(Store):
    """Takes no record of a batch that has failed, so often."""

    refusals = 1

    def change(self, batch_id: str, change: Callable[[Batch], Batch]) -> Batch:
        def checked(batch: Batch) -> Batch:
            batch = change(batch)
            if batch.status is Status.FAILED and self.refusals:
                self.refusals -= 1
                raise OSError(errno.ENOSPC, "No space left on device")
            return batch

        return super().change(batch_id, checked)


def faulty_batch(store: Store) -> Batch:
    """One under way, with a line answered."""
    file = StoredFile(id="file-1", owner="", bytes=3, created_at=1, filename="f.jsonl", purpose=Purpose.BATCH)
    batch = Batch(
        id="batch_1",
        owner="",
        client="",
        endpoint=CHAT,
        input_file_id=file.id,
        completion_window="24h",
        status=Status.IN_PROGRESS,
        created_at=1,
        expires_at=int(time.time()) + 3600,
    )
    store.add_batch(batch)
    store.add_file(file, b"{}\n")
    (store.runs / f"{batch.id}.jsonl").write_bytes(ANSWERED)
    progress = Sidecar(store.runs / f"{batch.id}.progress")
    progress.begin({}, "")
    progress.commit(Progress(output_bytes=len(ANSWERED), answered=1), {})
    progress.close()
    return batch


ANSWERED = b'{"custom_id": "c0"}\n'


def test_a_batch_whose_failing_was_cut_short_fails_when_it_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store: Store = FullDisk(tmp_path, 1 << 30, 100)
    batch = faulty_batch(store)
    context: Any = None

    async def faulty(self: BatchJob) -> Status:
        raise TypeError("a fault of ours")

    async def tried() -> None:
        runner = Runner(store, context, lambda: None)
        told = asyncio.Event()
        running = asyncio.create_task(runner.run(told))
        while batch.id not in runner._not_before:  # nobody is told of it but by the wait
            assert not running.done()
            await asyncio.sleep(0.01)
        told.set()
        await running

    with monkeypatch.context() as patch:
        patch.setattr(BatchJob, "_answer", faulty)
        asyncio.run(asyncio.wait_for(tried(), 20))
    found = store.batch("", batch.id)
    assert found is not None and found.status in UNDER_WAY
    asyncio.run(asyncio.wait_for(BatchJob(store, context, found).run(), 20))
    failed = store.batch("", batch.id)
    assert failed is not None and failed.status is Status.FAILED and "a fault of ours" in failed.errors[0]["message"]
    assert failed.output_file_id and store.content(failed.output_file_id).read_bytes() == ANSWERED
    assert not list(store.runs.iterdir())


class Unusable(Store):
    """Cannot be looked at the first times, for one reason and then another."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 1 << 30, 100)
        self.reasons = ["is full"] * 3 + ["is locked"] * 3
        self.was_looked_at = threading.Event()

    def under_way(self) -> list[Batch]:
        if self.reasons:
            raise OSError(self.reasons.pop(0))
        self.was_looked_at.set()
        return []


def test_a_store_that_cannot_be_used_is_told_once_and_when_it_can_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner_process, "_LOOK_S", 0.001)
    store = Unusable(tmp_path)

    async def tried() -> None:
        context: Any = None
        told = asyncio.Event()
        running = asyncio.create_task(Runner(store, context, lambda: None).run(told))
        await asyncio.to_thread(store.was_looked_at.wait, 60)
        told.set()
        await running

    with caplog.at_level("INFO", runner_process.logger.name):
        asyncio.run(asyncio.wait_for(tried(), 20))
    assert [record.getMessage() for record in caplog.records] == [
        *(
            f"batches wait: {reason}; if the disk of --files-dir is full, make room there"
            for reason in ("is full", "is locked")
        ),
        "the store of batches can be used again",
    ]


def test_a_clock_that_is_set_ahead_deletes_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path, 1 << 30, 100)
    wall, running = 1e9, 50.0
    clock = SimpleNamespace(time=lambda: wall, monotonic=lambda: running)
    monkeypatch.setattr(runner_process, "time", clock)
    for name, expires in (("file-a", wall + 2000), ("file-b", wall + 900)):
        file = StoredFile(
            id=name,
            owner="",
            bytes=1,
            created_at=int(wall),
            filename="a",
            purpose=Purpose.BATCH,
            expires_at=int(expires),
        )
        store.add_file(file, b"a")
    context: Any = None
    runner = Runner(store, context, lambda: None)
    wall, running = wall + 1e8 + 1000, running + 1000
    asyncio.run(runner._look())
    assert [file.id for file in store.files("", "", "", 10, True)] == ["file-a"]


class LooksLate(Store):
    """What is under way is told a while after it was read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 1 << 30, 100)
        self.has_read, self.may_tell = threading.Event(), threading.Event()

    def under_way(self) -> list[Batch]:
        found = super().under_way()
        self.has_read.set()
        self.may_tell.wait(60)
        return found


def test_a_batch_that_ends_while_it_is_looked_for_is_not_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, begun = LooksLate(tmp_path), []
    faulty_batch(store)

    async def looked() -> None:
        context: Any = None
        runner, ends = Runner(store, context, lambda: None), asyncio.Event()

        async def run(self: BatchJob) -> None:
            begun.append(self.batch.id)
            await ends.wait()
            await self._becomes(Status.COMPLETED)

        monkeypatch.setattr(BatchJob, "run", run)
        store.may_tell.set()
        await runner._look()
        store.has_read.clear()
        store.may_tell.clear()
        looking = asyncio.create_task(runner._look())
        await asyncio.to_thread(store.has_read.wait, 60)
        ends.set()
        await asyncio.gather(*runner._tasks.values())
        store.may_tell.set()
        await looking
        await asyncio.gather(*runner._tasks.values())

    asyncio.run(asyncio.wait_for(looked(), 60))
    assert begun == ["batch_1"]


def test_the_process_of_batches_is_in_the_status(fake: Service) -> None:
    client = client_of(fake)
    batch = begun(client, [native_line(0, 100_000)])

    def busy() -> dict[str, Any] | None:
        process = fake.status()["processes"]["batches"]
        return process if process and process["jobs"] == 1 else None

    process = wait_for(busy, 30, "it has a job")
    assert process["pid"] == runner_of(fake)
    client.batches.cancel(batch.id)
    ended(client, batch.id)


def test_a_line_that_is_always_too_much_fails_alone_once_nothing_else_is_answered() -> None:
    class Full:
        """Refuses one line, and is away for a moment when another is asked first."""

        tries = 0

        async def model(self) -> str:
            return ""

        async def open(self) -> int:
            return 4

        async def ask(self, path: str, body: dict[str, Any]) -> Reply:
            self.tries += 1
            if body["contents"] == ["n1"]:
                return Reply(429, {"error": "the queue is full"}, 0.0)
            return Reply(200, {"choices": []}) if self.tries > 2 else Reply(AWAY, "away", 0.0)

        async def close(self) -> None: ...

    async def both() -> list[Outcome]:
        worker = LineWorker(Full(), BatchTask(), 3, patience=10**6, refused_s=0.8)
        records = [Record(i, i, fields=native_line(i)) for i in range(2)]
        return await asyncio.gather(*map(worker.outcome, records))

    good, bad = asyncio.run(asyncio.wait_for(both(), 30))
    assert good.answer is not None and not good.problem
    assert bad.answer is None and bad.status == 429 and "queue is full" in bad.problem


@pytest.mark.parametrize("method, path", [(one.method, one.path) for one in (*FILES, *BATCHES)])
def test_a_store_that_cannot_be_used_is_told_with_what_helps(tmp_path: Path, method: str, path: str) -> None:
    """As with a full disk, where SQLite cannot begin: no fault of ours."""
    (tmp_path / "file").touch()
    route = next(one for one in (*FILES, *BATCHES) if (one.method, one.path) == (method, path))
    context = Context(None, HttpConfig(), Gate(8), Readiness(0))  # type: ignore[arg-type]
    context.files = Store(tmp_path / "file" / "below", 2**30, 10)
    if route.body is None:
        assert route.query is not None
        asked: object = Upload(validate(route.query, {"file_id": "file-1", "batch_id": "batch_1/cancel"}))
    else:
        line = {"input_file_id": "file-1", "endpoint": CHAT, "completion_window": "24h"}
        asked = validate(route.body, {"content": b"{}", "purpose": "batch", **line})
    answer = asyncio.run(settled(route, route.handle(context, asked)))
    assert isinstance(answer, Answer)
    message = json.loads(answer.body)["error"]["message"]
    assert answer.status == 429 and answer.headers["Retry-After"] == "10"
    assert "cannot be " in message and "Not a directory" in message and "--files-dir" in message
