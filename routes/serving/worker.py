"""An HTTP worker process: Robyn on the shared port, connected to the engines by sockets. No torch.

Threads:
- Robyn's event loop runs the handlers.
- Robyn's pool writes the streams. It has a thread per open stream, and ends those idle for 10 s.
- One thread receives from the engine.
- One does housekeeping.
- One listens to the supervisor.
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
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
from robyn import Headers, Robyn, robyn

from native.heap import mmap_large_blocks, release_free_pages
from routes import system, web_page
from routes.config import HttpConfig
from routes.context import Context, KeyRing, Readiness, RequestLimiter
from routes.docs.openapi import openapi_document
from routes.file_store import open_store
from routes.model_registry import ModelRegistry, connect_model
from routes.serving import preload
from routes.serving.access import ClientIdentity, add_request_ids, anonymous_grant, shows_secret
from routes.serving.active_requests import GUARD_KEY, TRACER_KEY
from routes.serving.connections import cancel_left, identify_connections, known_connections
from routes.serving.http import register
from routes.serving.listen_socket import serve
from routes.serving.stream_guard import StreamGuard
from routes.serving.thread_states import drop_ended
from routes.serving.upload_guard import ROBYN_SERVER, BrokenForms, UploadGuard
from routes.table import ROUTES
from rwkv_batch.calls import DecodeDefaults
from rwkv_batch.fleet.fleet import Fleet
from rwkv_batch.fleet.routing import FleetLimits
from rwkv_batch.ipc.process import LogConfig, become_child, set_up_logging
from rwkv_batch.translation.plan import CACHE_KEY, TranslationCache

logger = logging.getLogger(__name__)

_HOUSEKEEPING_S = 0.1
_AFFINITY_RESETS = 100
_TICKS_PER_THREAD_CLEANUP = 50
"""Housekeeping ticks between two searches for ended threads."""
_TICKS_PER_DISCONNECT_CHECK = 2
"""Housekeeping ticks between two searches for clients that have left."""
_TICKS_PER_PAGE_RELEASE = 600
"""Housekeeping ticks between two releases of free memory."""
_TICKS_PER_USE_REPORT = 5
"""Housekeeping ticks between two reports of used models."""
_MIN_FINISH_S = 4.5
"""Least time to tell clients that their answers end, even if --drain-timeout-s is shorter."""
_FLUSH_SPANS_S = 1.0
"""Time to send the last spans to a collector."""
_FLUSH_S, _FLUSH_TICKS = 0.3, 30
"""Time for Robyn to send its last bytes, split into sleeps. With busy CPUs, each sleep lasts longer."""


class SupervisorLink:
    """This process's end of the supervisor's pipe. Any thread may send, one receives."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def notify(self, subject: str, value: object = None) -> None:
        """Send a message. Ends the process if the supervisor is gone."""
        try:
            with self._lock:
                self._pipe.send((subject, value))
        except OSError:
            os._exit(1)

    def set_event_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set the event loop of the handlers, and report that it runs."""
        self._loop = loop
        self.notify("serving")

    def send_heartbeat(self) -> None:
        """Make the event loop report to the supervisor. A hanging loop does not report."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.notify, "heartbeat")

    def receive(self) -> Any:
        """Return the next command. Ends the process if the supervisor is gone."""
        try:
            return self._pipe.recv()
        except (EOFError, OSError):
            os._exit(1)


def run_http_worker(
    config: HttpConfig,
    log_config: LogConfig,
    listeners: list[socket.socket],
    guard: socket.socket,
    name: str,
    pipe: Connection,
) -> None:
    """Run the process: wait for the index of one of the `listeners`, then serve on it.

    guard: link to the supervisor's `GuardedStreams`

    To the supervisor:
    - ("standby", None), ("serving", None)
    - ("engine", whether it is connected)
    - ("used", names of models), ("model", command)
    - ("heartbeat", None) from the event loop, in reply to "ping"
    - ("failed", reason)

    From the supervisor:
    - ("serve", number, keys), ("keys", keys)
    - ("all_ready", whether every worker accepts requests)
    - ("models", list), ("model", number, refusal)
    - "ping", "drain" and "finish", which ends the process
    """
    become_child(name, log_config)
    _block_signals()
    mmap_large_blocks()
    supervisor = SupervisorLink(pipe)
    try:
        _run(config, log_config, listeners, StreamGuard(guard), supervisor)
    except Exception as error:  # the supervisor gets the reason, and the process ends
        logger.exception("the HTTP worker failed")
        supervisor.notify("failed", f"{type(error).__name__}: {error}")
        os._exit(1)


