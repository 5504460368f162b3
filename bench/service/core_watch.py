"""What the serving processes meet on their cores, noted every 100 ms beside a run: waiting for a core, faults, steal.

In a process of its own, which writes what it has noted once a second. For each process that is watched: the time that
its threads waited for a core and the most that one of them did (/proc/PID/task/*/schedstat), and page faults. Of the
machine: the time that the one below it took from it (steal), over all CPUs.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

PERIOD_S = 0.1
_WRITE_S = 1.0


class Sample(NamedTuple):
    """What came since the sample before it."""

    at: float
    """monotonic s"""
    pid: float
    waited_s: float
    """for a core, all its threads"""
    most_s: float
    """the same of one of them"""
    minor_faults: float
    major_faults: float
    steal_s: float


_SAMPLE = struct.Struct("7d")


class _Process:
    """One that is watched."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._waited: dict[str, int] = {}
        self._faults = (0, 0)
        self.look()

    def look(self) -> tuple[float, float, int, int]:
        """What came since the last look: time waited (s), the most of one thread, minor and major faults."""
        before, self._waited = self._waited, {}
        with contextlib.suppress(OSError):
            for task in os.scandir(f"/proc/{self.pid}/task"):
                with contextlib.suppress(OSError), open(f"{task.path}/schedstat", "rb") as file:
                    self._waited[task.name] = int(file.read().split()[1])
        waits = [waited - before.get(thread, waited) for thread, waited in self._waited.items()]
        was, now = self._faults, self._faults
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
            now = int(fields[7]), int(fields[9])
        self._faults = now
        return sum(waits) / 1e9, max(waits, default=0) / 1e9, now[0] - was[0], now[1] - was[1]


def _steal_s() -> float:
    with open("/proc/stat", "rb") as file:
        return int(file.readline().split()[8]) / os.sysconf("SC_CLK_TCK")


def watch(pids: Sequence[int], path: Path, parent: Connection) -> None:
    """Main function of the process, until told to stop."""
    processes = [_Process(pid) for pid in pids]
    steal, noted, written = _steal_s(), bytearray(), time.monotonic()
    while not parent.poll(PERIOD_S):
        before, steal = steal, _steal_s()
        for process in processes:
            noted += _SAMPLE.pack(time.monotonic(), process.pid, *process.look(), steal - before)
        if time.monotonic() > written + _WRITE_S:
            written = time.monotonic()
            with path.open("ab") as file:
                file.write(noted)
            noted.clear()
    with path.open("ab") as file:
        file.write(noted)
    parent.send(False)


def samples(path: Path) -> list[Sample]:
    """What was written by now."""
    told = path.read_bytes() if path.exists() else b""
    whole = len(told) // _SAMPLE.size * _SAMPLE.size
    return [Sample(*one) for one in _SAMPLE.iter_unpack(told[:whole])]


def around(found: Sequence[Sample], begin: float, end: float, names: dict[int, str]) -> dict[str, Any]:
    """Of that time, for each process: ms waited by all its threads, by the one that waited most, and faults."""
    told: dict[str, Any] = {}
    for pid, name in names.items():
        its = [one for one in found if one.pid == pid and begin <= one.at <= end + PERIOD_S]
        told[name] = {
            "waited_ms": round(sum(one.waited_s for one in its) * 1e3, 1),
            "most_of_one_thread_ms": round(max((one.most_s for one in its), default=0.0) * 1e3, 1),
            "faults": int(sum(one.minor_faults for one in its)),
            "major_faults": int(sum(one.major_faults for one in its)),
        }
    first = next(iter(names), 0)
    steal = sum(one.steal_s for one in found if one.pid == first and begin <= one.at <= end + PERIOD_S)
    return {**told, "steal_ms": round(steal * 1e3, 1)}
