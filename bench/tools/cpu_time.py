"""Which processes a measurement keeps busy: cores that each used between two looks, and its busiest thread."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")


class Used(NamedTuple):
    """CPU seconds of a process so far."""

    total: float
    threads: dict[str, float]


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used, all its threads."""
    return _seconds(Path(f"/proc/{pid}/stat"))


def used(pid: int) -> Used:
    """The same, and of each thread that it has."""
    threads: dict[str, float] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has just ended
            threads[task.name] = _seconds(task / "stat")
    return Used(cpu_s(pid), threads)


def cores(before: Mapping[str, Used], after: Mapping[str, Used], seconds: float) -> dict[str, list[float]]:
    """Of each process the cores that it used, and its busiest thread: 1.0 is a thread that never waited."""
    return {
        name: [
            round((now.total - before[name].total) / seconds, 2),
            round(max(t - before[name].threads.get(tid, 0.0) for tid, t in now.threads.items()) / seconds, 2),
        ]
        for name, now in after.items()
        if name in before
    }


def _seconds(stat: Path) -> float:
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS
