"""A client that sends without end, without nginx in front."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from routes.context import RequestLimiter
from routes.serving import upload_guard
from routes.serving.connections import Connection
from routes.serving.upload_guard import MAX_STUCK_CHECKS, BrokenForms, UploadGuard
from test.serving import Service, read_all, wait_for

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
MIB = 1 << 20
SENT_MIB = 2048
SECRET = "Authorization: Bearer s3cret\r\n"


def resident_mib(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().partition("VmHWM:")[2].split()[0]) // 1024


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service whose key holders may send 2 MiB."""
    flags = ("--http-workers", "1", "--password", "s3cret", "--max-body-mb", "2", "--max-state-mb", "2")
    with Service(tmp_path_factory.mktemp("small"), *flags, program="test/fake_app.py", PYTHONPATH=".") as running:
        running.headers = {"Authorization": "Bearer s3cret"}
        yield running


@pytest.mark.parametrize("framing", [f"Content-Length: {SENT_MIB * MIB}", "Transfer-Encoding: chunked"])
def test_a_body_without_end_is_cut_off(small: Service, framing: str) -> None:
    before = small.pids()
    peak = resident_mib(before["http-0"])
    large = json.dumps({"contents": ["a"], "max_tokens": 1, "unknown": "x" * MIB})
    with httpx.Client(base_url=small.url, headers=small.headers) as client:
        for _ in range(40):  # many answered bodies on one connection are no endless one
            assert client.post(CHAT, content=large).status_code == 200
    piece = b"%x\r\n%s\r\n" % (MIB, b"x" * MIB) if "chunked" in framing else b"x" * MIB
    with small.connect() as connection:
        send_head(connection, f"POST {CHAT}", f"{framing}\r\n{SECRET}")
        sent = 0
        with contextlib.suppress(OSError):
            while sent < SENT_MIB:
                connection.sendall(piece)
                sent += 1
        assert sent < SENT_MIB, "it was read to the end"
        assert read_all(connection) == b""
    assert resident_mib(before["http-0"]) - peak < SENT_MIB / 2
    assert small.pids() == before
    refused = small.post(CHAT, content=b"x" * 3 * MIB)
    assert refused.status_code == 413, "a body that is a little too large gets the reason"


