"""A service whose models come and go by its routes: rounds of that, and what else may happen to them."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

from bench.service.streams import ENGINE_FORKS, memory_mb, parent
from bench.tools.http_load import fetch, served_tokens

PASSWORD = "rounds"


class Look(NamedTuple):
    """Memory (MB, no pages of files) of all processes and of each kind, and tokens drawn, which streams keep."""

    memory: dict[str, float]
    drawn: int


class Service:
    """The service's routes for models."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self.engine = int(self.status()["processes"]["engine"]["pid"])

    def status(self) -> dict[str, Any]:
        """/status."""
        value: dict[str, Any] = json.loads(fetch(self.url, "/status", ""))
        return value

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        """The answer's JSON, a refusal's too."""
        headers = {"Authorization": f"Bearer {PASSWORD}"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=300) as response:
                value: dict[str, Any] = json.loads(response.read())
        except urllib.error.HTTPError as error:
            value = {"http": error.code, **json.loads(error.read())}
        return value

    def load(self, name: str, file: str = "second.safetensors", wait_s: float = 240) -> dict[str, Any]:
        """See /v1/models/load; few slots, so that the second model's memory is its weights'."""
        return self.post("/v1/models/load", name=name, file=file, wait_s=wait_s, max_running=4)

    def unload(self, name: str) -> dict[str, Any]:
        """See /v1/models/unload."""
        return self.post("/v1/models/unload", name=name, wait_s=240)

    def processes(self) -> set[int]:
        """Direct children of the supervisor, and the engines that one of them forks."""
        supervisor = parent(self.engine)
        numbers = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
        children = {number for number in numbers if parent(number) == supervisor}
        forking = {child for child in children if ENGINE_FORKS in _command(child)}
        return children | {number for number in numbers if parent(number) in forking}

    def lost_cores(self) -> int:
        """How often the serving engine's threads that live had to leave a core."""
        lost = 0
        for task in Path(f"/proc/{self.engine}/task").iterdir():
            lines = (task / "status").read_text().splitlines()
            lost += sum(int(line.split()[1]) for line in lines if line.startswith("nonvoluntary"))
        return lost

    def ended_cpu_s(self) -> float:
        """CPU seconds of engines that have ended."""
        used = 0
        for pid in self.processes() | {parent(self.engine)}:
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
                used += int(fields[13]) + int(fields[14])
        return used / os.sysconf("SC_CLK_TCK")

    def look(self) -> Look:
        """What it has now."""
        kinds = memory_mb(self.engine, "Pss_Anon")
        return Look({"all": round(sum(kinds.values()), 3), **kinds}, int(served_tokens(self.url, "")))


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def rounds(service: Service, args: argparse.Namespace, numbers: range, seconds: list[float]) -> list[str]:
    """What went wrong in rounds of these numbers. `seconds` is given those of each round when it ends."""
    wrong: list[str] = []
    places = threading.Semaphore(args.at_once)

    def one(number: int) -> None:
        started = time.monotonic()
        if args.only_memory_mb:
            take_memory(args.only_memory_mb)
        else:
            come_and_go(f"round-{number}")
        seconds.append(time.monotonic() - started)
        places.release()

    def come_and_go(name: str) -> None:
        answer = service.load(name)
        if answer.get("status") != "ready":
            wrong.append(f"{name}: {answer}")
        answer = service.unload(name)
        if answer.get("status") != "unloaded":
            wrong.append(f"{name}: {answer}")

    threads = []
    for number in numbers:
        due = time.monotonic() + args.period_s
        places.acquire()
        threads.append(threading.Thread(target=one, args=(number,), daemon=True))
        threads[-1].start()
        time.sleep(max(0.0, due - time.monotonic()))
    for thread in threads:
        thread.join()
    return wrong


def take_memory(mb: int) -> None:
    """A process that is no part of the service takes so much memory, at the lowest priority, and ends."""
    work = f"import os; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)); b'x' * ({mb} << 20)"
    subprocess.run([sys.executable, "-c", work], check=True)


def faults(service: Service) -> dict[str, str]:
    """What each disturbance was answered."""
    told: dict[str, str] = {}
    before = service.processes()
    service.load("killed", wait_s=0)
    while not (new := service.processes() - before):
        time.sleep(0.01)
    time.sleep(0.5)
    for pid in new:
        os.kill(pid, signal.SIGKILL)
    told["kill -9"] = _settled(service, "killed")
    whole = (service.folder / "second.safetensors").read_bytes()
    (service.folder / "broken.safetensors").write_bytes(whole[: len(whole) // 2])
    told["a broken file"] = _settled(service, "broken", service.load("broken", "broken.safetensors"))
    (service.folder / "gone.safetensors").write_bytes(whole)
    service.load("gone", "gone.safetensors", wait_s=0)
    (service.folder / "gone.safetensors").unlink()
    told["a file that vanishes"] = _settled(service, "gone")
    answers: list[dict[str, Any]] = []
    names = ("same", "same", "other")
    threads = [threading.Thread(target=lambda name=name: answers.append(service.load(name))) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told["two at once, one name twice"] = " | ".join(sorted(str(a.get("status") or a.get("http")) for a in answers))
    for name in ("same", "other", "killed", "broken", "gone"):
        service.unload(name)
    return told


def _settled(service: Service, name: str, answer: dict[str, Any] | None = None) -> str:
    """How a load ended."""
    while answer is None or answer["status"] == "loading":
        time.sleep(0.1)
        answer = json.loads(fetch(service.url, f"/v1/models/{name}", ""))
    return f"{answer['status']}: {answer['error']}" if answer.get("error") else str(answer["status"])
