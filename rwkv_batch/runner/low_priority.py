"""Threads that compute, and work for a model that comes while others serve: on few of them, and behind theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from native.priority import at_low_priority

CORES_PER_THREAD = 8
T = TypeVar("T")


def set_compute_threads(count: int) -> None:
    """So many threads compute for the calling one.

    At its first call in a process torch makes a pool of that many threads beside those of OpenMP, for kernels that are
    not used here; each spins for longer than a step takes before it sleeps, and who computes there waits. One has none.
    """
    torch.set_num_threads(1)
    torch.set_num_threads(count)


def run_at_low_priority(work: Callable[[], T], only_idle_cores: bool = False) -> T:
    """What `work` returns or raises, from one thread for every eight compute threads, which all others go before.

    `only_idle_cores`: see `native.priority.lower_thread_priority`. More threads would wait for each other at the end of every
    operation, and each for a core that it seldom has.
    """
    threads = torch.get_num_threads()

    def on_few_threads() -> T:
        set_compute_threads(max(1, threads // CORES_PER_THREAD))
        return work()

    try:
        return at_low_priority(on_few_threads, only_idle_cores)
    finally:
        set_compute_threads(threads)
