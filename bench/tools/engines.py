"""A service with several engines, to be disturbed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from typing import Any

from bench.tools.http_load import fetch

READY_S = 180.0
LOOKS = 8
"""Looks at /readyz in a row that say ready: each meets one of the HTTP workers."""


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
