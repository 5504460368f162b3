"""Slow file downloads and long streams: what they hold is limited and released."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from routes.context import MAX_SESSION_TRANSFERS, MAX_SESSION_TRANSFERS_PER_CLIENT
from test.fake_engine import LARGE_FILE
from test.serving import REQUEST_TIMEOUT_S, Service, raw_request, wait_for

PATH = "/state/export?session_id=s"
MIB = 1 << 20


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One HTTP worker, and an engine whose sessions are all large."""
    folder: Path = tmp_path_factory.mktemp("fake")
    running = Service(folder, "--http-workers", "1", program="test/fake_app.py", PYTHONPATH=".")
    try:
        yield running.wait_ready()
    finally:
        running.close()


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
    body = json.dumps({"contents": ["held"], "stream": True, "unknown": "x" * (20 * MIB)}).encode()
    status = Path(f"/proc/{fake.pids()['http-0']}/status")

    def resident_mib() -> int:
        return int(status.read_text().partition("VmRSS:")[2].split()[0]) // 1024

    before = resident_mib()
    streams = [fake.connect() for _ in range(8)]
    for stream in streams:
        stream.sendall(raw_request("/v1/chat/completions", body))
        assert stream.recv(12) == b"HTTP/1.1 200"
    wait_for(lambda: resident_mib() - before < 60, 20, "the bodies are freed")
    assert fake.status()["running_rows"] == len(streams)
    for stream in streams:
        stream.close()
