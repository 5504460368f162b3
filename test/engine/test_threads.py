"""Python states of threads that Python did not make: kept while the thread lives, dropped when it has ended."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable

import pytest

from routes.serving.thread_states import CAN_KEEP, drop_ended, keep_state

pytestmark = pytest.mark.skipif(not CAN_KEEP, reason="only where threads can be listed")


def num_states() -> int:
    """Thread states of this interpreter."""
    python = ctypes.PyDLL(None)
    for name in ("PyInterpreterState_Main", "PyInterpreterState_ThreadHead", "PyThreadState_Next"):
        getattr(python, name).restype = ctypes.c_void_p
    state = python.PyInterpreterState_ThreadHead(ctypes.c_void_p(python.PyInterpreterState_Main()))
    count = 0
    while state:
        count += 1
        state = python.PyThreadState_Next(ctypes.c_void_p(state))
    return count


def on_foreign_thread(work: Callable[[], None]) -> None:
    """Run `work` on a thread that the C library makes, and wait until that has ended."""
    libc = ctypes.CDLL(None)
    start = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: work())
    thread = ctypes.c_ulong()
    assert libc.pthread_create(ctypes.byref(thread), None, start, None) == 0
    assert libc.pthread_join(thread, None) == 0


def test_a_kept_state_stays_until_its_thread_has_ended() -> None:
    drop_ended()
    before = num_states()
    on_foreign_thread(lambda: None)
    assert num_states() == before, "Python drops a state that nobody keeps"
    on_foreign_thread(keep_state)
    on_foreign_thread(lambda: (keep_state(), keep_state())[0])
    assert num_states() == before + 2
    drop_ended()
    assert num_states() == before


def test_the_state_of_a_living_thread_is_not_dropped() -> None:
    drop_ended()
    before, seen = num_states(), []
    kept, may_end = threading.Event(), threading.Event()

    def work() -> None:
        keep_state()
        kept.set()
        may_end.wait(60)
        seen.append(num_states())

    thread = threading.Thread(target=on_foreign_thread, args=(work,))
    thread.start()
    assert kept.wait(60)
    drop_ended()
    may_end.set()
    thread.join()
    assert seen == [before + 2]
    drop_ended()
    assert num_states() == before


def test_a_thread_that_comes_up_while_others_are_looked_for_keeps_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    drop_ended()
    before, listed = num_states(), os.listdir
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
    assert num_states() == before + 2, "the thread's and that of the one that waits for it"
    may_end.set()
    thread.join()
    drop_ended()
    assert num_states() == before


def test_who_drops_stays_able_to_call_and_be_called() -> None:
    """Python knows a thread by a mark that dropping another's state takes away."""
    called: list[int] = []
    order = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(lambda a, b: called.append(1) or 0)
    for turn in range(3):
        on_foreign_thread(keep_state)
        drop_ended()
        numbers = (ctypes.c_int * 2)(2, 1)
        ctypes.CDLL(None).qsort(numbers, ctypes.c_size_t(2), ctypes.c_size_t(4), order)
        assert len(called) == turn + 1
