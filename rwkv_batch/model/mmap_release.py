"""Releases pages of a memory-mapped weight file after a tensor was copied."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from pathlib import Path

from torch import Tensor

from rwkv_batch.model.files.gguf_blocks import stored

MADV_DONTNEED = 4
MIN_RELEASE_BYTES = 64 << 10
"""Smaller tensors are not released; a model has few of them."""
_FLAGS_BYTES = 8
"""Bytes per page in /proc/self/pagemap, see Linux's Documentation/admin-guide/mm/pagemap.rst."""
_ANONYMOUS_PAGE = bytes(byte for byte in range(256) if not byte & 0x20)
"""Last bytes of page flags without bit 61: not a page of a file, or absent."""
_PIECE_BYTES = 1 << 16


def release(tensor: Tensor) -> None:
    """Drop a tensor's whole pages [...] from this process's memory.

    Does so only if they map a file. They stay readable from the file, which is never written to. Does nothing outside
    Linux.
    """
    if not sys.platform.startswith("linux") or tensor.device.type != "cpu":
        return
    tensor = stored(tensor)
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // mmap.PAGESIZE * mmap.PAGESIZE
    if last - first >= MIN_RELEASE_BYTES and tensor.is_contiguous() and _is_file_mapping(first, last):
        _madvise()(first, last - first, MADV_DONTNEED)


def _is_file_mapping(first: int, last: int) -> bool:
    """Return whether these addresses, one mapping, are a file's. Other memory would lose its content.

    Reads the pages' flags: listing all mappings takes longer than loading a small tensor.
    """
    begin, end = (address // mmap.PAGESIZE * _FLAGS_BYTES for address in (first, last))
    try:
        with Path("/proc/self/pagemap").open("rb", buffering=0) as flags:
            flags.seek(begin)
            while begin < end and (piece := flags.read(min(end - begin, _PIECE_BYTES))):
                if piece[_FLAGS_BYTES - 1 :: _FLAGS_BYTES].translate(None, _ANONYMOUS_PAGE):
                    return True
                begin += len(piece)
    except OSError:  # without flags, pages are kept
        pass
    return False


@functools.cache
def _madvise() -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    function.restype = ctypes.c_int
    return function
