"""An HTTP worker process: Robyn on the shared port, the engine behind a socket. Knows no torch.

Threads: Robyn's event loop runs the handlers; its pool writes the streams; one receives from the engine;
one keeps house; one listens to the supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from robyn import Headers, Robyn

from native.heap import mmap_large_blocks
from routes import system, translate, web_page
from routes.api_keys import KeyRing
from routes.config import HttpConfig
from routes.context import Context, RequestLimiter
from routes.files_folder import open_store
from routes.model_connections import connect_model
from routes.model_registry import ModelRegistry
from routes.readiness import Readiness
from routes.serving import preload
from routes.serving.access_log import add_request_ids
from routes.serving.http import register
from routes.serving.listen_socket import serve
from routes.serving.thread_states import drop_ended
from routes.table import ROUTES
from rwkv_batch.fleet.fleet import Fleet, FleetLimits
from rwkv_batch.ipc.process import LogStyle, become_child, set_up_logging

logger = logging.getLogger(__name__)

_HOUSEKEEPING_S = 0.1
_AFFINITY_RESETS = 100
_TICKS_PER_THREAD_CLEANUP = 50
"""WakeUps of housekeeping from one search for ended threads to the next."""
_TICKS_PER_USE_REPORT = 5
"""The same from one word of the models in use to the next."""
_MIN_FINISH_S = 4.5
"""What clients get at least to be told that their answer ends here, however short --drain-timeout-s is."""
_FLUSH_S, _FLUSH_TICKS = 0.3, 30
"""Time for the last bytes to leave Robyn after the last handler has returned, and in how many turns of waiting: where
Robyn's threads wait for a core, so does each turn."""


class SupervisorLink:
    """This process's end of the supervisor's pipe. Any thread may tell, one listens."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def notify(self, subject: str, value: object = None) -> None:
        """Send news; ends the process if the supervisor is gone."""
        try:
            with self._lock:
                self._pipe.send((subject, value))
        except OSError:
            os._exit(1)

    def set_event_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Say that handlers run on this event loop from now on."""
        self._loop = loop
        self.notify("serving")

    def send_heartbeat(self) -> None:
        """Have the event loop say that it comes round; one that hangs says nothing."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.notify, "round")

    def receive(self) -> Any:
        """The next command; ends the process if the supervisor is gone."""
        try:
            return self._pipe.recv()
        except (EOFError, OSError):
            os._exit(1)


def run_http_worker(
    config: HttpConfig, style: LogStyle, listeners: list[socket.socket], name: str, pipe: Connection
) -> None:
    """Main function of the process: it stands by until it is given a number of `listeners`, then serves that one.

    The supervisor is sent ("standby", None), ("serving", None), ("engine", whether it is there), ("failed", reason).
    It sends ("serve", number, keys), ("all", whether every worker takes work), ("keys", those in force from now on),
    "look", to which the event loop says ("round", None), "drain" and "finish", which ends the process.
    """
    become_child(name, style)
    _block_signals()
    mmap_large_blocks()
    supervisor = SupervisorLink(pipe)
    try:
        _run(config, style, listeners, supervisor)
    except Exception as error:  # the process ends, and the supervisor is told why
        logger.exception("the HTTP worker failed")
        supervisor.notify("failed", f"{type(error).__name__}: {error}")
        os._exit(1)


def _run(config: HttpConfig, style: LogStyle, listeners: list[socket.socket], supervisor: SupervisorLink) -> None:
    _set_limits()
    _use_batch_scheduling()
    readiness = Readiness(config.engine_wait_s)

    def engine_changed(is_connected: bool) -> None:
        readiness.engine_changed(is_connected)
        supervisor.notify("engine", is_connected)

    limits = FleetLimits(config.resubmit, config.engine_wait_s, config.shares_sessions, num_routers=len(listeners))
    fleet = Fleet(limits, engine_changed)
    context = _context(fleet, config, readiness)
    models = ModelRegistry(
        lambda command: supervisor.notify("model", command),
        lambda model: connect_model(context, model, f"http-{os.getpid()}"),
        fleet.update,
    )
    context.models = models
    cpus = os.sched_getaffinity(0)
    app = _application(context, cpus, supervisor, models)
    # What was made stays: a full collection that walks all of it stops every stream for 10 ms.
    gc.collect()
    gc.freeze()
    supervisor.notify("standby")
    match supervisor.receive():
        case ("serve", number, keys):
            name = f"http-{number}"
            context.keys.replace(keys)
        case _:
            os._exit(0)
    # Robyn gives a process 512 / visible CPUs threads for streams, each of which holds one while it waits.
    os.sched_setaffinity(0, {sorted(cpus)[os.getpid() % len(cpus)]})
    set_up_logging(name, style)
    add_request_ids()
    fleet.start(name)
    follow_thread = threading.Thread(
        target=_follow_supervisor, args=(context, fleet, supervisor, models), name="supervisor", daemon=True
    )
    follow_thread.start()
    serve(app, listeners[number])


def _context(fleet: Fleet, config: HttpConfig, readiness: Readiness) -> Context:
    limiter = RequestLimiter(config.max_streams, config.max_streams_per_client)
    context = Context(fleet, config, limiter, readiness, KeyRing(bool(config.keys_file)), tokenizer=preload.TOKENIZER)
    context.files = open_store(config)
    context.shared[system.OPENAPI_KEY] = preload.OPENAPI_DOCUMENT
    context.shared[translate.CACHE_KEY] = translate.TranslationCache(config.translate_cache)
    context.shared[web_page.FILES_KEY] = preload.WEB_FILES
    return context


def _application(context: Context, cpus: set[int], supervisor: SupervisorLink, models: ModelRegistry) -> Robyn:
    """Robyn with every route; the supervisor is told when it has begun, and which models are used."""

    def housekeeping() -> None:
        for tick in range(sys.maxsize):
            _housekeeping_tick(tick, cpus, supervisor, models)
            time.sleep(_HOUSEKEEPING_S)

    async def started() -> None:
        supervisor.set_event_loop(asyncio.get_running_loop())
        threading.Thread(target=housekeeping, name="housekeeping", daemon=True).start()

    app = Robyn(__file__)
    register(app, context, ROUTES)
    app.startup_handler(started)
    return app


def _housekeeping_tick(tick: int, cpus: set[int], supervisor: SupervisorLink, models: ModelRegistry) -> None:
    """One turn of housekeeping."""
    # Entering Robyn's native side releases the streams whose clients have gone.
    Headers({})
    if tick % _TICKS_PER_USE_REPORT == 0 and (used := models.pop_used()):
        supervisor.notify("used", used)
    if tick < _AFFINITY_RESETS:
        _reset_affinity(cpus)
    if tick % _TICKS_PER_THREAD_CLEANUP == 0:
        drop_ended()


def _block_signals() -> None:
    """Robyn's server takes these for itself when it starts, whatever was to be done with them before, and at one that a
    whole group was sent ceases to accept: its connections would wait in the socket while the process lives on. Blocked
    before there are threads, they reach none."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGQUIT})


