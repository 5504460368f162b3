"""Settings of glibc's heap: when freed memory returns to the system."""

from __future__ import annotations

import contextlib
import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8
LARGE_BYTES = 256 << 10
"""Blocks of this size or more are separate mappings, which free() returns to the system."""
ARENAS = 2


def limit_malloc_arenas() -> None:
    """Makes all threads share two heaps.

    Call it before threads start; without glibc it does nothing.

    By default, glibc gives each thread a heap. Then a process grows for hours, until each heap has held its thread's
    largest block.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, ARENAS)


def release_free_pages() -> None:
    """Returns the free pages inside the heaps to the system. Without glibc this does nothing.

    Blocks of requests lie between blocks that stay, so a heap keeps free pages: some MB in an hour. Releasing them
    takes below 1 ms.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def mmap_large_blocks() -> None:
    """Keeps large blocks out of heaps. Without glibc this does nothing.

    By default, glibc raises the limit for separate mappings to the largest freed block. This is for processes with few
    large blocks: each one costs a system call and new pages.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)


def keep_freed_blocks() -> None:
    """Keeps freed memory, also of large blocks, for the next ones. Without glibc this does nothing.

    By default, a tensor of more than 32 MB is a mapping of its own, whose pages the system clears each time. This is
    for processes that make the same tensors in each step.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_MAX, 0)
        ctypes.CDLL(None).mallopt(_M_TRIM_THRESHOLD, -1)
