"""What every process of the service does first."""

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
def test_a_process_whose_thread_dies_ends_and_says_so(ends: str) -> None:
    """Half a process would be silent: whoever started it starts it anew."""
    child = subprocess.run(
        [sys.executable, "-c", CHILD, ends], capture_output=True, text=True, check=False, timeout=300
    )
    if ends == "dies":
        assert (child.returncode, child.stdout) == (1, ""), child.stderr
        assert "the thread listener has died" in child.stderr and "KeyError: 'odd'" in child.stderr
    else:
        assert (child.returncode, child.stdout) == (0, "goes on\n"), child.stderr
