"""A real service for tests: `app.py` or a similar program in a child process on a free port."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import httpx

from native import files as private_files

ROOT = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 120.0
REQUEST_TIMEOUT_S = 120.0
"""For one answer, and for the shutdown."""
BUSY_FACTOR = 4.0
"""Factor on the timeouts of tests, for a busy machine."""
_ports = random.SystemRandom()
_used_ports: set[int] = set()


def free_port() -> int:
    """Return a free port outside the ephemeral range.

    So no client connection takes it. No other test gets it, in any of pytest's workers.
    """
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ports = range(20_000 + worker, 65_536, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    others = [port for port in ports if not first <= port <= last] or ports
    while True:
        port = _ports.choice(others)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            if port not in _used_ports:
                _used_ports.add(port)
                return port


def wait_for(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """Return the first true value of `condition`. Fails after BUSY_FACTOR times `timeout_s`."""
    deadline = time.monotonic() + BUSY_FACTOR * timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            if value := condition():
                return value
        time.sleep(0.05)
    raise AssertionError(f"not within {timeout_s} s: {what}")


def sse_data(text: str) -> list[Any]:
    """Return the values of a stream's events. Heartbeats and the final [DONE] are left out."""
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]", text
    return [json.loads(event) for event in events[:-1]]


def row_texts(events: list[Any]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["delta"].get("content", "")
    return texts


class Service:
    popen: type[subprocess.Popen[Any]] = subprocess.Popen
    """What starts the program. In tests it is `Preloaded`."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        program: str = "app.py",
        state_db: Path | str | None = None,
        **environment: str,
    ) -> None:
        self.port = free_port()
        self.state_db = Path(state_db or folder / f"sessions-{self.port}.db")
        self.log = folder / f"service-{self.port}.log"
        # -P: a program in test/ must not take test/routes for routes.
        command = [sys.executable, *(["-P"] if "/" in program else []), str(ROOT / program)]
        command += ["--port", str(self.port), *arguments]
        command += ["--state-db", str(self.state_db if state_db is None else state_db)]
        built = private_files.VARIABLE  # keeps the compile cache
        clean = {n: value for n, value in os.environ.items() if n == built or not n.startswith("RWKV_")}
        if "PYTHONPATH" in environment:
            environment["PYTHONPATH"] += f"{os.pathsep}{clean.get('PYTHONPATH', '')}"
        # Other variables are read when a module or library is loaded.
        popen = self.popen if environment.keys() <= {"PYTHONPATH"} else subprocess.Popen
        with self.log.open("wb") as log:
            self.process = popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env={**clean, **environment})
        self.url = f"http://127.0.0.1:{self.port}"
        self.headers: dict[str, str] = {}
        self.admin_headers: dict[str, str] = {}
        """For /status, if the others have no admin rights."""

    def wait(self, condition: Callable[[], Any], timeout_s: float) -> None:
        """Wait for `condition`. Fails at once if the service has ended."""

        def look() -> Any:
            assert self.process.poll() is None, "the service has ended"
            return condition()

        try:
            wait_for(look, timeout_s, "see its log")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log.read_text()}") from None

    def wait_ready(self) -> Service:
        """Wait until every HTTP worker is ready; the system assigns connections to workers at random."""
        self.wait(lambda: all(self.get("/readyz").status_code == 200 for _ in range(12)), START_TIMEOUT_S)
        return self

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=REQUEST_TIMEOUT_S, headers=self.headers, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        options.setdefault("timeout", REQUEST_TIMEOUT_S)
        headers = {**self.headers, **options.pop("headers", {})}
        if body is not None:
            options["content"] = json.dumps(body)
        return httpx.post(self.url + path, headers=headers, **options)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send any method, with the given headers only."""
        return httpx.request(method, self.url + path, timeout=REQUEST_TIMEOUT_S, **options)

    @contextlib.contextmanager
    def stream(self, path: str, body: Any) -> Iterator[httpx.Response]:
        with httpx.stream(
            "POST", self.url + path, json=body, timeout=REQUEST_TIMEOUT_S, headers=self.headers
        ) as response:
            yield response

    def status(self) -> dict[str, Any]:
        response = self.request("GET", "/status", headers={**self.headers, **self.admin_headers})
        response.raise_for_status()
        value: dict[str, Any] = response.json()
        return value

    def pids(self) -> dict[str, int]:
        """Return the process ids by name, without the supervisor."""
        processes = self.processes()
        workers = {worker["name"]: worker["pid"] for worker in processes["http_workers"]}
        return {"engine": processes["engine"]["pid"], **workers}

    def processes(self) -> dict[str, Any]:
        """Return the processes of /status, with each worker once.

        It waits while a lost worker is still listed with its replacement.
        """

        def list_processes() -> dict[str, Any] | None:
            processes: dict[str, Any] = self.status()["processes"]
            names = [worker["name"] for worker in processes["http_workers"]]
            return processes if len(set(names)) == len(names) else None

        return list_processes() or cast(dict[str, Any], wait_for(list_processes, 30.0, "each worker is listed once"))

    def wait_idle(self, timeout_s: float = 30.0) -> dict[str, Any]:
        """Wait until no row runs or waits; returns that status."""

        def is_idle() -> dict[str, Any] | None:
            status = self.status()
            return None if status["running_rows"] or status["waiting_rows"] else status

        status: dict[str, Any] = wait_for(is_idle, timeout_s, "no row runs")
        return status

    def connect(self) -> socket.socket:
        """Open a plain TCP connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=REQUEST_TIMEOUT_S)

    def sent(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> socket.socket:
        """Open a connection and send a POST; its answer is not read."""
        connection = self.connect()
        extra = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        connection.sendall(raw_request(path, json.dumps(body).encode(), extra=extra))
        return connection

    def terminate(self, timeout_s: float = REQUEST_TIMEOUT_S) -> int:
        """Send SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def __enter__(self) -> Service:
        """Wait until it is ready; the end of the block stops it."""
        try:
            return self.wait_ready()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop it, by SIGKILL if necessary."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(60)


class FreshService(Service):
    """A service in a new interpreter, as users start it."""

    popen = subprocess.Popen


def children(pid: int) -> dict[int, bytes]:
    """Return the live children of a process with their commands."""
    found = {}
    for decimal in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        with contextlib.suppress(OSError):  # it has just ended
            if is_process_alive(decimal):
                found[decimal] = Path(f"/proc/{decimal}/cmdline").read_bytes()
    return found


def raise_priority(processes: Iterable[int]) -> None:
    """Let processes take as much of a busy machine as the other tests do: at low priority they have a tenth."""
    for process in processes:
        with contextlib.suppress(OSError):  # it has ended, or only root may
            for thread in os.listdir(f"/proc/{process}/task"):
                os.setpriority(os.PRIO_PROCESS, int(thread), 0)


def training_processes(service: Service) -> list[int]:
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            try:
                line = (process / "cmdline").read_bytes()
            except OSError:
                continue
            if b"programs.tune" in line and str(service.state_db).encode() in line:
                found.append(int(process.name))
    return found


def is_process_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def raw_request(path: str, body: bytes, *, length: int | None = None, extra: str = "") -> bytes:
    """Return an HTTP/1.1 POST as bytes. `length`: a Content-Length that may be wrong."""
    size = len(body) if length is None else length
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\nConnection: close\r\n{extra}\r\n"
    return head.encode() + body


def read_all(connection: socket.socket) -> bytes:
    """Read until the other side closes."""
    received = b""
    with contextlib.suppress(OSError):
        while piece := connection.recv(65536):
            received += piece
    return received
