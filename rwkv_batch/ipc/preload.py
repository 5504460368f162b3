"""What engines have in common, made once in the process that those of models loaded while serving are forked from.

That process imports this module, stands behind all others on the cores meanwhile, and keeps no thread.
"""

from __future__ import annotations

import importlib
import os
import signal

from native.priority import at_low_priority
from rwkv_batch.ipc import server  # noqa: F401
from rwkv_batch.ipc.process import gc_paused, set_compute_environment
from rwkv_batch.tokenizer import make_byte_tables

# A manager that signals the whole group means the supervisor, which ends the others in order.
for _signal in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(_signal, signal.SIG_IGN)
set_compute_environment()
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # its threads would not live in what is forked


def _make() -> None:
    importlib.import_module("rwkv_batch.engine")
    make_byte_tables()


with gc_paused():
    at_low_priority(_make)
