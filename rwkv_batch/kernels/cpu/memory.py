"""Memory of a model's packed matrices on a CPU.

It uses huge pages if available. A step reads every matrix once, in order. With 4 KiB pages it needs a page address
every 64 lines, and prefetchers stop at page ends. Matrices share blocks because they do not fill whole huge pages. A
block is freed with its last matrix.
"""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

ALIGNMENT = 64
HUGE_PAGE = 2 << 20
BLOCK = 16 * HUGE_PAGE
MIN_BLOCK_BYTES = HUGE_PAGE // 4
"""Minimum size of an allocation from a block: smaller ones are read quickly, and may be an adapter's, which come and
go."""


class PackedMemory:
    """Memory of one stage's matrices; the first ones fill the first block. Not thread-safe."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def allocate(self, size: int) -> Tensor:
        """Returns [size] uint8 zeros, 64-byte aligned. Raises MemoryError if there is no room."""
        if size < MIN_BLOCK_BYTES:
            return allocate_plain(size)
        at = -(-self._used // ALIGNMENT) * ALIGNMENT
        if at + size > len(self._block):
            self._block, at = _block(max(BLOCK, size)), 0
        self._used = at + size
        return self._block[at : at + size]


def allocate_plain(size: int) -> Tensor:
    """Returns [size] zeros in memory of their own."""
    memory = torch.zeros(size + ALIGNMENT, dtype=torch.uint8)
    return memory[-memory.data_ptr() % ALIGNMENT :][:size]


def _block(size: int) -> Tensor:
    """Returns [size] zeros, aligned to huge pages. Untouched pages take no memory."""
    try:
        pages = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {size} bytes of packed matrices ({error}); serve a smaller model") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    return memory[-memory.data_ptr() % HUGE_PAGE :][:size]
