"""Memory of packed matrices: zeroed, without overlap, in blocks that may use huge pages."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest
import torch

from rwkv_batch.kernels.cpu.memory import ALIGNMENT, BLOCK, HUGE_PAGE, MIN_BLOCK_BYTES, PackedMemory, allocate_plain

SMAPS = Path("/proc/self/smaps")
HAS_FLAGS = Path("/sys/kernel/mm/transparent_hugepage").exists() and SMAPS.exists() and "VmFlags" in SMAPS.read_text()


def mapping_of(address: int) -> str | None:
    """Return the kernel's record of the mapping that has an address; None if there is none."""
    for part in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", SMAPS.read_text()):
        first, last = (int(end, 16) for end in part.split(" ", 1)[0].split("-"))
        if first <= address < last:
            return part
    return None


def test_allocations_are_zero_and_do_not_overlap() -> None:
    memory = PackedMemory()
    sizes = [
        MIN_BLOCK_BYTES,
        MIN_BLOCK_BYTES + 1,
        3,
        BLOCK - MIN_BLOCK_BYTES,
        2 * BLOCK + 5,
        MIN_BLOCK_BYTES,
        100,
        BLOCK,
    ]
    pieces = [memory.allocate(size) for size in sizes]
    assert [len(piece) for piece in pieces] == sizes
    for number, piece in enumerate(pieces, 1):
        assert piece.dtype == torch.uint8 and piece.data_ptr() % ALIGNMENT == 0 and not piece.any()
        piece.fill_(number)
    assert all((piece == number).all() for number, piece in enumerate(pieces, 1))
    assert pieces[1].data_ptr() - pieces[0].data_ptr() == MIN_BLOCK_BYTES, "they lie in one block, one behind the other"


@pytest.mark.skipif(not HAS_FLAGS, reason="this kernel has no huge pages, or does not say so")
def test_blocks_use_huge_pages_and_are_freed() -> None:
    memory = PackedMemory()
    first, second, small = (
        memory.allocate(MIN_BLOCK_BYTES),
        memory.allocate(BLOCK),
        memory.allocate(MIN_BLOCK_BYTES - 1),
    )
    address = first.data_ptr()
    assert address % HUGE_PAGE == 0 and second.data_ptr() % HUGE_PAGE == 0
    for piece, is_huge in ((first, True), (second, True), (small, False), (allocate_plain(BLOCK), False)):
        mapping = mapping_of(piece.data_ptr())
        assert mapping is not None and (" hg" in mapping.rpartition("VmFlags:")[2]) is is_huge
    before = mapping_of(address)
    del first
    gc.collect()
    assert before is not None and mapping_of(address) is None, "a block of which nothing is left"
