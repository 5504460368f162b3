"""The service under test, and the faults that are injected into it.

A failure while no fault was injected is unexplained.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from test import serving
from test.ray_nodes import descendants

PASSWORD = "password-of-the-service"
HEADERS = {"Authorization": f"Bearer {PASSWORD}"}
"""Sent to every service, also to those without a password."""
RECOVERY_S = 180.0
"""Longest time until the service serves again. On idle cores an engine starts in a few seconds."""
AFTER_S = 3.0
"""A fault may still affect requests for this long after its end."""
PACKETS = (
    b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nZZZ\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nA:b\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n{",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\r\n\r\n\r\n",
)


class Service(serving.Service):
    """`app.py` with all its processes, ready; one HTTP worker unless the arguments say otherwise."""

    def __init__(self, folder: Path, *arguments: str, state_db: Path | str = "", **environment: str) -> None:
        super().__init__(folder, "--http-workers", "1", *arguments, state_db=state_db, **environment)
        self.wait_ready()

    def kill(self) -> None:
        """Send SIGKILL to every process. Each one leads its own process session, so killing the group is not enough."""
        family = descendants(self.process.pid)
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        while any(map(serving.is_process_alive, family)):
            time.sleep(0.005)

    def stop(self) -> None:
        try:
            self.terminate(60)
        except subprocess.TimeoutExpired:
            self.kill()


def logs(folder: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in sorted(folder.glob("service-*.log")))


@dataclass
class Disturbances:
    url: str
    counts: dict[str, int] = field(default_factory=dict)
    _times: list[tuple[float, float]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def explains(self, began: float, ended: float) -> bool:
        """Whether a fault overlaps this time span."""
        with self._lock:
            return any(began <= last + AFTER_S and first <= ended for first, last in self._times)

    @contextlib.contextmanager
    def _disturbing(self, kind: str) -> Iterator[None]:
        """Record a fault that lasts as long as the block."""
        span = (time.monotonic(), float("inf"))
        with self._lock:
            self._times.append(span)
        try:
            yield
        finally:
            with self._lock:
                self.counts[kind] = self.counts.get(kind, 0) + 1
                self._times[self._times.index(span)] = (span[0], time.monotonic())

    def kill(self, rng: random.Random) -> None:
        """Send SIGKILL to the engine or to one HTTP worker. Then wait until the service has recovered."""
        answer = httpx.get(f"{self.url}/status", timeout=10, verify=False, headers=HEADERS)
        status = answer.raise_for_status().json()["processes"]
        role = rng.choice(("engine", "http_worker"))
        pid = status["engine"]["pid"] if role == "engine" else rng.choice(status["http_workers"])["pid"]
        with self._disturbing(f"{role} killed"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self._wait_ready(len(status["http_workers"]))

    def _wait_ready(self, workers: int) -> None:
        deadline = time.monotonic() + RECOVERY_S
        while time.monotonic() < deadline:
            time.sleep(0.2)
            with contextlib.suppress(httpx.HTTPError, KeyError, ValueError):
                if httpx.get(f"{self.url}/readyz", timeout=2, verify=False).status_code == 200:
                    status = httpx.get(f"{self.url}/status", timeout=5, verify=False, headers=HEADERS).json()
                    if len(status["processes"]["http_workers"]) >= workers:
                        return
        raise RuntimeError(f"the service did not come back within {RECOVERY_S:g} s")

    def send_malformed(self, rng: random.Random) -> None:
        port = int(self.url.rpartition(":")[2])
        with (
            self._disturbing("malformed packets"),
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port), timeout=2) as connection,
        ):
            connection.sendall(rng.choice(PACKETS))
            connection.settimeout(0.3)
            connection.recv(4096)
