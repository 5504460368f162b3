"""Memory of a model's packed matrices on a CPU, in huge pages where the kernel gives them.

A step reads every matrix once, one after the other: in pages of 4 KiB it looks for a page's address every 64 lines,
and no prefetcher goes on into the next page. Matrices are no whole number of huge pages, so they share blocks; a block
is given back when its last matrix is.
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
"""Of what is taken from a block: what is smaller is read in no time, and may be an adapter's, which comes and goes."""


class PackedMemory:
    """Where one stage's matrices are put; its first matrices fill the first block. One thread uses it."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def allocate(self, size: int) -> Tensor:
        """[size] zeros, uint8, from an address that is a multiple of 64. Raises MemoryError if there is no room."""
        if size < MIN_BLOCK_BYTES:
            return allocate_plain(size)
        at = -(-self._used // ALIGNMENT) * ALIGNMENT
        if at + size > len(self._block):
            self._block, at = _block(max(BLOCK, size)), 0
        self._used = at + size
        return self._block[at : at + size]


def allocate_plain(size: int) -> Tensor:
    """[size] zeros, the same in memory of their own."""
    memory = torch.zeros(size + ALIGNMENT, dtype=torch.uint8)
    return memory[-memory.data_ptr() % ALIGNMENT :][:size]


def _block(size: int) -> Tensor:
    """[size] zeros, from a huge page's border on. Pages that are never touched take no memory."""
    try:
        pages = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {size} bytes of packed matrices ({error}); serve a smaller model") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    return memory[-memory.data_ptr() % HUGE_PAGE :][:size]
