"""Work that others go before: a thread whose share of the cores is small while others want them, or that has none then.

HTTP workers' threads wait for the next tick of the clock to go before a thread of whatever niceness, 4 ms where there
are 250 a second, since they are to interrupt no step of an engine (SCHED_BATCH). Only before a thread that takes idle
cores alone (SCHED_IDLE) do they go at once: a stream's text is handed from thread to thread.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar


@functools.cache
def cores() -> int:
    """Returns how many cores this process may use: its affinity, or less under a cgroup v2 quota."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return allowed
    return allowed if quota == "max" else max(1, min(allowed, int(quota) // int(period)))


NICENESS = 10
"""A tenth of a normal thread's CPU share."""
T = TypeVar("T")


def at_low_priority(work: Callable[[], T], only_idle_cores: bool = False) -> T:
    """What `work` returns or raises, from a thread that stands behind all others, as do those that it starts.

    Then the thread ends: only a privileged process could restore its priority.
    """
    with ThreadPoolExecutor(1, "low-priority", partial(lower_thread_priority, only_idle_cores)) as thread:
        return thread.submit(work).result()


def lower_thread_priority(only_idle_cores: bool = False) -> None:
    """Have the calling thread, for good, stand behind all others.

    `only_idle_cores`: it stops while others want all of them. Else it has a tenth of the share of one of those.
    """
    _lower_priority(threading.get_native_id(), only_idle_cores)


def lower_process_priority(only_idle_cores: bool = False) -> None:
    """Have all threads of this process, which is about to end, stand behind others: the last one frees its memory."""
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            _lower_priority(int(thread), only_idle_cores)


def _lower_priority(thread: int, only_idle_cores: bool) -> None:
    with contextlib.suppress(OSError, AttributeError):  # where the system has none of this, work is done as ever
        if only_idle_cores:
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
        else:
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)
