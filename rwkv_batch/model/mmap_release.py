"""Gives the pages of a memory-mapped weight file back once its numbers have been copied elsewhere."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from pathlib import Path

from torch import Tensor

MADV_DONTNEED = 4
WORTH_BYTES = 64 << 10
"""Less is left alone: to find its mapping takes longer than it is worth, and a model has few that are as small."""


def release(tensor: Tensor) -> None:
    """Drop the whole pages of a tensor [...] from this process's memory, if they map a file; they stay readable.

    The file's tensors are never written to, so nothing is lost. Does nothing outside Linux.
    """
    if not sys.platform.startswith("linux") or tensor.device.type != "cpu":
        return
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // mmap.PAGESIZE * mmap.PAGESIZE
    if last - first >= WORTH_BYTES and tensor.is_contiguous() and _maps_a_file(first, last):
        _madvise()(first, last - first, MADV_DONTNEED)


def _maps_a_file(first: int, last: int) -> bool:
    """Whether one mapping of a file on disk covers the addresses; other memory would lose what it holds."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        # 7f12-7f56 rw-p 00000000 08:01 1234   /path; anonymous memory has inode 0.
        span, _, _, _, inode, *_ = line.split(maxsplit=5)
        start, stop = (int(part, 16) for part in span.split("-"))
        if start <= first and last <= stop:
            return inode != "0"
    return False


@functools.cache
def _madvise() -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    function.restype = ctypes.c_int
    return function
