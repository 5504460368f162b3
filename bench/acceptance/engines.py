"""A service with several engines, to be disturbed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.tools.http_load import fetch
from bench.tools.service import service

READY_S = 180.0
LOOKS = 8
"""Looks at /readyz in a row that say ready: each meets one of the HTTP workers."""
PADDED = "bench.acceptance.padded_engine"


class Engines:
    """The engines of a running service, by name."""

    def __init__(self, url: str) -> None:
        self.url = url

    def listed(self) -> dict[str, dict[str, Any]]:
        """What /status says of each."""
        return {one["engine"]: one for one in json.loads(fetch(self.url, "/status", ""))["engines"]}

    def pid(self, name: str) -> int:
        """Its process."""
        return int(self.listed()[name]["pid"])

    def send(self, name: str, number: signal.Signals) -> int:
        """Send its process a signal; returns the process id."""
        pid = self.pid(name)
        os.kill(pid, number)
        return pid

    def wait_ready(self) -> None:
        """Until all take work, as every HTTP worker sees it."""
        deadline, looks = time.monotonic() + READY_S, 0
        while looks < LOOKS:
            if time.monotonic() > deadline:
                raise SystemExit(f"the engines were not all ready within {READY_S:.0f} s")
            with contextlib.suppress(OSError):
                looks = looks + 1 if json.loads(fetch(self.url, "/readyz", ""))["status"] == "ready" else 0
            time.sleep(0.05)

    def metric(self, name: str) -> dict[str, float]:
        """A metric's value by engine."""
        found: dict[str, float] = {}
        for line in fetch(self.url, "/metrics", "").splitlines():
            if line.startswith(f"{name}{{") and 'engine="' in line:
                labels, _, value = line.rpartition(" ")
                engine = labels.rpartition('engine="')[2].partition('"')[0]
                found[engine] = found.get(engine, 0.0) + float(value)
        return found


@contextlib.contextmanager
def running(count: int, *flags: str, is_padded: bool = False, log: Path | None = None) -> Iterator[Engines]:
    """A service of so many engines, all ready; its log in a file, or on standard error.

    `is_padded`: a step takes a set time at least, so that capacity is not that of this machine's cores.
    """
    arguments = ["--replicas", str(count), "--threads", "1", "--access-log", "no", *flags]
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(log.open("ab")) if log is not None else None
        engines = Engines(stack.enter_context(service(arguments, file, PADDED if is_padded else "app")))
        engines.wait_ready()
        yield engines


def resident_mb(pid: int) -> float:
    """Memory of a process and all below it, in MiB; what they share counts once for each."""
    total, todo = 0.0, [pid]
    while todo:
        with contextlib.suppress(OSError):
            one = todo.pop()
            todo += [int(child) for child in Path(f"/proc/{one}/task/{one}/children").read_text().split()]
            total += int(Path(f"/proc/{one}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return total


def supervisor_of(engines: Engines) -> int:
    """The process that started them."""
    pid = next(int(one["pid"]) for one in engines.listed().values())
    return int(subprocess.check_output(["ps", "-o", "ppid=", "-p", str(pid)]))
