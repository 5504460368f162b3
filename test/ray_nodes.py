"""Starts Ray nodes on one machine, each with its own loopback address."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

START_S = 90.0
ATTEMPTS = 5
"""Ray allows its processes about 15 s to start; a busy machine may need longer."""
OBJECT_STORE_BYTES = 80_000_000


def free_port() -> int:
    """Return a free port outside the range of client ports."""
    first, _ = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    for port in random.SystemRandom().sample(range(20_000, max(first, 30_000)), 100):  # Ray's ports are lower
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")


class RayNodes:
    """The nodes of one cluster. The first is the head; `close` kills all."""

    def __init__(self, folder: Path, redis: str = "") -> None:
        """
        folder: for the token, logs and Ray's files; its path must be short, because it holds sockets
        redis: HOST:PORT of the server that stores the head's state for `start_again`
        """
        self.folder = folder
        self.port = free_port()
        token = folder / "token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        self.environment = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": str(folder / "ray"),
            "RAY_memory_monitor_refresh_ms": "0",  # other programs of this machine may need much memory
            # Ray declares a killed node dead after about 4 s instead of 66 s, but not a slow one.
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_timeout_ms": "10000",
            "RAY_health_check_failure_threshold": "3",
            # Workers wait this long for the head to come back; the default is 60 s.
            "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
        }
        if redis:
            self.environment["RAY_REDIS_ADDRESS"] = redis
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._commands: dict[str, list[str]] = {}

    @property
    def address(self) -> str:
        return f"127.0.1.1:{self.port}"

    def start(self, cpus: int = 1, gpus: int = 0) -> str:
        ip = f"127.0.1.{len(self._nodes) + 1}"
        place = ["--head", f"--port={self.port}"] if not self._nodes else [f"--address={self.address}"]
        place += [f"--temp-dir={self.folder / 'ray'}", "--include-dashboard=false"] if not self._nodes else []
        command = [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            *place,
            "--block",
            f"--node-ip-address={ip}",
            f"--num-cpus={cpus}",
        ]
        command += [f"--num-gpus={gpus}", "--disable-usage-stats", f"--object-store-memory={OBJECT_STORE_BYTES}"]
        self._commands[ip] = command
        return self._started(ip)

    def start_again(self, head: str) -> None:
        (self.folder / "ray" / "ray_current_cluster").unlink(missing_ok=True)  # else Ray believes that the head runs
        self._started(head)

    def _started(self, ip: str) -> str:
        for _ in range(ATTEMPTS):
            if self._has_started(ip, self._commands[ip]):
                return ip
            self.kill(ip)
        raise RuntimeError(f"the Ray node did not start:\n{self._log(ip).read_text()}")

    def _has_started(self, ip: str, command: list[str]) -> bool:
        with self._log(ip).open("wb") as log:
            self._nodes[ip] = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **self.environment}
            )
        deadline = time.monotonic() + START_S
        while "Ray runtime started" not in self._log(ip).read_text():
            if self._nodes[ip].poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def _log(self, ip: str) -> Path:
        return self.folder / f"{ip}.log"

    def kill(self, ip: str) -> None:
        """Kill all processes of a node at once, like a power failure."""
        node = self._nodes[ip]
        for pid in descendants(node.pid) if node.poll() is None else ():  # the process id may be reused
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node.wait()

    def close(self) -> None:
        """Kill all nodes."""
        for ip in reversed(self._nodes):
            self.kill(ip)


def descendants(pid: int) -> list[int]:
    """Return a process id and those of all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found
