"""Main function of an engine's process. A separate module, so that a forked process imports nothing else."""

from __future__ import annotations

import threading
from typing import Any

from rwkv_batch.ipc.process import set_compute_environment


def engine_process(*arguments: Any) -> None:
    """Run an engine. The arguments are those of `rwkv_batch.ipc.server.run_engine`."""
    set_compute_environment()
    from tqdm import tqdm

    from rwkv_batch.ipc.server import run_engine

    # tqdm's default lock is a system semaphore, which a killed engine leaks with a warning.
    tqdm.set_lock(threading.RLock())
    run_engine(*arguments)
