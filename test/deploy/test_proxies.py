"""deploy/: each proxy's configuration, run by Debian's program in front of a service."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from test.serving import ROOT, Service, free_port, read_all, wait_for

DEPLOY = ROOT / "deploy"
PROGRAMS = ("nginx", "caddy", "haproxy")
CHAT = "/v1/chat/completions"
ENDLESS: dict[str, Any] = {"contents": ["abc"], "max_tokens": 1_000_000, "stream": True, "chunk_size": 1}
pytestmark = pytest.mark.proxy

NGINX_MAIN = """{user}daemon off; pid {folder}/nginx.pid; error_log stderr; events {{}}
http {{ access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
fastcgi_temp_path {folder}/a; uwsgi_temp_path {folder}/b; scgi_temp_path {folder}/c; include {site}; }}"""


def found(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin")


def write_config(program: str, folder: Path, port: int, service_port: int) -> list[str]:
    """Write the shipped configuration with other ports; returns the command that runs it."""
    name = {"nginx": "nginx.conf", "caddy": "Caddyfile", "haproxy": "haproxy.cfg"}[program]
    text = (DEPLOY / name).read_text("utf-8").replace("127.0.0.1:8000", f"127.0.0.1:{service_port}")
    listen = {"nginx": ("listen 80;", f"listen 127.0.0.1:{port};"), "caddy": (":80 {", f"http://127.0.0.1:{port} {{")}
    text = text.replace(*listen.get(program, ("bind :80", f"bind 127.0.0.1:{port}")))
    assert str(port) in text
    file = folder / name
    if program == "caddy":
        text = "{\n\tadmin off\n}\n" + text
    file.write_text(text, "utf-8")
    if program == "nginx":
        main = folder / "main.conf"
        main.write_text(
            NGINX_MAIN.format(folder=folder, site=file, user="user root; " if os.getuid() == 0 else ""), "utf-8"
        )
        return ["-c", str(main), "-p", str(folder)]
    return ["run", "--config", str(file), "--adapter", "caddyfile"] if program == "caddy" else ["-f", str(file)]


@dataclass
class Front:
    """A proxy and the service behind it."""

    url: str
    port: int
    service: Service

    def send(self, *pieces: bytes) -> bytes:
        """Return the proxy's answer to these bytes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as connection:
            for piece in pieces:
                connection.sendall(piece)
            return read_all(connection)


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("behind")
    flags = ("--front", "none", "--trusted-proxies", "127.0.0.1")
    with Service(folder, *flags, program="test/fake_app.py", PYTHONPATH=".") as running:
        yield running


@contextlib.contextmanager
def run_proxy(name: str, folder: Path, service_port: int) -> Iterator[int]:
    """Run a proxy in front of a port. Yields its own port when it answers."""
    program = found(name)
    if program is None:
        pytest.skip(f"{name} is not installed")
    port = free_port()
    arguments = write_config(name, folder, port, service_port)
    log = folder / "proxy.log"
    with log.open("wb") as output:
        environment = {**os.environ, "HOME": str(folder)}
        process = subprocess.Popen([program, *arguments], stdout=output, stderr=output, env=environment)
    try:

        def answers() -> httpx.Response:
            assert process.poll() is None, log.read_text()
            return httpx.get(f"http://127.0.0.1:{port}/healthz")

        wait_for(answers, 30, "the proxy answers")
        yield port
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(params=PROGRAMS)
def front(request: pytest.FixtureRequest, behind: Service, tmp_path: Path) -> Iterator[Front]:
    with run_proxy(request.param, tmp_path, behind.port) as port:
        yield Front(f"http://127.0.0.1:{port}", port, behind)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_proxy_says_that_the_service_is_away(name: str, tmp_path: Path) -> None:
    with run_proxy(name, tmp_path, free_port()) as port:
        url = f"http://127.0.0.1:{port}{CHAT}"
        with ThreadPoolExecutor() as pool:  # HAProxy tries for seconds
            answers = list(pool.map(lambda body: httpx.post(url, content=body), (b"{}", b"x" * 100_000)))
        for answer in answers:
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
            assert "the service does not answer: it is starting" in answer.json()["error"]


def test_streams_are_not_buffered(front: Front) -> None:
    with httpx.stream("POST", front.url + CHAT, json=ENDLESS, timeout=60) as response:
        assert response.status_code == 200
        lines = (line for line in response.iter_lines() if line.startswith("data: "))
        assert "abc" in "".join(next(lines) for _ in range(5))  # an endless answer: nobody waits for its end
    wait_for(lambda: front.service.status()["running_rows"] == 0, 20, "a client that leaves ends its row")


def test_only_complete_requests_arrive(front: Front) -> None:
    before = front.service.pids()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    broken = front.send((head + "Transfer-Encoding: chunked\r\n\r\n").encode(), b"5\r\nabcde\r\nZZZ\r\n")
    assert b"choices" not in broken  # Caddy 2.6 answers 200 with nothing, the others an error
    assert front.service.pids() == before
    body = b'{"contents": ["abc"], "max_tokens": 3}'
    middle = len(body) // 2
    whole = front.send((head + f"Content-Length: {len(body)}\r\n\r\n").encode() + body[:middle], body[middle:])
    assert whole.startswith(b"HTTP/1.1 200"), whole
    answer = httpx.post(front.url + CHAT, json={"contents": ["x" * 3_000_000], "max_tokens": 1}, timeout=60)
    assert answer.status_code in (200, 422), answer.text[:300]
    with socket.create_connection(("127.0.0.1", front.port), timeout=30) as connection:
        connection.sendall((head + f"Content-Length: {1 << 30}\r\n\r\n").encode() + b"{")
        assert b"choices" not in connection.recv(65536)  # nginx would wait seconds for more before it closes
    assert front.service.pids() == before


def test_the_page_is_served(front: Front) -> None:
    page = httpx.get(front.url + "/", timeout=60)
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert httpx.get(front.url + "/web/app.js", timeout=60).status_code == 200
