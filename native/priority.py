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
    with contextlib.suppress(OSError, AttributeError):  # where the system has none of this, work is done as ever
        of_this_thread = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), of_this_thread + NICENESS)
