"""What chaos does to the service, and when: whatever fails outside these times has no excuse."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx

AFTER_S = 3.0
"""For so long after a disturbance has passed a request may still have met it."""
PACKETS = (
    b"GET /healthz HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZZ\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nA: b\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n{",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\r\n\r\n\r\n",
)


@dataclass
class Disturbances:
    """Times at which something was broken on purpose."""

    url: str
    counts: dict[str, int] = field(default_factory=dict)
    _times: list[tuple[float, float]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def explains(self, began: float, ended: float) -> bool:
        """Whether a request of that time may have met one."""
        with self._lock:
            return any(began <= last + AFTER_S and first <= ended for first, last in self._times)

    @contextlib.contextmanager
    def _disturbing(self, kind: str) -> Iterator[None]:
        """From now until the end of the block, whatever fails is explained by it."""
        time_now = (time.monotonic(), float("inf"))
        with self._lock:
            self._times.append(time_now)
        try:
            yield
        finally:
            with self._lock:
                self.counts[kind] = self.counts.get(kind, 0) + 1
                self._times[self._times.index(time_now)] = (time_now[0], time.monotonic())

    def kill(self, draw: random.Random) -> None:
        """SIGKILL to the engine or to one HTTP worker, and wait until the service is whole again."""
        status = httpx.get(f"{self.url}/status", timeout=10, verify=False).json()["processes"]
        role = draw.choice(("engine", "http_worker"))
        pid = status["engine"]["pid"] if role == "engine" else draw.choice(status["http_workers"])["pid"]
        with self._disturbing(f"{role} killed"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self._wait_ready(len(status["http_workers"]))

    def _wait_ready(self, workers: int) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            time.sleep(0.2)
            with contextlib.suppress(httpx.HTTPError, KeyError, ValueError):
                if httpx.get(f"{self.url}/readyz", timeout=2, verify=False).status_code == 200:
                    processes = httpx.get(f"{self.url}/status", timeout=5, verify=False).json()["processes"]
                    if len(processes["http_workers"]) >= workers:
                        return
        raise RuntimeError("the service did not come back within a minute")

    def abuse(self, draw: random.Random) -> None:
        """A packet that is no request."""
        port = int(self.url.rpartition(":")[2])
        with (
            self._disturbing("malformed packets"),
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port), timeout=2) as connection,
        ):
            connection.sendall(draw.choice(PACKETS))
            connection.settimeout(0.3)
            connection.recv(4096)
