"""Work that others go before: a thread whose share of the cores is small while others want them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

NICENESS = 10
"""A tenth of the share of a thread that is as usual."""
T = TypeVar("T")


def at_low_priority(work: Callable[[], T]) -> T:
    """What `work` returns or raises, from a thread that stands behind all others, as do those that it starts.

    The thread ends with it: only a privileged process could give a thread its priority back.
    """
    with ThreadPoolExecutor(1, "low-priority", stand_back) as thread:
        return thread.submit(work).result()


def stand_back() -> None:
    """Have the calling thread, for good, stand behind all others."""
    _stand_back(threading.get_native_id())


def stand_back_to_the_end() -> None:
    """Have all threads of this process, which is about to end, stand behind others: the last one frees its memory."""
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            _stand_back(int(thread))


def _stand_back(thread: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # where the system has none of this, work is done as ever
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)
