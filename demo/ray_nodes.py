"""A Ray cluster of several nodes on one machine: each has an address of its own of the loopback network."""

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
"""Ray gives its own processes some 15 s to start, which a busy machine may not have."""
OBJECT_STORE_BYTES = 80_000_000


def free_port() -> int:
    """A port that nobody listens on, and that no client's connection is given as its own until somebody does."""
    first, _ = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    for port in random.SystemRandom().sample(range(20_000, max(first, 30_000)), 100):  # Ray's own begin below
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")


class RayNodes:
    """Nodes that were started here, the first one being the head. `close` ends them all."""

    def __init__(self, folder: Path, redis: str = "") -> None:
        """`folder` takes the token, logs and Ray's own files; sockets are in it, so its path must be short.

        `redis`: HOST:PORT of a server that keeps what the head knows, so that it can come back (`start_again`).
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
            "RAY_memory_monitor_refresh_ms": "0",  # others of this machine may need much memory
            # A node whose processes have ended is given up after about 4 s instead of 66; a busy machine's is not.
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_timeout_ms": "10000",
            "RAY_health_check_failure_threshold": "3",
            # What takes part ends if the head is away for so long, else for a minute.
            "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
        }
        if redis:
            self.environment["RAY_REDIS_ADDRESS"] = redis
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._commands: dict[str, list[str]] = {}

    @property
    def address(self) -> str:
        """Of the head."""
        return f"127.0.1.1:{self.port}"

    def start(self, cpus: int = 1, gpus: int = 0) -> str:
        """One more node with so many CPUs and GPUs; returns its address once it is there."""
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
        """Have the head come back after it was killed."""
        (self.folder / "ray" / "ray_current_cluster").unlink(missing_ok=True)  # else it is thought to be there still
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
        """End every process of a node at once, as when its machine loses power."""
        node = self._nodes[ip]
        for pid in descendants(node.pid) if node.poll() is None else ():  # its number may be another's by now
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node.wait()

    def close(self) -> None:
        """End all nodes."""
        for ip in reversed(self._nodes):
            self.kill(ip)


def descendants(pid: int) -> list[int]:
    """The process and all that it has started, and these, and so on."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found
