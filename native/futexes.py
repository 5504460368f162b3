"""The kernel's table of the futexes on which a process's threads wait: of one size from the beginning.

Linux 6.16 and later give each process a table of its own and a larger one when it has more threads. For some
milliseconds after that the old one holds on to the process's memory: where the process ends meanwhile, it is not its
last thread that frees its memory, at whatever priority, but a worker of the kernel's, before all others on that core.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

_PR_FUTEX_HASH, _SET_SLOTS, _GET_SLOTS = 78, 1, 2
"""Linux, prctl.h."""
_SLOTS_PER_CPU = 4
"""As many as the kernel gives to as many threads as there are CPUs, which is the most that it gives."""
_MIN_SLOTS = 16


def fix_futex_table() -> None:
    """Have the table that the kernel would make in the end. To be called before threads are started.

    Without effect where there is no such table.
    """
    slots = 1 << (max(_MIN_SLOTS, _SLOTS_PER_CPU * (os.cpu_count() or 1)) - 1).bit_length()
    _prctl(_SET_SLOTS, slots)


def futex_slots() -> int | None:
    """Slots of the table; 0: it is the system's own, as that of a process without threads; None: there are none."""
    slots = _prctl(_GET_SLOTS, 0)
    return None if slots is None or slots < 0 else slots


def _prctl(what: int, value: int) -> int | None:
    """What the system says to that; None: it has no such call."""
    with contextlib.suppress(AttributeError, OSError):
        return int(ctypes.CDLL(None).prctl(_PR_FUTEX_HASH, *map(ctypes.c_ulong, (what, value, 0, 0))))
    return None
