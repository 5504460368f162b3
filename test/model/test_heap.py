"""A process returns a large body's memory. It also does so after it has freed an earlier one."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

AS_GLIBC_IS = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
"""The environment of the tests may set the number of heaps."""
HOLDS = """
import ctypes
from native.heap import LARGE_BYTES, mmap_large_blocks
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", *"abcdef")]
libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
if {kept}:
    mmap_large_blocks()
del (freed := [bytearray(16 * LARGE_BYTES)])[:]
before = libc.mallinfo2().hblks
body = bytearray(2 * LARGE_BYTES)
print(libc.mallinfo2().hblks - before)
"""


def mappings(kept: bool) -> int:
    """Return the mappings of a body after a larger one was freed. Another process counts them."""
    return run_and_read(HOLDS.replace("{kept}", str(kept)))


def run_and_read(script: str) -> int:
    """Return the number that another process writes."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, env=AS_GLIBC_IS)
    return int(done.stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the heap of glibc 2.33 or later")
def test_each_large_body_has_its_own_mapping() -> None:
    assert mappings(kept=True) == 1
    assert mappings(kept=False) == 0  # glibc's default


SCATTERED = """
import ctypes
from pathlib import Path
from native.heap import release_free_pages
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
blocks = [libc.malloc(8_000) for _ in range(4_000)]
for address in blocks:
    ctypes.memset(address, 1, 8_000)
for number, address in enumerate(blocks):
    if number % 100 < 99:
        libc.free(address)
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1])
before = resident()
if {released}:
    release_free_pages()
print((before - resident()) * 4096)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the heap of glibc")
def test_free_pages_between_used_blocks_return_to_the_system() -> None:
    def returned(released: bool) -> int:
        return run_and_read(SCATTERED.replace("{released}", str(released)))

    assert returned(True) > 24 << 20 > 1 << 20 > returned(False)


LARGE = """
import resource
from native.heap import keep_freed_blocks
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
if {kept}:
    keep_freed_blocks()
bytearray(64 << 20)
before = faults()
for _ in range(4):
    bytearray(64 << 20)
print(faults() - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the heap of glibc")
def test_large_blocks_use_the_pages_of_freed_ones() -> None:
    def new_pages(kept: bool) -> int:
        return run_and_read(LARGE.replace("{kept}", str(kept)))

    assert new_pages(True) < 100 < new_pages(False)


THREADS = """
import ctypes, os, threading
from rwkv_batch.ipc.process import LogConfig, become_child
libc = ctypes.CDLL(None)
libc.fdopen.restype = libc.malloc.restype = ctypes.c_void_p
if {bounded}:
    become_child("engine", LogConfig())
together = threading.Barrier(12)
def take():
    together.wait()
    libc.malloc(5_000)
    together.wait()
threads = [threading.Thread(target=take) for _ in range(12)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
read, write = os.pipe()
file = ctypes.c_void_p(libc.fdopen(write, b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
print(os.fdopen(read).read().count("<heap nr="))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="the heap of glibc")
def test_threads_of_a_process_of_the_service_share_two_heaps() -> None:
    def heaps(bounded: bool) -> int:
        return run_and_read(THREADS.replace("{bounded}", str(bounded)))

    assert heaps(bounded=True) <= 2
    assert heaps(bounded=False) > 2
