"""Work for a model that comes while others serve: on few threads, and behind theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from native.priority import at_low_priority

CORES_OF_A_THREAD = 8
T = TypeVar("T")


def behind_others(work: Callable[[], T], only_idle_cores: bool = False) -> T:
    """What `work` returns or raises, from one thread for every eight compute threads, which all others go before.

    `only_idle_cores`: see `native.priority.stand_back`. More threads would wait for each other at the end of every
    operation, and each for a core that it seldom has.
    """
    threads = torch.get_num_threads()

    def on_few_threads() -> T:
        torch.set_num_threads(max(1, threads // CORES_OF_A_THREAD))
        return work()

    try:
        return at_low_priority(on_few_threads, only_idle_cores)
    finally:
        torch.set_num_threads(threads)
