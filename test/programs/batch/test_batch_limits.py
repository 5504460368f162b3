"""Batches whose files are bombs or never end. Also batches that wait for others."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gzip
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from app import main
from programs.serve.batches.job import BatchJob
from routes.config import HttpConfig
from routes.context import Context, Readiness, RequestLimiter
from routes.file_store import Purpose, Status, Store, StoredFile
from test.programs.batch.runs import batch_record, fake_service
from test.programs.batch.test_openai_batches import CHAT, begun, client_of, ended, native_line
from test.serving import Service, wait_for

pytestmark = pytest.mark.slow

NAMES = ("anna", "ben", "carla")


@functools.cache
def bomb(content: bytes) -> bytes:
    """Return a gzip file that expands to 1 GiB."""
    return gzip.compress(content * ((16 << 20) // len(content))) * 64


BOMBS = {"blank lines": (b"\n", "lines"), "one long line": (b"x", "bytes when decompressed")}


def key_of(name: str) -> str:
    return f"sk-{name}-0123456789"


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("keyed")
    keys = "".join(f'[[key]]\nname = "{name}"\nkey = "{key_of(name)}"\n' for name in (*NAMES, "dora"))
    (folder / "keys.toml").write_text(f"{keys}rows = 2\n")
    flags = ("--keys-file", str(folder / "keys.toml"), "--password", "secret")
    with fake_service(folder, *flags, password=key_of("carla")) as running:
        yield running


def test_keys_see_only_their_own_files_and_batches(keyed: Service) -> None:
    dora, ben, admin = (client_of(keyed, key) for key in (key_of("dora"), key_of("ben"), "secret"))
    batch = begun(dora, [native_line(i) for i in range(12)])
    assert ended(dora, batch.id).request_counts.completed == 12  # within the rows that the key may have at once
    for ask in (ben.batches.retrieve, ben.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            ask(batch.id)
    with pytest.raises(openai.NotFoundError):
        ben.files.content(batch.input_file_id)
    assert not ben.files.list().data and not ben.batches.list().data
    with pytest.raises(openai.BadRequestError):
        ben.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
    assert admin.batches.retrieve(batch.id).id == batch.id
    assert httpx.get(f"{keyed.url}/openai/v1/files").status_code == 401


def test_a_refused_command_is_told_the_flag_of_its_key(
    keyed: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("Hello you\n")
    (tmp_path / "key").write_text(f"{key_of('ben')}\n")
    command = ["translate", str(tmp_path / "a.txt"), "-t", "de", "--url", keyed.url]
    assert main(command) == 1
    assert "--password-file FILE" in capsys.readouterr().err
    assert main([*command, "--password-file", str(tmp_path / "key")]) == 0


@contextlib.contextmanager
def batches_of_two_keys(service: Service, content: bytes) -> Iterator[list[tuple[Any, str]]]:
    """Four batches of each key with this file. They are cancelled at the end."""
    batches = []
    for client in (client_of(service, key_of(name)) for name in NAMES[:2]):
        file = client.files.create(file=("lines.jsonl", content), purpose="batch")
        for _ in range(4):
            batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
            batches.append((client, batch.id))
    try:
        yield batches
    finally:
        for client, batch_id in batches:
            with contextlib.suppress(Exception):
                client.batches.cancel(batch_id)


def test_bombs_hold_up_no_other_batch(keyed: Service) -> None:
    with batches_of_two_keys(keyed, bomb(b"\n")) as batches:
        carla = client_of(keyed, key_of("carla"))
        assert ended(carla, begun(carla, [native_line(0)]).id).status == "completed"
        last, *others = batches
        for client, batch_id in others:  # reading them to the end takes 20 s
            client.batches.cancel(batch_id)
        failed = ended(*last)
        assert failed.status == "failed" and "lines" in failed.errors.data[0].message


def test_long_batches_of_some_keys_hold_up_no_other_key(keyed: Service) -> None:
    with batches_of_two_keys(keyed, json.dumps(native_line(0, 1_000_000)).encode()) as batches:
        for client, batch_id in batches:
            wait_for(lambda c=client, b=batch_id: c.batches.retrieve(b).status == "in_progress", 30, "it runs")
        carla = client_of(keyed, key_of("carla"))
        assert ended(carla, begun(carla, [native_line(0)]).id).status == "completed"
        for client, batch_id in batches:
            client.batches.cancel(batch_id)
            assert ended(client, batch_id).status == "cancelled"


def job_of(folder: Path, content: bytes = b"") -> BatchJob:
    store, now = Store(folder, 1 << 30, 10), int(time.time())
    file = StoredFile(
        id="file-a", owner="", bytes=len(content), created_at=now, filename="f", purpose=Purpose.BATCH, expires_at=None
    )
    store.add_file(file, content)
    batch = batch_record("batch_1", Status.VALIDATING, now, input_file_id=file.id, expires_at=now + 86_400)
    store.add_batch(batch)
    context = Context(None, HttpConfig(), RequestLimiter(1), Readiness(0))  # type: ignore[arg-type]
    return BatchJob(store, context, batch)


@pytest.mark.parametrize("kind", BOMBS)
def test_a_file_that_expands_too_far_fails(tmp_path: Path, kind: str) -> None:
    repeated, reason = BOMBS[kind]
    content = bomb(repeated)
    job = job_of(tmp_path, content)
    asyncio.run(job.run())
    assert job.batch.status is Status.FAILED
    assert reason in job.batch.errors[0]["message"] and "split it" in job.batch.errors[0]["message"]


def test_a_line_of_too_many_values_is_not_parsed(tmp_path: Path) -> None:
    """It would take all batches' time and memory."""
    line = {**native_line(0), "body": {"contents": [[]] * 300_000}}
    job = job_of(tmp_path, json.dumps(line).encode())
    asyncio.run(job.run())
    assert job.batch.status is Status.FAILED
    assert "is too large" in job.batch.errors[0]["message"] and job.batch.errors[0]["line"] == 1


def test_a_batch_is_cancelled_while_its_file_is_validated(tmp_path: Path) -> None:
    """The file never ends, and has no byte when decompressed."""
    job = job_of(tmp_path)
    content = tmp_path / "content" / "file-a"
    content.unlink()
    os.mkfifo(content)
    is_read, is_over = threading.Event(), threading.Event()

    def write() -> None:
        empty = gzip.compress(b"") * 1000
        with contextlib.suppress(BrokenPipeError), content.open("wb") as out:
            for count in range(10**9):
                out.write(empty)
                if count > 100:
                    is_read.set()
                if is_over.is_set():
                    break

    async def cancel() -> None:
        running = asyncio.create_task(job.run())
        try:
            assert await asyncio.to_thread(is_read.wait, 60)
            cancelling = lambda batch: batch.with_status(Status.CANCELLING, int(time.time()))  # noqa: E731
            job._store.update("batch_1", cancelling)
            job.is_cancelled = True
            await asyncio.wait_for(asyncio.shield(running), 60)
        finally:
            is_over.set()

    writer = threading.Thread(target=write)
    writer.start()
    asyncio.run(cancel())
    writer.join(60)
    assert job.batch.status is Status.CANCELLED and job.batch.output_file_id is None
