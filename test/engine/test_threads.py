"""Python states of threads that Python did not create: kept while the thread lives, dropped afterwards."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from routes.serving.thread_states import CAN_KEEP, drop_ended, keep_state
from test.serving import wait_for

pytestmark = pytest.mark.skipif(not CAN_KEEP, reason="only where threads can be listed")


def states() -> set[int]:
    """Return the ids of this interpreter's thread states. No id occurs twice: other tests' threads may end."""
    python = ctypes.PyDLL(None)
    for name in ("PyInterpreterState_Main", "PyInterpreterState_ThreadHead", "PyThreadState_Next"):
        getattr(python, name).restype = ctypes.c_void_p
    python.PyThreadState_GetID.restype = ctypes.c_uint64
    found, interval = set(), sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # from here on, no other thread ends
    try:
        state = python.PyInterpreterState_ThreadHead(ctypes.c_void_p(python.PyInterpreterState_Main()))
        while state:
            found.add(python.PyThreadState_GetID(ctypes.c_void_p(state)))
            state = python.PyThreadState_Next(ctypes.c_void_p(state))
    finally:
        sys.setswitchinterval(interval)
    return found


def on_foreign_thread(work: Callable[[], None]) -> None:
    """Run `work` on a thread of the C library. Wait until the kernel has ended the thread."""
    libc, numbers = ctypes.CDLL(None), list[int]()

    def body(_: object) -> None:
        numbers.append(threading.get_native_id())
        work()

    start = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(body)
    thread = ctypes.c_ulong()
    assert libc.pthread_create(ctypes.byref(thread), None, start, None) == 0
    assert libc.pthread_join(thread, None) == 0
    wait_for(lambda: not Path(f"/proc/self/task/{numbers[0]}").exists(), 30, "it is no longer listed")


def test_a_kept_state_stays_until_its_thread_has_ended() -> None:
    drop_ended()
    before = states()
    on_foreign_thread(lambda: None)
    assert not states() - before, "Python drops a state without an owner"
    on_foreign_thread(keep_state)
    on_foreign_thread(lambda: (keep_state(), keep_state())[0])
    assert len(states() - before) == 2
    drop_ended()
    assert not states() - before


def test_the_state_of_a_living_thread_is_not_dropped() -> None:
    drop_ended()
    before, seen = states(), list[int]()
    kept, may_end = threading.Event(), threading.Event()

    def work() -> None:
        keep_state()
        kept.set()
        may_end.wait(60)
        seen.append(len(states() - before))

    thread = threading.Thread(target=on_foreign_thread, args=(work,))
    thread.start()
    assert kept.wait(60)
    drop_ended()
    may_end.set()
    thread.join()
    assert seen == [2], "one state for the thread, one for the waiting thread"
    drop_ended()
    assert not states() - before


def test_a_thread_that_starts_during_the_search_keeps_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    drop_ended()
    before, listed = states(), os.listdir
    kept, may_end = threading.Event(), threading.Event()

    def work() -> None:
        keep_state()
        kept.set()
        may_end.wait(60)

    thread = threading.Thread(target=on_foreign_thread, args=(work,))

    def list_then_start(path: str) -> list[str]:
        found = listed(path)
        thread.start()
        assert kept.wait(60)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(os, "listdir", list_then_start)
        drop_ended()
    assert len(states() - before) == 2, "one state for the thread, one for the waiting thread"
    may_end.set()
    thread.join()
    drop_ended()
    assert not states() - before


@pytest.mark.parametrize("lacks", ["descriptors", "threads"])
def test_states_are_dropped_once_descriptors_are_free_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lacks: str
) -> None:
    """Clients may use up all descriptors of an HTTP worker. The worker continues nevertheless."""
    drop_ended()
    before = states()
    on_foreign_thread(keep_state)

    def refuse(*_: object) -> None:
        raise OSError(24, "Too many open files") if lacks == "descriptors" else RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(*((os, "listdir") if lacks == "descriptors" else (threading.Thread, "start")), refuse)
        drop_ended()
    assert "dropped later" in caplog.text and len(states() - before) == 1
    drop_ended()
    assert not states() - before


def test_the_dropping_thread_can_still_call_python() -> None:
    """Python knows a thread by a mark. Dropping another thread's state removes this mark."""
    called: list[int] = []
    order = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(lambda a, b: called.append(1) or 0)
    for turn in range(3):
        on_foreign_thread(keep_state)
        drop_ended()
        numbers = (ctypes.c_int * 2)(2, 1)
        ctypes.CDLL(None).qsort(numbers, ctypes.c_size_t(2), ctypes.c_size_t(4), order)
        assert len(called) == turn + 1
