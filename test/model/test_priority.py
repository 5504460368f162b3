"""Work at low CPU priority."""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.connection import Connection

import pytest

from native.priority import NICENESS, at_low_priority, lower_process_priority


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_only_the_calling_thread_gets_low_priority() -> None:
    before = niceness()
    assert at_low_priority(niceness) == min(19, before + NICENESS) and niceness() == before


def test_idle_priority_yields_to_all_others() -> None:
    policies = at_low_priority(lambda: (os.sched_getscheduler(0), niceness()), only_idle_cores=True)
    assert policies == (os.SCHED_IDLE, niceness()) and os.sched_getscheduler(0) != os.SCHED_IDLE


def test_exceptions_are_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        at_low_priority(lambda: 1 // 0)


def _end(pipe: Connection) -> None:
    other = threading.Thread(target=pipe.recv)
    other.start()
    usual = niceness()
    lower_process_priority()
    pipe.send((usual, [os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in os.listdir("/proc/self/task")]))
    other.join()


def test_all_threads_of_an_ending_process_get_low_priority() -> None:
    """The memory is freed by the thread that ends last."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_end, args=(theirs,))
    process.start()
    usual, threads = ours.recv()
    assert threads == [min(19, usual + NICENESS)] * 2
    ours.send(None)
    process.join()
