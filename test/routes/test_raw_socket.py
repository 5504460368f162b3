"""Abuses of the protocol, while other clients send normal requests.

The abuses are generated from a seed. The other clients' answers never change. Without nginx, Robyn aborts a worker at
some abuses: its answers may be cut off, but are never wrong and never a 5xx. With nginx, they notice nothing.
RWKV_LONG_TESTS=1 runs 2,000 of each kind and measures the longest gap.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from test.serving import Service, wait_for

pytestmark = pytest.mark.slow

IS_LONG = os.environ.get("RWKV_LONG_TESTS") == "1"
ABUSES = 2000 if IS_LONG else 150
SILENCE_S = 0.3
HEARTBEAT_INTERVAL_S = 0.3
"""How long an abuser waits for an answer."""
CHAT = "/v1/chat/completions"
WORD, TOKENS = "abc", 40
BODY = json.dumps({"contents": [WORD], "max_tokens": TOKENS, "chunk_size": 1, "stream": True}).encode()
ENDLESS = json.dumps({"contents": ["x"], "max_tokens": 100_000, "chunk_size": 1, "stream": True}).encode()
NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
Pieces = list[bytes]


def head(dice: random.Random, *lines: bytes) -> bytes:
    """Return a request's head with these lines."""
    target = dice.choice([b"GET /healthz", b"POST /v1/chat/completions", b"POST /nowhere", b"GET /", b"DELETE /x"])
    return b"\r\n".join([target + b" HTTP/1.1", b"Host: localhost", *lines, b"", b""])


def noise(dice: random.Random, length: int) -> bytes:
    return dice.randbytes(dice.randint(1, length))


CHUNKED = b"Transfer-Encoding: chunked"


def bad_chunk(dice: random.Random) -> Pieces:
    sizes = [b"ZZZ", b"-1", b"", b"0x5", b"f" * 17, b"5;" + b"e" * 5000, b"5 5", b"\x00", b"+3"]
    return [head(dice, CHUNKED), dice.choice(sizes) + b"\r\nhello\r\n0\r\n\r\n"]


def chunk_without_end(dice: random.Random) -> Pieces:
    return [head(dice, CHUNKED), b"5\r\nhello" + dice.choice([b"x\r\n0\r\n\r\n", b"\n0\n\n", b"", b"\r\n5\r\nhe"])]


def trailers(dice: random.Random) -> Pieces:
    lines = [b"X-T: 1", b"Content-Length: 5", b"no colon", b"X" * 9000 + b": 1", b"X-T: \x00"]
    return [head(dice, CHUNKED), b"2\r\n{}\r\n0\r\n" + dice.choice(lines) + b"\r\n\r\n"]


def half_head(dice: random.Random) -> Pieces:
    whole = head(dice, b"X-A: 1", b"Content-Length: 2")
    return [whole[: dice.randint(1, len(whole) - 1)]]


def huge_head(dice: random.Random) -> Pieces:
    return [head(dice, *[b"X-%d: %s" % (n, b"a" * dice.randint(1, 9000)) for n in range(dice.choice([3, 40, 200]))])]


