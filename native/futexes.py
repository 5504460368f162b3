"""Gives the process's futex table its final size at the start.

Since Linux 6.16, each process has a futex table, which grows with its threads. For some milliseconds after it grows,
the old table keeps the process's memory alive. If the process ends then, a kernel worker frees the memory, at high
priority. Otherwise the last thread does, at its own priority.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

_PR_FUTEX_HASH, _SET_SLOTS = 78, 1
"""Linux, prctl.h."""
_SLOTS_PER_CPU = 4
"""The kernel's own maximum, which it gives to a process with one thread per CPU."""
_MIN_SLOTS = 16


def fix_futex_table() -> None:
    """Creates the process's futex table at its final size. Call it before threads start."""
    slots = 1 << (max(_MIN_SLOTS, _SLOTS_PER_CPU * (os.cpu_count() or 1)) - 1).bit_length()
    with contextlib.suppress(AttributeError, OSError):  # the kernel or the C library lacks the call
        ctypes.CDLL(None).prctl(_PR_FUTEX_HASH, *map(ctypes.c_ulong, (_SET_SLOTS, slots, 0, 0)))
