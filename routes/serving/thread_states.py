"""Threads that Robyn makes keep their Python state from one chunk to the next.

Robyn asks a stream for each chunk on a thread of its pool. For a thread that is not its own, Python makes a state when
it enters and drops it when it leaves, memory mapped and unmapped each time, for which all threads of the process are
stopped: two fifths of the CPU time of a chunk. A state that was entered once more than left stays with its thread;
Python is not told when such a thread ends, so what ended threads have left is dropped here.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading

logger = logging.getLogger(__name__)

CAN_KEEP = sys.platform == "linux" and sys.implementation.name == "cpython"
"""Elsewhere nobody tells which threads have ended."""

_python = ctypes.PyDLL(None)
_python.PyThreadState_Get.restype = ctypes.c_void_p
_local = threading.local()
_lock = threading.Lock()
_kept: list[tuple[int, int]] = []
"""(thread's id in the kernel, address of its state)"""


def keep_state() -> None:
    """Let the calling thread, which Python did not make, keep its state until `drop_ended` finds it gone."""
    if CAN_KEEP and not hasattr(_local, "is_kept"):
        _local.is_kept = True
        _python.PyGILState_Ensure()
        with _lock:
            _kept.append((threading.get_native_id(), _python.PyThreadState_Get()))


def drop_ended() -> None:
    """Drop the states of threads that have ended; later, if the system has no file descriptor or thread for it."""
    if not CAN_KEEP:
        return
    try:
        _try_to_drop_ended()
    except (OSError, RuntimeError) as error:  # clients may hold all descriptors for a while
        logger.warning("what ended threads have left is dropped later: %s", error)


def _try_to_drop_ended() -> None:
    with _lock:
        kept = list(_kept)
    # Looked at after that: a thread that comes up meanwhile is not among those asked for.
    alive = set(map(int, os.listdir("/proc/self/task")))
    ended = [entry for entry in kept if entry[0] not in alive]
    with _lock:
        _kept[:] = [entry for entry in _kept if entry not in ended]
    if ended:
        # From Python 3.12 on a thread that drops another's state is not known as Python's any more: let it end.
        dropping = threading.Thread(target=_drop, args=([state for _, state in ended],))
        try:
            dropping.start()
        except RuntimeError:  # the system has no thread for it; next time
            with _lock:
                _kept.extend(ended)
            raise
        dropping.join()


def _drop(states: list[int]) -> None:
    for state in states:
        _python.PyThreadState_Clear(ctypes.c_void_p(state))
        _python.PyThreadState_Delete(ctypes.c_void_p(state))