def huge_target(dice: random.Random) -> Pieces:
    return [b"GET /" + b"a" * dice.choice([8000, 20_000, 200_000]) + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"]


def pipelined(dice: random.Random) -> Pieces:
    one = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    return [one * dice.randint(2, 60) + dice.choice([b"", b"garbage\r\n\r\n", one[:20]])]


def wrong_lengths(dice: random.Random) -> Pieces:
    lengths = [b"-1", b"+5", b"5, 6", b"0x10", b"99999999999999999999", b"1e3", b" ", b"5\r\nContent-Length: 6"]
    return [head(dice, b"Content-Length: " + dice.choice(lengths)), b"hello"]


def two_framings(dice: random.Random) -> Pieces:
    return [head(dice, b"Content-Length: 4", CHUNKED), b"0\r\n\r\nGET /healthz HTTP/1.1\r\n\r\n"]


def strange_encodings(dice: random.Random) -> Pieces:
    names = [b"gzip", b"chunked, chunked", b"identity", b"xchunked", b"chunked\x0b", b" chunked", b"CHUNKED"]
    return [head(dice, b"Transfer-Encoding: " + dice.choice(names)), b"2\r\n{}\r\n0\r\n\r\n"]


def early_close(dice: random.Random) -> Pieces:
    return [head(dice, b"Content-Length: 100000"), noise(dice, 5000)]


def garbage(dice: random.Random) -> Pieces:
    return [noise(dice, 4000) for _ in range(dice.randint(1, 4))]


def broken_lines(dice: random.Random) -> Pieces:
    lines = [b"GET / HTTP/9.9", b"GET / HTTP/1.1 x", b"GET\x00/ HTTP/1.1", b" GET / HTTP/1.1", b"GET http://[ HTTP/1.1"]
    lines += [b"PRI * HTTP/2.0", b"\x16\x03\x01\x02", b"G" * 70_000]
    return [dice.choice(lines) + b"\r\nHost: localhost\r\n\r\n"]


def slow_bytes(dice: random.Random) -> Pieces:
    whole = head(dice, b"Content-Length: 2") + b"{}"
    return [whole[n : n + 8] for n in range(0, len(whole), 8)]


def left_stream(dice: random.Random) -> Pieces:
    return [f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(ENDLESS)}\r\n\r\n".encode() + ENDLESS]


def upgrades(dice: random.Random) -> Pieces:
    lines = [b"Upgrade: websocket\r\nConnection: Upgrade", b"Expect: 100-continue\r\nContent-Length: 9", b"Expect: x"]
    return [head(dice, dice.choice([*lines, b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c"]))]


KINDS: tuple[Callable[[random.Random], Pieces], ...] = (
    *(bad_chunk, chunk_without_end, trailers, half_head, huge_head, huge_target, pipelined, wrong_lengths),
    *(two_framings, strange_encodings, early_close, garbage, broken_lines, slow_bytes, left_stream, upgrades),
)


def abuse(service: Service, dice: random.Random) -> None:
    """Run one abusive connection and return how it ended."""
    pieces = KINDS[dice.randrange(len(KINDS))](dice)
    with contextlib.suppress(OSError), service.connect() as connection:
        connection.settimeout(HEARTBEAT_INTERVAL_S)
        for piece in pieces:
            connection.sendall(piece)
            if len(pieces) > 4:
                time.sleep(0.002)
        ending = dice.choice(["reset", "close", "half", "listen"])
        if ending == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif ending == "half":
            connection.shutdown(socket.SHUT_WR)
        if ending in ("half", "listen"):
            connection.recv(65536)


LOST = "the HTTP worker process of this stream was lost"
"""Error event of a stream that was cut off."""


class Neighbours:
    """Clients with normal requests, one after another, and their answers."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._ends = threading.Event()
        self.wrong: list[str] = []
        self.cut = 0
        self.whole = 0
        self.answered: list[float] = []
        self._threads = [threading.Thread(target=self._ask) for _ in range(2)]
        self._threads += [threading.Thread(target=self._probe) for _ in range(3)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Stop after the running requests."""
        self._ends.set()
        for thread in self._threads:
            thread.join()

    @property
    def silence_s(self) -> float:
        """The longest time without an answer."""
        times = sorted(self.answered)
        return max(after - before for before, after in itertools.pairwise(times))

    def _failed(self, error: httpx.HTTPError) -> None:
        """Record a lost answer: its worker was lost. Another worker must always listen."""
        self.cut += 1
        if isinstance(error, httpx.ConnectError | httpx.TimeoutException):
            self.wrong.append(repr(error))

    def _ask(self) -> None:
        while not self._ends.is_set():
            try:
                answer = httpx.post(self._service.url + CHAT, content=BODY, timeout=60)
            except httpx.HTTPError as error:
                self._failed(error)
                continue
            text = answer.text
            if LOST in text and text.count("[DONE]") == 1 and text.endswith("data: [DONE]\n\n"):
                self.cut += 1
                continue
            if answer.status_code != 200 or text.count(WORD) != TOKENS or "[DONE]" not in text or "error" in text:
                self.wrong.append(f"{answer.status_code} {text[-500:]}")
            self.whole += 1

    def _probe(self) -> None:
        while not self._ends.is_set():
            try:
                answer = httpx.get(self._service.url + "/healthz", timeout=60)
            except httpx.HTTPError as error:
                self._failed(error)
                continue
            if answer.status_code != 200:
                self.wrong.append(f"{answer.status_code} {answer.text}")
            self.answered.append(time.monotonic())
            time.sleep(0.005)


@pytest.fixture(
    params=[
        "none",
        pytest.param(
            "nginx", marks=[pytest.mark.proxy, pytest.mark.skipif(NGINX is None, reason="nginx is not installed")]
        ),
    ]
)
def front(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def service(front: str, tmp_path: Path) -> Iterator[Service]:
    with Service(tmp_path, "--front", front, program="test/fake_app.py", PYTHONPATH=".") as running:
        yield running


@pytest.mark.timeout(1800 if IS_LONG else 180)
def test_other_clients_are_not_affected_by_abuse(service: Service, front: str, record_property: Any) -> None:
    before = service.pids()
    neighbours = Neighbours(service)
    try:
        for seed in range(ABUSES):
            abuse(service, random.Random(seed))
    finally:
        neighbours.end()
    wait_for(lambda: service.get("/readyz").status_code == 200, 30, "ready")
    wait_for(lambda: service.status()["running_rows"] == 0, 30, "no row is left")
    record_property("silence_s", neighbours.silence_s)
    print(f"{front}: {neighbours.whole} whole, {neighbours.cut} cut, silence {neighbours.silence_s:.3f} s")
    assert neighbours.wrong == []
    assert neighbours.whole > 0
    assert "is tried in" not in service.log.read_text(), "a replacement had to wait"
    assert service.pids()["engine"] == before["engine"]
    if front == "nginx":
        assert neighbours.cut == 0
        assert service.pids() == before
    if IS_LONG:
        assert neighbours.silence_s < SILENCE_S