def _run(
    config: HttpConfig,
    log_config: LogConfig,
    listeners: list[socket.socket],
    guard: StreamGuard,
    supervisor: SupervisorLink,
) -> None:
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
        lambda model: connect_model(context, model, f"http-{os.getpid()}", fleet.quotas),
        fleet.update,
    )
    context.models = models
    context.shared[GUARD_KEY] = guard
    cpus = os.sched_getaffinity(0)
    app = _application(context, cpus, supervisor, models)
    # Exclude these objects from collections: walking them stops all streams for 10 ms.
    gc.collect()
    gc.freeze()
    supervisor.notify("standby")
    match supervisor.receive():
        case ("serve", number, keys):
            name = f"http-{number}"
            context.keys.replace(keys)
        case _:
            os._exit(0)
    # Robyn creates 512 / visible CPUs threads for streams, so show it one CPU. Each stream holds a thread.
    os.sched_setaffinity(0, {sorted(cpus)[os.getpid() % len(cpus)]})
    set_up_logging(name, log_config)
    add_request_ids()
    if config.otlp_endpoint:
        from routes.serving.tracing import RequestTracer  # loads OpenTelemetry's SDK

        context.shared[TRACER_KEY] = RequestTracer(config.otlp_endpoint)
    fleet.start(name)
    follow_thread = threading.Thread(
        target=_follow_supervisor, args=(context, fleet, supervisor, models), name="supervisor", daemon=True
    )
    follow_thread.start()
    try:
        identity = ClientIdentity(config)
        has_secret = anonymous_grant(context) is None
        identify_connections(Path(robyn.__file__), partial(shows_secret, context, identity) if has_secret else None)
        logging.getLogger(ROBYN_SERVER).addFilter(BrokenForms({route.path: route.error_format for route in ROUTES}))
    except (OSError, RuntimeError) as error:  # serve without it: such answers are computed to their end
        logger.warning("a client that leaves before an answer without a stream is not noticed: %s", error)
    serve(app, listeners[number])


def _context(fleet: Fleet, config: HttpConfig, readiness: Readiness) -> Context:
    limiter = RequestLimiter(config.max_streams, config.max_streams_per_client)
    context = Context(fleet, config, limiter, readiness, KeyRing(bool(config.keys_file)), tokenizer=preload.TOKENIZER)
    context.files, context.defaults = open_store(config), msgspec.convert(config.defaults, DecodeDefaults)
    context.shared[system.OPENAPI_KEY] = cache(partial(openapi_document, ROUTES))
    context.shared[CACHE_KEY] = TranslationCache(config.translate_cache)
    context.shared[web_page.FILES_KEY] = preload.WEB_FILES
    return context


def _application(context: Context, cpus: set[int], supervisor: SupervisorLink, models: ModelRegistry) -> Robyn:
    """Return Robyn with every route. Starts housekeeping with the event loop."""

    uploads = UploadGuard(max(context.config.max_body_bytes, context.config.max_state_bytes), context.limiter)
    streams: StreamGuard = context.shared[GUARD_KEY]

    def housekeeping() -> None:
        for tick in range(sys.maxsize):
            if uploads.check(known_connections()):
                supervisor.notify("failed", "too many connections of clients that have left stay open in Robyn")
                os._exit(1)
            streams.flush()
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
    # Entering Robyn's native side releases the streams of disconnected clients.
    Headers({})
    if tick % _TICKS_PER_DISCONNECT_CHECK == 0:
        cancel_left()
    if tick % _TICKS_PER_USE_REPORT == 0 and (used := models.pop_used()):
        supervisor.notify("used", used)
    if tick < _AFFINITY_RESETS:
        _reset_affinity(cpus)
    if tick % _TICKS_PER_THREAD_CLEANUP == 0:
        drop_ended()
    if tick % _TICKS_PER_PAGE_RELEASE == 0:
        release_free_pages()


def _block_signals() -> None:
    """Block signals that Robyn's server would handle by refusing new connections.

    A signal to the whole process group would make it stop accepting while the process lives on, and connections would
    hang. Must run before threads start.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGQUIT})


def _set_limits() -> None:
    """Raise the connection limit to the system's maximum, and disable core files.

    Robyn aborts on malformed requests. A core file for each would fill the disk and take time.
    """
    with contextlib.suppress(OSError, ValueError):
        maximum = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, maximum))
        # 1, not 0: Linux then does not pipe it into a collecting program either.
        resource.setrlimit(resource.RLIMIT_CORE, (1, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _use_batch_scheduling() -> None:
    """Use batch scheduling, so that waking threads do not preempt others.

    They would preempt an engine thread within a step, and all other threads of the step would wait for it.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _reset_affinity(cpus: set[int]) -> None:
    """Allow every thread of this process to run on all its CPUs."""
    with contextlib.suppress(OSError):  # clients may hold all descriptors
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(int(thread), cpus)


def _follow_supervisor(context: Context, fleet: Fleet, supervisor: SupervisorLink, models: ModelRegistry) -> None:
    """Handle the supervisor's commands.

    "drain" refuses new requests. "finish" ends the process after the last answer.
    """
    while True:
        match supervisor.receive():
            case ("all_ready", all_workers_ready):
                context.readiness.all_workers_ready = all_workers_ready
            case "ping":
                supervisor.send_heartbeat()
            case "drain":
                context.limiter.draining = True
                fleet.is_shutting_down = True
                models.drain()
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
                if (tracer := context.shared.get(TRACER_KEY)) is not None:
                    tracer.close(_FLUSH_SPANS_S)
                os._exit(0)
