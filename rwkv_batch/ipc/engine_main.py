"""The main function of an engine's process, in a module of its own: what is forked for one imports nothing more."""

from __future__ import annotations

import threading
from typing import Any

from rwkv_batch.ipc.process import set_compute_environment


def engine_process(*arguments: Any) -> None:
    """See `rwkv_batch.ipc.server.run_engine`, whose arguments these are."""
    set_compute_environment()
    from tqdm import tqdm

    from rwkv_batch.ipc.server import run_engine

    # tqdm's own lock holds a semaphore of the system, which an engine that is killed leaves behind, with a warning.
    tqdm.set_lock(threading.RLock())
    run_engine(*arguments)
