"""The common setup of the service's processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHILD = """
import sys, threading, time
from rwkv_batch.ipc.process import LogStyle, become_child

def work():
    raise KeyError("odd") if sys.argv[1] == "dies" else SystemExit(3)

become_child("child", LogStyle())
thread = threading.Thread(target=work, name="listener", daemon=True)
thread.start()
thread.join()
print("goes on")
"""


@pytest.mark.parametrize("ends", ["dies", "leaves"])
def test_a_process_whose_thread_dies_ends_with_a_log_line(ends: str) -> None:
    """Otherwise the process would continue without that thread. The supervisor restarts it."""
    child = subprocess.run(
        [sys.executable, "-c", CHILD, ends], capture_output=True, text=True, check=False, timeout=300
    )
    if ends == "dies":
        assert (child.returncode, child.stdout) == (1, ""), child.stderr
        assert "the thread listener has died" in child.stderr and "KeyError: 'odd'" in child.stderr
    else:
        assert (child.returncode, child.stdout) == (0, "goes on\n"), child.stderr


THREADS = """
import threading
from native.futexes import futex_slots
from rwkv_batch.ipc.process import LogStyle, become_child

before = futex_slots()
become_child("child", LogStyle())
slots, over = futex_slots(), threading.Event()
threads = [threading.Thread(target=over.wait, daemon=True) for _ in range(70)]
for thread in threads:
    thread.start()
assert futex_slots() == slots
over.set()
print(before, slots)
"""


def test_threads_do_not_change_the_table_of_futexes() -> None:
    """While the kernel resizes it, an ending process leaves its memory to a kernel worker."""
    run = [sys.executable, "-c", THREADS]
    before, slots = subprocess.run(run, check=True, capture_output=True, text=True).stdout.split()
    if before == "None":
        pytest.skip("this system has no such table")
    assert before == "0" and int(slots) >= 16
