"""CPU time of processes: cores used between two samples, and the busiest thread."""

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
    """Return the CPU seconds of all threads of a process."""
    return _seconds(Path(f"/proc/{pid}/stat"))


def used(pid: int) -> Used:
    """Return the CPU seconds of a process and of each thread."""
    threads: dict[str, float] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has just ended
            threads[task.name] = _seconds(task / "stat")
    return Used(cpu_s(pid), threads)


def cores(before: Mapping[str, Used], after: Mapping[str, Used], seconds: float) -> dict[str, list[float]]:
    """Return the cores used by each process and by its busiest thread; 1.0 is a thread that never waited."""
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
