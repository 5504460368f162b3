"""Files as answers: chunks, limits, and read errors."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from routes.config import HttpConfig
from routes.context import (
    MAX_FILE_DOWNLOADS,
    MAX_FILE_DOWNLOADS_PER_CLIENT,
    MAX_SESSION_TRANSFERS,
    MAX_SESSION_TRANSFERS_PER_CLIENT,
    Context,
    Readiness,
    RequestLimiter,
)
from routes.file_store import Purpose, Store, StoredFile
from routes.openai.files import FileQuery, get_file
from routes.request_context import RequestContext, set_current_request
from routes.response.http_response import CHUNK_BYTES, FileChunks, StreamedResponse
from rwkv_batch.errors import ErrorKind, ServiceError
from test.fake_engine import LARGE_FILE
from test.serving import REQUEST_TIMEOUT_S, Service, wait_for

pytestmark = pytest.mark.slow

CONTENT = bytes(range(256)) * (CHUNK_BYTES // 128) + b"the end"


class Disk(io.BytesIO):
    """Records the requested sizes, and fails after some chunks."""

    def __init__(self, content: bytes, pieces: int = 100) -> None:
        super().__init__(content)
        self.sizes: list[int | None] = []
        self._pieces = pieces

    def read(self, size: int | None = -1) -> bytes:
        self.sizes.append(size)
        if len(self.sizes) > self._pieces:
            raise OSError(errno.EIO, "Input/output error")
        return super().read(size)


def test_a_file_is_read_in_chunks_and_closed() -> None:
    disk, left = Disk(CONTENT), []
    chunks = FileChunks(disk, lambda: left.append(True))
    assert len(next(chunks)) == CHUNK_BYTES and disk.sizes == [CHUNK_BYTES] and not chunks.ended
    rest = [next(chunks), next(chunks)]
    assert sum(map(len, rest)) == len(CONTENT) - CHUNK_BYTES and set(disk.sizes) == {CHUNK_BYTES}
    assert chunks.ended and not left, "a client that does not take the last piece holds its thread"
    assert list(chunks) == [] and left == [True], "its place is free before its client sees the end"
    chunks.close()
    assert disk.closed and left == [True]
    assert list(FileChunks(io.BytesIO(CONTENT[:CHUNK_BYTES]))) == [CONTENT[:CHUNK_BYTES]]
    assert list(FileChunks(io.BytesIO(b""))) == []


def test_a_read_error_is_the_last_line() -> None:
    request_context = RequestContext(request_id="r", method="GET", route="/", client="c")
    set_current_request(request_context)
    first, last = FileChunks(Disk(CONTENT, pieces=1))
    assert len(first) == CHUNK_BYTES and last.startswith(b"\n") and last.endswith(b"\n")
    assert "Input/output error; fetch it again" in json.loads(last)["error"]
    assert request_context.error_kind is ErrorKind.INTERNAL


def test_downloads_are_limited_and_refused_ones_are_closed(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine: Any = None
        store = Store(tmp_path, 1 << 30, 10)
        context = Context(engine, HttpConfig(), RequestLimiter(1), Readiness(0), files=store)
        file = StoredFile(
            id="file-a", owner="", bytes=len(CONTENT), created_at=1, filename="a.jsonl", purpose=Purpose.BATCH
        )
        store.add_file(file, CONTENT)

        async def fetch(client: str) -> FileChunks:
            set_current_request(RequestContext(request_id="r", method="GET", route="/", client=client))
            stream = await get_file(context, FileQuery(file_id="file-a/content"))
            assert isinstance(stream, StreamedResponse) and isinstance(stream.chunks, FileChunks)
            return stream.chunks

        held: list[FileChunks] = []
        for number in range(MAX_FILE_DOWNLOADS // MAX_FILE_DOWNLOADS_PER_CLIENT):
            held += [await fetch(f"c{number}") for _ in range(MAX_FILE_DOWNLOADS_PER_CLIENT)]
            with pytest.raises(
                ServiceError, match=f"{MAX_FILE_DOWNLOADS_PER_CLIENT} file downloads of c{number}"
            ) as refusal:
                await fetch(f"c{number}")
            assert refusal.value.info.kind is ErrorKind.OVERLOADED and refusal.value.info.retry_after_s
        with pytest.raises(ServiceError, match=f"has {MAX_FILE_DOWNLOADS} file downloads in progress"):
            await fetch("another")
        held.pop().close()  # whether it was read or not
        again = await fetch("another")
        for chunks in [*held, again]:
            assert b"".join(chunks) == CONTENT
            chunks.close()
        assert (
            len([await fetch("another") for _ in range(MAX_FILE_DOWNLOADS_PER_CLIENT)]) == MAX_FILE_DOWNLOADS_PER_CLIENT
        )

    asyncio.run(scenario())


PATH = "/state/export?session_id=s"
MIB = 1 << 20


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One HTTP worker, and an engine whose sessions are all large."""
    folder: Path = tmp_path_factory.mktemp("fake")
    with Service(folder, "--http-workers", "1", program="test/fake_app.py", PYTHONPATH=".") as running:
        yield running


def start_reading(service: Service, client: str) -> socket.socket:
    """Return a client that has read only the beginning of its answer. Its address is `client`."""
    connection = socket.create_connection(("127.0.0.1", service.port), REQUEST_TIMEOUT_S, (client, 0))
    connection.sendall(f"GET {PATH} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert connection.recv(12) == b"HTTP/1.1 200"
    return connection


def test_a_file_is_complete(fake: Service) -> None:
    file = fake.get(PATH)
    assert (file.status_code, len(file.content)) == (200, LARGE_FILE)
    assert file.headers["Content-Disposition"] == 'attachment; filename="session.safetensors"'


def test_slow_readers_are_limited(fake: Service) -> None:
    wait_for(lambda: fake.get(PATH).status_code == 200, 20, "the places are free")
    readers = [start_reading(fake, "127.0.0.2") for _ in range(MAX_SESSION_TRANSFERS_PER_CLIENT)]
    assert fake.get(PATH).status_code == 200, "one client leaves room for others"
    readers += [
        start_reading(fake, f"127.0.0.{3 + number}")
        for number in range(MAX_SESSION_TRANSFERS - MAX_SESSION_TRANSFERS_PER_CLIENT)
    ]
    refused = fake.get(PATH)
    assert refused.status_code == 429 and "file transfers in progress" in refused.text
    assert fake.get("/healthz").status_code == 200
    for reader in readers:
        reader.close()
    wait_for(lambda: fake.get(PATH).status_code == 200, 20, "their places come back")


def test_a_stream_does_not_keep_the_body_of_its_request(fake: Service) -> None:
    body = {"contents": ["held"], "stream": True, "unknown": "x" * (20 * MIB)}
    status = Path(f"/proc/{fake.pids()['http-0']}/status")

    def resident_mib() -> int:
        return int(status.read_text().partition("VmRSS:")[2].split()[0]) // 1024

    before = resident_mib()
    streams = [fake.sent("/v1/chat/completions", body) for _ in range(8)]
    assert all(stream.recv(12) == b"HTTP/1.1 200" for stream in streams)
    wait_for(lambda: resident_mib() - before < 60, 20, "the bodies are freed")
    assert fake.status()["running_rows"] == len(streams)
    for stream in streams:
        stream.close()
