"""Keeps the Python thread states of Robyn's threads between chunks.

Robyn requests each chunk of a stream on a thread of its pool. For such a thread, Python creates a state on entry and
drops it on exit. This maps and unmaps memory, which stops all threads: 40 % of the CPU time of a chunk. One extra entry
without exit keeps the state. Python does not notice when such a thread ends, so `drop_ended` drops the states of ended
threads.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading

logger = logging.getLogger(__name__)

CAN_KEEP = sys.platform == "linux" and sys.implementation.name == "cpython"
"""Other systems do not list the threads of a process."""

_python = ctypes.PyDLL(None)
_python.PyThreadState_Get.restype = ctypes.c_void_p
_local = threading.local()
_lock = threading.Lock()
_kept: list[tuple[int, int]] = []
"""(kernel id of the thread, address of its state)"""


def keep_state() -> None:
    """Keep the state of the calling thread until `drop_ended` drops it. Python did not create that thread."""
    if CAN_KEEP and not hasattr(_local, "is_kept"):
        _local.is_kept = True
        _python.PyGILState_Ensure()
        with _lock:
            _kept.append((threading.get_native_id(), _python.PyThreadState_Get()))


def drop_ended() -> None:
    """Drop the states of ended threads. If no descriptor or thread is free, a later call retries."""
    if not CAN_KEEP:
        return
    try:
        _try_to_drop_ended()
    except (OSError, RuntimeError) as error:  # clients may hold all descriptors for a while
        logger.warning("thread states of ended threads are dropped later: %s", error)


def _try_to_drop_ended() -> None:
    with _lock:
        kept = list(_kept)
    # Listed after `_kept` was copied: a new thread is not in the copy.
    alive = set(map(int, os.listdir("/proc/self/task")))
    ended = [entry for entry in kept if entry[0] not in alive]
    with _lock:
        _kept[:] = [entry for entry in _kept if entry not in ended]
    if ended:
        # From Python 3.12 on, a thread that drops another's state loses its own, so use a thread that ends.
        dropping = threading.Thread(target=_drop, args=([state for _, state in ended],))
        try:
            dropping.start()
        except RuntimeError:  # no thread available; retry next time
            with _lock:
                _kept.extend(ended)
            raise
        dropping.join()


def _drop(states: list[int]) -> None:
    for state in states:
        _python.PyThreadState_Clear(ctypes.c_void_p(state))
        _python.PyThreadState_Delete(ctypes.c_void_p(state))
