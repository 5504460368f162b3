"""Runs a function in a process of its own with limited resources.

The limits are on processor time and memory.
Processor time and peak memory are what the function itself costs, however busy the machine is.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

_PRELOADED = (
    "routes.translation.batch_translate",
    "routes.openai.chat",
    "routes.openai.completions",
    "routes.table",
    "test.conftest",
)
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(list(_PRELOADED))
_TIMEOUT_S = 170.0
MIB = 1 << 20


@dataclass(frozen=True)
class Cost:
    """What a run has cost; `result` is None if it was ended by a limit."""

    result: Any
    peak_mib: float
    exit_code: int | None


def run_bounded(function: Callable[..., Any], *arguments: Any, cpu_s: int = 20, memory_mib: int = 1024) -> Cost:
    """Call a module's function there; it is killed when it passes a limit."""
    ours, theirs = _forks.Pipe(duplex=False)
    process = _forks.Process(target=_child, args=(theirs, function, arguments, cpu_s, memory_mib))
    process.start()
    theirs.close()
    result, peak_mib = None, float(memory_mib)
    with contextlib.suppress(EOFError):
        if ours.poll(_TIMEOUT_S):
            result, peak_mib = ours.recv()
    process.kill()  # what has met its limit of memory may hang instead of ending
    process.join()
    return Cost(result, peak_mib, process.exitcode)


def _child(reply: Connection, function: Callable[..., Any], arguments: Any, cpu_s: int, memory_mib: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_memory("VmSize") + memory_mib * MIB,) * 2)
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + cpu_s
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    before = _memory("VmRSS")
    try:
        result = function(*arguments)
    except MemoryError:
        os._exit(1)
    reply.send((result, (_memory("VmHWM") - before) / MIB))
    reply.close()
    os._exit(0)


def _memory(name: str) -> int:
    """A line of /proc/self/status in bytes."""
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name + ":"))
