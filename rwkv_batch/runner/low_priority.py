"""Compute threads, and low-priority work to load a model while others serve."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from native.priority import at_low_priority, cores

CORES_PER_THREAD = 8
T = TypeVar("T")


def set_compute_threads(count: int) -> None:
    """Set the number of compute threads of the calling thread.

    At its first call, torch creates another pool of that many threads, besides OpenMP's, for kernels not used here.
    They spin and slow the compute threads. So the first call sets 1.
    """
    torch.set_num_threads(1)
    torch.set_num_threads(count)


def run_at_low_priority(work: Callable[[], T], only_idle_cores: bool = False) -> T:
    """Run `work` at low priority, with one thread per eight compute threads.

    More threads would wait for each other after every operation. only_idle_cores: see
    `native.priority.lower_thread_priority`.
    """
    threads = torch.get_num_threads()

    def on_few_threads() -> T:
        set_compute_threads(max(1, threads // CORES_PER_THREAD))
        return work()

    try:
        return at_low_priority(on_few_threads, only_idle_cores)
    finally:
        set_compute_threads(threads)


def threads_per_replica(replicas: int) -> int:
    """Return the compute threads per engine if several share the cores; 0 for a single engine."""
    return max(1, cores() // replicas) if replicas > 1 else 0