@pytest.fixture(scope="module")
def direct(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service whose key holders may send 80 MiB on a connection. Others may send 16 MiB."""
    flags = ("--http-workers", "1", "--password", "s3cret", "--max-body-mb", "64", "--max-state-mb", "8")
    with Service(tmp_path_factory.mktemp("direct"), *flags, program="test/fake_app.py", PYTHONPATH=".") as running:
        yield running


def test_many_small_bodies_do_not_close_another_clients_large_one(direct: Service) -> None:
    """All bodies without a secret may have 64 MiB. The bodies of the second address would have 160."""
    head = f"POST /state/import?session_id=a HTTP/1.1\r\nHost: localhost\r\nContent-Length: {8 * MIB}\r\n"
    large, *small = [socket.socket() for _ in range(41)]
    with contextlib.ExitStack() as opened:
        for number, connection in enumerate([large, *small]):
            opened.enter_context(connection)
            connection.bind((f"127.0.0.{2 if number else 1}", 0))
            connection.connect(("127.0.0.1", direct.port))
        large.sendall(f"{head}\r\n".encode() + b"x" * 7 * MIB)
        for connection in small:
            with contextlib.suppress(OSError):
                connection.sendall(f"{head}\r\n".encode() + b"x" * 4 * MIB)
        wait_for(lambda: any(map(is_closed, small)), 20, "some of them are closed")
        large.sendall(b"x" * MIB)
        assert large.recv(12) == b"HTTP/1.1 401"


def test_the_size_of_a_session_file_is_limited(direct: Service) -> None:
    path, large = "/state/import?session_id=large", b"x" * 9 * MIB
    refused = direct.post(path, content=large, headers={"Authorization": "Bearer s3cret"})
    assert refused.status_code == 413 and "--max-state-mb" in refused.json()["error"]
    assert direct.get("/state/export?session_id=s").status_code == direct.post(path, content=b"x").status_code == 401


@pytest.mark.parametrize("first", ["", "GET /healthz", "GET /v1/models"])
def test_a_large_body_without_a_secret_is_cut_off(direct: Service, first: str) -> None:
    """Robyn would read it to its end. The connection's earlier requests change nothing."""
    with direct.connect() as connection:
        if first:
            send_head(connection, first)
            assert read_answer(connection)
        send_head(connection, f"POST {CHAT}", f"Content-Length: {64 * MIB}\r\n")
        with contextlib.suppress(OSError):
            for _ in range(40):
                connection.sendall(b"x" * MIB)
        wait_for(lambda: is_closed(connection), 20, "the connection is closed")
        answer = connection.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 401 Unauthorized\r\n") and b"Authorization: Bearer" in answer


@pytest.mark.parametrize("is_first", [True, False])
def test_a_secret_in_the_first_request_or_an_answered_one_allows_a_large_body(direct: Service, is_first: bool) -> None:
    body = json.dumps({"contents": ["a"], "max_tokens": 1, "unknown": "x" * 40 * MIB}).encode()
    with direct.connect() as connection:
        if not is_first:
            send_head(connection, "GET /healthz")
            assert read_answer(connection).startswith(b"HTTP/1.1 200")
            send_head(connection, "GET /v1/models", SECRET)
            assert read_answer(connection).startswith(b"HTTP/1.1 200")
        send_head(connection, f"POST {CHAT}", f"Content-Length: {len(body)}\r\n{SECRET}")
        connection.sendall(body)
        assert read_answer(connection).startswith(b"HTTP/1.1 200")


@contextlib.contextmanager
def stuck(count: int, sent: bytes = b"form") -> Iterator[tuple[list[socket.socket], list[Connection]]]:
    """Connections with a part of an unanswered request: the clients' ends, and ours as the guard knows them."""
    clients, connections = [], []
    with contextlib.ExitStack() as opened, socket.create_server(("127.0.0.1", 0)) as listener:
        for number in range(count):
            clients.append(opened.enter_context(socket.create_connection(listener.getsockname(), 5)))
            ours = opened.enter_context(listener.accept()[0])
            clients[number].sendall(sent)
            ours.recv(len(sent))
            connections.append(Connection(number, ours.fileno(), os.fstat(ours.fileno()).st_ino, ""))
        yield clients, connections


@pytest.mark.parametrize(
    ("sent", "handled", "has_left", "ends"),
    [
        (b"form", 0, True, True),
        (b"form", 0, False, False),  # a slow client
        (b"form", 4, True, False),  # its request is being answered
        (b"", 0, True, False),
    ],
)
def test_a_worker_full_of_stuck_connections_ends(
    monkeypatch: pytest.MonkeyPatch, sent: bytes, handled: int, has_left: bool, ends: bool
) -> None:
    """Robyn never answers a form that ends with a line break before its last boundary, and keeps its connection."""
    monkeypatch.setattr(upload_guard, "MAX_STUCK", 2)
    limiter = RequestLimiter(9)
    guard = UploadGuard(MIB, limiter)
    with stuck(2, sent) as (clients, connections):
        for client, connection in zip(clients, connections, strict=True):
            connection.handled_bytes = handled
            if has_left:
                client.shutdown(socket.SHUT_WR)
        found = [guard.check(connections) for _ in range(MAX_STUCK_CHECKS)]
        assert found == [False] * (MAX_STUCK_CHECKS - 1) + [ends]
        assert not guard.check(connections[:1]), "one alone"
        limiter.acquire(True, "a client whose stream runs")
        assert not any(guard.check(connections) for _ in range(MAX_STUCK_CHECKS))


def test_stuck_connections_do_not_end_an_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload_guard, "MAX_STUCK", 0)
    guard = UploadGuard(MIB, RequestLimiter(9))
    with stuck(1) as (_, connections):
        assert not any(guard.check(connections) for _ in range(MAX_STUCK_CHECKS))


@pytest.mark.parametrize("has_left", [True, False])
def test_a_stuck_connection_does_not_hide_the_reason_of_another_broken_form(
    monkeypatch: pytest.MonkeyPatch, has_left: bool
) -> None:
    """Robyn logs no connection with the reason, so only one may have an unanswered request."""
    with stuck(2) as (clients, connections):
        if has_left:
            clients[0].shutdown(socket.SHUT_WR)
        monkeypatch.setattr(upload_guard, "known_connections", lambda: connections)
        reason = "Failed to parse request for `/v1/states`: no boundary"
        record = logging.LogRecord(upload_guard.ROBYN_SERVER, logging.ERROR, "", 0, reason, None, None)
        forms = BrokenForms({})
        forms.filter(record)
        assert not select.select(clients, [], [], 0)[0], "it may be the other client's form"
        wait_for(lambda: connections[0].idle_s() > 2, 60, "the first client is idle")
        clients[1].sendall(b"form")
        monkeypatch.setattr(upload_guard, "MAX_IDLE_S", connections[0].idle_s() - 0.1)  # the second one has nearly 2 s
        forms.filter(record)
        assert b" 400 Bad Request" in clients[1].recv(100)
        assert not select.select(clients[:1], [], [], 0)[0]


def send_head(connection: socket.socket, request: str, headers: str = "") -> None:
    connection.sendall(f"{request} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n".encode())


def read_answer(connection: socket.socket) -> bytes:
    """Return an answer with a Content-Length, and nothing after it."""
    head, body = b"", b""
    while b"\r\n\r\n" not in head:
        head += connection.recv(1 << 16)
    head, _, body = head.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split()[0])
    while len(body) < length:
        body += connection.recv(1 << 16)
    return head + body


def is_closed(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))
