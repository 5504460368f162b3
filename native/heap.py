"""The C heap of a process that holds many short-lived bodies: what is freed goes back to the system."""

from __future__ import annotations

import contextlib
import ctypes

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
LARGE_BYTES = 256 << 10
"""Blocks of this size or more are separate mappings, which free() returns to the system."""
ARENAS = 2


def limit_malloc_arenas() -> None:
    """Threads share two heaps; without effect where there is no glibc. To be called before threads are started.

    Left alone, glibc gives each thread a heap of its own: a process then grows for hours, until each has held the
    largest of what its thread ever holds.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, ARENAS)


def mmap_large_blocks() -> None:
    """Large blocks never come from heaps; without effect where there is no glibc.

    Left alone, glibc raises the size from which blocks are mappings to that of the largest that was freed. For
    processes whose large blocks are seldom: each one costs a call of the system and its pages anew.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
