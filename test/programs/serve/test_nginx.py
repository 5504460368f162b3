"""Debian's real nginx in front: requests that it must reject, and answers that it must pass on."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from programs.serve import nginx
from programs.serve.nginx import DEEPL_TRANSLATE, FORM_PATHS, find_nginx
from programs.settings import parse_settings
from routes.table import ROUTES
from test.programs.batch.test_openai_batches import client_of
from test.ray_nodes import descendants
from test.serving import ROOT, Service, free_port, is_process_alive, raw_request, read_all, wait_for

NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
CHAT = "/v1/chat/completions"
SHORT: dict[str, Any] = {"contents": ["abc"], "max_tokens": 3}
ENDLESS: dict[str, Any] = {"contents": ["abc"], "max_tokens": 1_000_000, "stream": True, "chunk_size": 1}
PASSWORD = "s3cret"
PAGE = "https://page.example"
HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n".encode()
pytestmark = [pytest.mark.proxy, pytest.mark.skipif(NGINX is None, reason="nginx is not installed")]


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service without a model behind nginx."""
    flags = ("--front", "nginx", "--max-body-mb", "0.01", "--max-state-mb", "0.02", "--max-streams-per-client", "4")
    flags += ("--cors-origin", PAGE)
    folder = tmp_path_factory.mktemp("proxied")
    with Service(folder, *flags, "--stall-timeout-s", "1", program="test/fake_app.py", PYTHONPATH=".") as running:
        yield running


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("locked")
    flags = ("--front", "nginx", "--password", PASSWORD, "--http-workers", "1")
    with Service(folder, *flags, program="test/fake_app.py", PYTHONPATH=".") as running:
        running.headers = {"Authorization": f"Bearer {PASSWORD}"}
        yield running


def raw_answer(service: Service, *pieces: bytes) -> bytes:
    with service.connect() as connection:
        for piece in pieces:
            connection.sendall(piece)
        return read_all(connection)


def head_and_body(service: Service, request: bytes) -> bytes:
    """Return the answer to a request whose body never comes: nginx waits seconds for it before it closes."""
    with service.connect() as connection:
        connection.sendall(request)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        return b"HTTP/1.1 %d\r\n%s\r\n%s" % (answer.status, bytes(answer.headers), answer.read())


def nginx_master(service: Service) -> int:
    """Return the process id of nginx's master; 0 if there is none."""
    for pid in descendants(service.process.pid):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"nginx: master"):
                return pid
    return 0


