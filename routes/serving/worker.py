"""An HTTP worker process: Robyn on the shared port, the engine behind a socket. Knows no torch.

Threads: Robyn's event loop runs the handlers; its pool writes the streams; one receives from the engine;
one keeps house; one listens to the supervisor.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import threading
import time
from multiprocessing.connection import Connection

from routes import system, translate, web_page
from routes.config import HttpConfig
from routes.context import Context, Gate
from routes.docs.openapi import openapi_document
from routes.route import Route
from routes.serving.thread_states import drop_ended
from routes.table import ROUTES
from rwkv_batch.ipc.client import EngineClient
from rwkv_batch.ipc.process import LogStyle, become_child

logger = logging.getLogger(__name__)

_HOUSEKEEPING_S = 0.1
_WIDENINGS = 100
_TURNS_TO_DROP = 50
"""WakeUps of housekeeping from one search for ended threads to the next."""
_FLUSH_S = 0.3
"""Time for the last bytes to leave Robyn after the last handler has returned."""


def run_http_worker(config: HttpConfig, address: str, style: LogStyle, name: str, supervisor: Connection) -> None:
    """Main function of the process; it ends when the supervisor says so."""
    become_child(name, style)
    _let_others_finish()
    cpus = os.sched_getaffinity(0)
    # Robyn gives a process 512 / visible CPUs threads for streams, each of which holds one while it waits.
    os.sched_setaffinity(0, {sorted(cpus)[os.getpid() % len(cpus)]})
    client = EngineClient(address, name)
    context = Context(client, config, Gate(config.max_streams, config.max_streams_per_client))
    context.shared[system.OPENAPI] = openapi_document(ROUTES)
    context.shared[translate.CACHE] = translate.TranslationCache(config.translate_cache)
    context.shared[web_page.FILES] = web_page.read_files()
    client.start()
    threading.Thread(target=_follow_supervisor, args=(context, supervisor), name="supervisor", daemon=True).start()
    _serve(context, ROUTES, cpus)


def _serve(context: Context, routes: tuple[Route, ...], cpus: set[int]) -> None:
    # Robyn reads sys.argv when it is imported, abbreviations and all.
    sys.argv = [sys.argv[0], "--log-level", "WARN", "--disable-openapi"]
    for name in ("ROBYN_HOST", "ROBYN_PORT", "ROBYN_DEV_MODE", "ROBYN_BROWSER_OPEN"):
        os.environ.pop(name, None)
    from robyn import Headers, Robyn

    from routes.serving.http import register

    def housekeeping() -> None:
        for turn in range(sys.maxsize):
            if turn < _WIDENINGS:
                _widen(cpus)
            # Entering Robyn's native side releases the streams whose clients have gone.
            Headers({})
            if turn % _TURNS_TO_DROP == 0:
                drop_ended()
            time.sleep(_HOUSEKEEPING_S)

    def started() -> None:
        # What was loaded stays: a full collection that walks all of it stops every stream for 10 ms.
        gc.collect()
        gc.freeze()
        threading.Thread(target=housekeeping, name="housekeeping", daemon=True).start()

    app = Robyn(__file__)
    register(app, context, routes)
    app.startup_handler(started)
    app.start(host=context.config.host, port=context.config.port, _check_port=False)


def _let_others_finish() -> None:
    """Where all CPUs are busy, a thread of ours that wakes waits its turn instead of taking another's place at once.

    What it would interrupt there is a step of the engine, whose threads all wait for the one that was stopped.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _widen(cpus: set[int]) -> None:
    """Let every thread of this process run on all its CPUs again."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(thread), cpus)


def _follow_supervisor(context: Context, supervisor: Connection) -> None:
    """Follow the supervisor: "drain" refuses new work, "finish" ends the process when the last answer is out."""
    while True:
        try:
            command = supervisor.recv()
        except (EOFError, OSError):
            os._exit(1)
        if command == "drain":
            context.gate.draining = True
        elif command == "finish":
            deadline = time.monotonic() + context.config.drain_timeout_s
            while context.gate.inside and time.monotonic() < deadline:
                time.sleep(0.02)
            time.sleep(_FLUSH_S)
            os._exit(0)
