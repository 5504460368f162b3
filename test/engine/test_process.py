"""The common setup of the service's processes."""

from __future__ import annotations

import gc
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rwkv_batch.ipc.process import _GREEN, _RED, _YELLOW, LogConfig, _Text, set_up_logging
from test.conftest import pytest_runtest_setup

CHILD = """
import sys, threading, time
from rwkv_batch.ipc.process import LogConfig, become_child

def work():
    raise KeyError("odd") if sys.argv[1] == "dies" else SystemExit(3)

become_child("child", LogConfig())
thread = threading.Thread(target=work, name="listener", daemon=True)
thread.start()
thread.join()
print("goes on")
"""


def test_headlines_and_problems_are_coloured() -> None:
    colours = [
        _Text._colour(logging.makeLogRecord({"levelno": level, "is_headline": is_headline}))
        for level, is_headline in ((10, False), (20, False), (20, True), (30, False), (40, False), (50, False))
    ]
    assert colours == ["", "", _GREEN, _YELLOW, _RED, _RED]


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
import ctypes, threading
from rwkv_batch.ipc.process import LogConfig, become_child

def futex_slots():  # prctl(PR_FUTEX_HASH, PR_FUTEX_HASH_GET_SLOTS); None: the kernel has no such tables
    slots = ctypes.CDLL(None).prctl(78, *map(ctypes.c_ulong, (2, 0, 0, 0)))
    return None if slots < 0 else slots

before = futex_slots()
become_child("child", LogConfig())
slots, over = futex_slots(), threading.Event()
threads = [threading.Thread(target=over.wait, daemon=True) for _ in range(70)]
for thread in threads:
    thread.start()
assert futex_slots() == slots
over.set()
print(before, slots)
"""


def test_threads_do_not_change_the_table_of_futexes() -> None:
    """The kernel may resize it. Meanwhile, an ending process leaves its memory to a kernel worker."""
    run = [sys.executable, "-c", THREADS]
    before, slots = subprocess.run(run, check=True, capture_output=True, text=True).stdout.split()
    if before == "None":
        pytest.skip("this system has no such table")
    assert before == "0" and int(slots) >= 16


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers, level, callbacks = root.handlers[:], root.level, gc.callbacks[:]
    yield root
    root.handlers[:], gc.callbacks[:] = handlers, callbacks
    root.setLevel(level)


def record(**fields: object) -> logging.LogRecord:
    made = logging.LogRecord("rwkv.x", logging.WARNING, "f.py", 1, "took %d\nparts", (3,), None)
    made.created, made.msecs = 1700000000.0421, 42.1
    if fields:
        made.fields = fields
    return made


def test_a_line_of_the_log_is_text_or_json(root_logger: logging.Logger) -> None:
    set_up_logging("http-0", LogConfig(form="json", level="warning"))
    assert root_logger.level == logging.WARNING
    assert [logging.getLogger(name).level for name in ("robyn", "asyncio")] == [logging.WARNING] * 2
    form = root_logger.handlers[0].formatter
    assert form is not None
    assert json.loads(form.format(record(rows=3))) == {
        "time": "2023-11-14T22:13:20.042Z",
        "level": "warning",
        "process": "http-0",
        "logger": "rwkv.x",
        "message": "took 3\nparts",
        "rows": 3,
    }
    failed = record()
    try:
        raise KeyError("odd")
    except KeyError:
        failed.exc_info = sys.exc_info()
    line = form.format(failed)
    assert "\n" not in line and json.loads(line)["traceback"].endswith("KeyError: 'odd'")
    set_up_logging("http-0", LogConfig())
    (handler,) = root_logger.handlers
    assert handler.formatter is not None
    text = handler.formatter.format(record(rows=3, client="a"))
    assert re.fullmatch(r"\d\d:13:20\.042 http-0     WARNING took 3\nparts rows=3 client=a", text)
    assert handler.formatter.format(record()).endswith("WARNING took 3\nparts")


def test_a_test_begins_without_the_log_of_an_earlier_one(root_logger: logging.Logger) -> None:
    """Its handler would write to a closed stream."""
    set_up_logging("batch", LogConfig())
    pytest_runtest_setup()
    assert root_logger.level == logging.WARNING
    assert not any(type(one) is logging.StreamHandler for one in root_logger.handlers)