@pytest.mark.parametrize(
    ("framing", "status"),
    [
        (b"Transfer-Encoding: chunked\r\n\r\nZZZ\r\n", b"400"),
        (b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n", b"400"),
        (b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n", b"400"),
        (b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", b"501"),
        (b"Content-Length: -1\r\n\r\n", b"400"),
    ],
)
def test_malformed_framing_ends_at_nginx(proxied: Service, framing: bytes, status: bytes) -> None:
    before = proxied.pids()
    assert raw_answer(proxied, HEAD + framing).startswith(b"HTTP/1.1 " + status)
    assert proxied.pids() == before


def test_forms_get_an_error_that_names_json(proxied: Service) -> None:
    """Robyn parses forms itself, before authentication."""
    for kind, body in (("multipart/form-data", b"--x"), ("multipart/form-data; boundary=x", b"--x\r\n\r\nabc")):
        answer = proxied.post(CHAT, content=body, headers={"Content-Type": kind})
        assert answer.status_code == 400 and "JSON" in answer.json()["error"]
    assert proxied.post(CHAT, content=json.dumps(SHORT), headers={"Content-Type": "multipart/x"}).status_code == 200


def test_a_repeated_translation_for_deepl_runs_once(proxied: Service) -> None:
    body = {"text": ["A slow text. " * 2], "target_lang": "DE", "source_lang": "EN", "split_sentences": "0"}
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(proxied.post, DEEPL_TRANSLATE, body) for _ in range(2)]
        running = [0]
        while not all(one.done() for one in answers):
            running.append(proxied.status()["jobs"].get(DEEPL_TRANSLATE, 0))
    assert {one.result().status_code for one in answers} == {200}
    assert max(running) == 1, "the workers do not share answers"


def test_files_are_uploaded_with_openais_client(proxied: Service) -> None:
    client = client_of(proxied)
    content = b'{"a": "\xff"}\r\n\x00'
    file = client.files.create(file=("lines.jsonl", content), purpose="batch")
    assert client.files.content(file.id).content == content
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("lines.jsonl", content), purpose="vision")


def test_nginx_passes_the_forms_of_every_route_that_takes_one() -> None:
    assert set(FORM_PATHS) == {route.path for route in ROUTES if route.takes_form}


@pytest.mark.parametrize("framing", ["Content-Length: 65537", "Content-Length: 30000000", "Transfer-Encoding: chunked"])
@pytest.mark.parametrize("secret", ["", "Authorization: Bearer wrong\r\n"])
def test_a_strangers_large_body_is_refused_by_its_header(locked: Service, framing: str, secret: str) -> None:
    """The body is never sent here: an nginx that reads it first would not answer."""
    for path in (CHAT, "/openai/v1/files"):
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{secret}{framing}\r\n\r\n"
        answer = head_and_body(locked, head.encode())
        assert answer.startswith(b"HTTP/1.1 401"), answer
        assert b"or in chunks needs it as a header, Authorization: Bearer" in answer
        assert answer.lower().count(b"www-authenticate: bearer") == 1
        assert (b'"authentication_error"' in answer) == path.startswith("/openai/")


def test_bodies_with_the_password_pass_nginx(locked: Service) -> None:
    large = {**SHORT, "unknown": "x" * 5_000_000}
    assert locked.post(CHAT, large).status_code == 200
    body = json.dumps(large).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: Bearer {PASSWORD}\r\n"
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    assert raw_answer(locked, head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + chunks).startswith(
        b"HTTP/1.1 200"
    )
    for size, status in ((60_000, 200), (65_536, 200), (65_537, 401)):
        body = json.dumps({**SHORT, "password": PASSWORD, "unknown": ""}).encode()
        body = body[:-2] + b"x" * (size - len(body)) + body[-2:]
        assert locked.post(CHAT, content=body, headers={"Authorization": ""}).status_code == status
    assert locked.request("GET", "/own-authz").status_code == 404


def test_a_correct_chunked_body_with_a_trailer_is_served(proxied: Service) -> None:
    before, body = proxied.pids(), json.dumps(SHORT).encode()
    chunks = b"%x\r\n%s\r\n0\r\nX-Checksum: 1\r\n\r\n" % (len(body), body)
    answer = raw_answer(proxied, HEAD + b"Trailer: X-Checksum\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"abcabcabc" in answer
    assert proxied.pids() == before


def test_a_body_that_is_cut_never_reaches_a_worker(proxied: Service) -> None:
    with proxied.connect() as connection:
        connection.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
        connection.shutdown(socket.SHUT_WR)
        assert b"200" not in read_all(connection)[:20]
    assert proxied.post(CHAT, SHORT).status_code == 200


def test_events_come_one_by_one(proxied: Service) -> None:
    with proxied.connect() as connection:
        connection.sendall(raw_request(CHAT, json.dumps(ENDLESS).encode()))
        received = b""
        while received.count(b"abc") < 3:  # the stream has no end: a proxy that gathers would never let this pass
            received += connection.recv(65536)
    wait_for(lambda: proxied.status()["running_rows"] == 0, 10, "the client's end is noticed")


def test_clients_of_http_1_0_get_a_body_that_ends(proxied: Service) -> None:
    body = json.dumps({**SHORT, "stream": True}).encode()
    head = f"POST {CHAT} HTTP/1.0\r\nConnection: Keep-Alive\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    head_only, _, text = raw_answer(proxied, head + body).partition(b"\r\n\r\n")
    assert b"chunked" not in head_only.lower()
    events = [event for event in text.split(b"\n\n") if not event.startswith(b":")]  # a slow engine brings heartbeats
    assert events[0].startswith(b"data: ")
    assert text.endswith(b"data: [DONE]\n\n")


def test_nginx_errors_have_the_services_format(proxied: Service) -> None:
    large = proxied.post(CHAT, content=b"x" * 30_000, headers={"Origin": PAGE})
    assert large.status_code == 413
    assert "--max-body-mb" in large.json()["error"]
    assert large.headers["access-control-allow-origin"] == PAGE
    foreign = proxied.post(CHAT, content=b"x" * 30_000, headers={"Origin": f"{PAGE}.evil"})
    assert foreign.status_code == 413 and "access-control-allow-origin" not in foreign.headers
    refused = proxied.post("/openai/v1/chat/completions", content=b"x" * 30_000)
    assert refused.status_code == 413
    assert refused.json()["error"]["type"] == "invalid_request_error"


def test_the_limit_for_a_client_counts_the_address_that_nginx_saw(proxied: Service) -> None:
    connections = [proxied.connect() for _ in range(8)]
    try:
        for connection in connections:
            connection.sendall(raw_request(CHAT, json.dumps(ENDLESS).encode(), extra="X-Forwarded-For: 6.6.6.6\r\n"))
        for connection in connections:  # nobody else has a place before they have theirs
            assert connection.recv(12) in (b"HTTP/1.1 200", b"HTTP/1.1 429")
        wait_for(lambda: _streams(proxied) == 8, 10, "4 streams of each worker")
    finally:
        for connection in connections:
            connection.close()


def _streams(service: Service) -> int:
    refused = service.post(CHAT, SHORT, headers={"X-Forwarded-For": "7.7.7.7"})
    assert refused.status_code in (200, 429)
    if refused.status_code == 429:
        # nginx's own limit, or a worker's, which names the client.
        message = refused.json()["error"]
        assert "127.0.0.1" in message or "--max-streams-per-client" in message
        return 8
    return 0


def test_a_client_that_leaves_before_its_answer_is_noticed(proxied: Service) -> None:
    proxied.wait_idle()
    with proxied.connect() as connection:
        connection.sendall(raw_request(CHAT, json.dumps({"contents": ["held"], "max_tokens": 1}).encode()))
        wait_for(lambda: proxied.status()["running_rows"] == 1, 10, "the row runs")
    wait_for(lambda: proxied.status()["running_rows"] == 0, 10, "the row is cancelled")


def test_a_client_that_reads_nothing_is_disconnected(proxied: Service) -> None:
    proxied.wait_idle()
    with proxied.connect() as connection:
        connection.sendall(raw_request(CHAT, json.dumps({**ENDLESS, "contents": ["flood"]}).encode()))
        assert connection.recv(12) == b"HTTP/1.1 200"  # and no more
        wait_for(lambda: proxied.status()["running_rows"] == 0, 30, "the row is cancelled")


def test_streams_of_a_killed_worker_end_with_an_error_event(proxied: Service) -> None:
    """Only those: the other worker's streams go on."""
    proxied.wait_idle()
    killed, streams = proxied.pids()["http-0"], [proxied.connect() for _ in range(6)]
    try:
        received = [b""] * len(streams)
        for stream in streams:
            stream.sendall(raw_request(CHAT, json.dumps({**ENDLESS, "contents": ["xyz"]}).encode()))
        for number, stream in enumerate(streams):
            while received[number].count(b"data: ") < 5:
                received[number] += stream.recv(65536)
        os.kill(killed, signal.SIGKILL)
        for number, stream in enumerate(streams):
            more = b""
            while more.count(b"xyz") < 100 and (piece := stream.recv(65536)):
                more += piece
            received[number] = more
    finally:
        for stream in streams:
            stream.close()
    cut = [text for text in received if text.count(b"xyz") < 100]
    assert 0 < len(cut) < len(streams)
    for text in cut:
        assert b"the HTTP worker process of this stream was lost" in text
        assert text.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"), "the body is whole"


def test_a_worker_that_is_replaced_is_taken_back_at_once(proxied: Service) -> None:
    for _ in range(3):
        before = proxied.pids()
        os.kill(before["http-0"], signal.SIGKILL)
        wait_for(lambda before=before: proxied.pids().get("http-0") not in (None, before["http-0"]), 30, "another one")
        assert [proxied.post(CHAT, SHORT).status_code for _ in range(8)] == [200] * 8


def test_an_nginx_that_is_killed_is_started_again_without_a_refused_connection(proxied: Service) -> None:
    master = nginx_master(proxied)
    assert os.getsid(master) == os.getsid(proxied.process.pid) and os.getpgid(master) == master  # as all its processes
    os.kill(master, signal.SIGKILL)

    def answer() -> bytes:
        with contextlib.suppress(ConnectionResetError):  # taken by a process of the old nginx in its last moment
            return raw_answer(proxied, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return b""

    wait_for(answer, 30, "an answer; a refused connection would be an error")
    wait_for(lambda: nginx_master(proxied) not in (0, master), 30, "another nginx")
    wait_for(lambda: proxied.get("/readyz").status_code == 200, 30, "served again")


def test_nginx_killed_with_its_parent_leaves_no_workers(proxied: Service) -> None:
    """Remaining nginx workers would keep the port and take connections."""
    master = nginx_master(proxied)
    runs_it = _parent(master)
    os.kill(runs_it, signal.SIGSTOP)  # it would notice
    for pid in (master, runs_it):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not _has_processes(master), 30, "no process of it is left")
    wait_for(lambda: nginx_master(proxied) not in (0, master), 30, "another nginx")
    wait_for(lambda: proxied.get("/readyz").status_code == 200, 30, "served again")


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _has_processes(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_sigterm_finishes_streams_through_nginx_and_leaves_nothing(tmp_path: Path) -> None:
    with Service(tmp_path, "--front", "nginx", program="test/fake_app.py", PYTHONPATH=".") as service:
        master, received = nginx_master(service), []
        body = json.dumps({**ENDLESS, "contents": ["xyz"], "max_tokens": 500}).encode()
        reader = threading.Thread(target=lambda: received.append(raw_answer(service, raw_request(CHAT, body))))
        reader.start()
        wait_for(lambda: service.status()["running_rows"] == 1, 10, "a stream runs")
        service.process.send_signal(signal.SIGTERM)
        wait_for(lambda: all(service.get("/readyz").status_code == 503 for _ in range(16)), 10, "every worker drains")
        assert service.post(CHAT, SHORT).status_code == 503
        reader.join(60)
        assert received[0].count(b"xyz") == 500  # letters that no identifier or length in hexadecimal has
        assert b"[DONE]" in received[0]
        assert service.process.wait(60) == 0
        assert not Path(f"/proc/{master}").exists()


def test_a_request_after_the_workers_ended_gets_an_immediate_error(tmp_path: Path) -> None:
    """Otherwise it would wait for a worker until its timeout. This would keep the service running."""
    with Service(tmp_path, "--front", "nginx", program="test/fake_app.py", PYTHONPATH=".") as service:
        workers = [pid for name, pid in service.pids().items() if name.startswith("http-")]
        request = raw_request(CHAT, json.dumps(SHORT).encode(), extra="Expect: 100-continue\r\n")
        with service.connect() as connection:
            connection.sendall(request[:-1])
            assert b"100 Continue" in connection.recv(100), "nginx has it"
            service.process.send_signal(signal.SIGTERM)
            wait_for(lambda: not any(is_process_alive(pid) for pid in workers), 30, "the workers have ended")
            connection.sendall(request[-1:])
            answer = read_all(connection)
        assert answer.startswith(b"HTTP/1.1 502") and b"retry the request" in answer
        assert service.process.wait(60) == 0


def test_nginx_ends_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    with Service(tmp_path, "--front", "nginx", program="test/fake_app.py", PYTHONPATH=".") as service:
        master = nginx_master(service)
        service.process.kill()
        service.process.wait(60)
        wait_for(lambda: not Path(f"/proc/{master}").exists(), 20, "nginx has ended")
        wait_for(lambda: _is_refused(service.port), 20, "nobody holds the port")


def _is_refused(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED


def test_two_services_with_nginx_do_not_share_a_port(proxied: Service, tiny_model: Path) -> None:
    command = [sys.executable, "app.py", "--port", str(proxied.port), "--front", "nginx", "--state-db", ""]
    ended = subprocess.run(
        [*command, "--model-path", str(tiny_model)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 1
    assert f"port {proxied.port}" in ended.stderr


@pytest.mark.parametrize(
    ("host", "front", "used"),
    [
        ("127.0.0.1", "auto", False),
        ("127.0.0.1", "nginx", True),
        ("0.0.0.0", "auto", True),
        ("::1", "auto", False),
        ("0.0.0.0", "none", False),
    ],
)
def test_nginx_is_used_for_public_addresses(host: str, front: str, used: bool) -> None:
    settings = parse_settings(["--host", host, "--front", front, "--port", str(free_port())], {})
    assert (find_nginx(settings) is not None) == used


def test_a_public_address_without_nginx_logs_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nginx, "_SYSTEM_PATHS", "")
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_nginx(parse_settings(["--host", "0.0.0.0"], {})) is None
    assert "NO PROXY IN FRONT" in caplog.text
    with pytest.raises(Exception, match="nginx-light"):
        find_nginx(parse_settings(["--host", "0.0.0.0", "--front", "nginx"], {}))
