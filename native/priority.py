"""Runs work at low CPU priority: with a small share of busy cores, or on idle cores only.

HTTP workers use SCHED_BATCH, so that they do not interrupt an engine's step. So they preempt a thread of any niceness
only at the next clock tick, up to 4 ms later. They preempt a thread for idle cores (SCHED_IDLE) at once. A stream's
text passes through several threads, so this matters.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar


@functools.cache
def cores() -> int:
    """Returns the number of usable cores. It is the process's CPU affinity, or less under a cgroup v2 quota."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return allowed
    return allowed if quota == "max" else max(1, min(allowed, int(quota) // int(period)))


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent thread ends. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_PR_SET_PDEATHSIG = 1
NICENESS = 10
"""A tenth of a normal thread's CPU share."""
T = TypeVar("T")


def at_low_priority(work: Callable[[], T], only_idle_cores: bool = False) -> T:
    """Run `work` on a low-priority thread. Threads that it starts have low priority too.

    Then the thread ends: only a privileged process could restore its priority. Raises what `work` raises.
    """
    with ThreadPoolExecutor(1, "low-priority", partial(lower_thread_priority, only_idle_cores)) as thread:
        return thread.submit(work).result()


def lower_thread_priority(only_idle_cores: bool = False) -> None:
    """Lower the calling thread's priority for good.

    `only_idle_cores`: it runs only on idle cores. Else it gets a tenth of a normal thread's share.
    """
    _lower_priority(threading.get_native_id(), only_idle_cores)


def lower_process_priority(only_idle_cores: bool = False) -> None:
    """Lower the priority of all threads of a process about to end. The last one frees the process's memory."""
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            _lower_priority(int(thread), only_idle_cores)


def _lower_priority(thread: int, only_idle_cores: bool) -> None:
    with contextlib.suppress(OSError, AttributeError):  # a system without these settings keeps the normal priority
        if only_idle_cores:
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
        else:
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)