def _set_limits() -> None:
    """As many connections as the system allows, and no core files.

    Robyn aborts on malformed requests: a core file for each would fill the disk, and take its time.
    """
    with contextlib.suppress(OSError, ValueError):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        # 1, not 0: Linux then also writes none into a program that collects them.
        resource.setrlimit(resource.RLIMIT_CORE, (1, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _use_batch_scheduling() -> None:
    """Where all CPUs are busy, a thread of ours that wakes waits its turn instead of taking another's place at once.

    What it would interrupt there is a step of the engine, whose threads all wait for the one that was stopped.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _reset_affinity(cpus: set[int]) -> None:
    """Let every thread of this process run on all its CPUs again."""
    with contextlib.suppress(OSError):  # clients may hold all descriptors
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(int(thread), cpus)


def _follow_supervisor(context: Context, fleet: Fleet, supervisor: SupervisorLink, models: ModelRegistry) -> None:
    """Follow the supervisor: "drain" refuses new work, "finish" ends the process when the last answer is out."""
    while True:
        match supervisor.receive():
            case ("all", all_workers_ready):
                context.readiness.all_workers_ready = all_workers_ready
            case "look":
                supervisor.send_heartbeat()
            case "drain":
                context.limiter.draining = True
                fleet.is_shutting_down = True
                context.readiness.release_all()
            case ("keys", keys):
                context.keys.replace(keys)
            case ("models", table):
                models.update(table)
            case ("model", number, refusal):
                models.command_answered(number, refusal)
            case "finish":
                deadline = time.monotonic() + max(context.config.drain_timeout_s, _MIN_FINISH_S)
                while context.limiter.num_active and time.monotonic() < deadline:
                    time.sleep(0.02)
                for _ in range(_FLUSH_TICKS):
                    time.sleep(_FLUSH_S / _FLUSH_TICKS)
                os._exit(0)
