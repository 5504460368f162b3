"""A process that has freed a large body gives the next one back too."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

HOLDS = """
import ctypes
from native.heap import LARGE_BYTES, keep_heap_small
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", *"abcdef")]
libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
if {kept}:
    keep_heap_small()
del (freed := [bytearray(16 * LARGE_BYTES)])[:]
before = libc.mallinfo2().hblks
body = bytearray(2 * LARGE_BYTES)
print(libc.mallinfo2().hblks - before)
"""


def mappings(kept: bool) -> int:
    """Mappings that a body takes after a larger one was freed, in a process of its own."""
    told = subprocess.run([sys.executable, "-c", HOLDS.replace("{kept}", str(kept))], capture_output=True, check=True)
    return int(told.stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the heap of glibc 2.33 or later")
def test_a_body_is_a_mapping_of_its_own_whatever_was_freed_before() -> None:
    assert mappings(kept=True) == 1
    assert mappings(kept=False) == 0  # what glibc does when it is left alone
