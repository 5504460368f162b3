"""Imports for the process that engines of further models are forked from.

That process imports this module at low priority and keeps no thread.
"""

from __future__ import annotations

import importlib
import os
import signal

from native.priority import at_low_priority
from rwkv_batch.ipc import server  # noqa: F401
from rwkv_batch.ipc.process import gc_paused, set_compute_environment
from rwkv_batch.tokenizer import make_byte_tables

# A signal to the whole group is for the supervisor, which ends the other processes in order.
for _signal in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(_signal, signal.SIG_IGN)
set_compute_environment()
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # its threads would not survive a fork


def _make() -> None:
    importlib.import_module("rwkv_batch.engine")
    make_byte_tables()


with gc_paused():
    at_low_priority(_make)
