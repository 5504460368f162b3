"""The HTTP worker processes: one per listening socket, and spares.

A worker is forked, reports ready, and then gets a socket or stays a spare. Robyn aborts its process on some malformed
requests. So a worker that has served is replaced at once, any number of times. A worker that fails to start is
retried with growing delays. If none serves and none can start, the service ends with the reason.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, field
from typing import Any

from programs.serve.child import Child, backoff_s
from programs.serve.cluster_engines import ClusterEngines
from programs.serve.engines import Engines
from programs.serve.fork_context import ForkedContext
from routes.api_keys import KeysFile
from routes.serving.stream_guard import GuardedStreams
from rwkv_batch.errors import StartupError
from rwkv_batch.ipc.served_model import ServedModel
from rwkv_batch.ipc.watchdog import Watchdog

logger = logging.getLogger("supervisor")

SPARES = 4
_MAX_FAILED_STARTS = 5
"""Failed starts in a row, without a serving worker, after which the service ends."""
PRELOAD_MODULE = "routes.serving.preload"
HANG_S = 120.0
"""Seconds without a heartbeat of the event loop after which a worker is killed and replaced.

A hanging worker would still receive its share of the connections.
"""
_LOOK_S = 5.0


def fork_context() -> ForkedContext:
    """Returns the context that forks HTTP workers."""
    return ForkedContext(PRELOAD_MODULE, __name__)


def http_process(*arguments: Any) -> None:
    """Main function of an HTTP worker."""
    import routes.serving.preload  # noqa: F401  # before all else that imports Robyn
    from routes.serving.worker import run_http_worker

    run_http_worker(*arguments)


@dataclass(eq=False)
class Worker:
    """One HTTP worker process. It is started once."""

    child: Child
    is_standby: bool = False
    socket: int | None = None
    """Index of its listening socket. None: a spare."""
    serves: bool = False
    has_engine: bool = False
    failure_reason: str = ""
    watchdog: Watchdog = field(default_factory=lambda: Watchdog(HANG_S, time.monotonic, _LOOK_S))
    heartbeats: int = 0
    """Number of heartbeats of its event loop."""
    heartbeat_pending: bool = False
    """Whether a heartbeat is requested. There is one request at a time, so a stopped worker cannot fill the pipe."""


@dataclass(eq=False)
class HttpWorkers:
    """Keeps a worker on every listening socket."""

    context: ForkedContext
    arguments: tuple[Any, ...]
    num_sockets: int
    keys: KeysFile
    engines: Engines | ClusterEngines
    target: Any = http_process
    streams: GuardedStreams | None = None
    workers: list[Worker] = field(default_factory=list)
    failures: int = 0
    next_template: float = 0.0
    failed_at: float = -math.inf
    """time.monotonic() of the last failed start."""
    is_ready: bool = False
    reported_models: tuple[ServedModel, ...] = ()
    next_heartbeat: float = 0.0

    def poll(self) -> None:
        """Reads messages and replaces ended workers. Raises StartupError if none can start."""
        for worker in list(self.workers):
            self._listen(worker)
            if not worker.child.is_alive:
                self._listen(worker)
                self._reap(worker)
        self._check_heartbeats()
        self._assign_sockets()
        while len(self.workers) < self.num_sockets + SPARES and time.monotonic() >= self.next_template:
            self._start()
        self._send_readiness()
        self._send_models()

    def wait_s(self) -> float | None:
        """Seconds until the next planned start or heartbeat check, or None."""
        waits = [self.next_template] if len(self.workers) < self.num_sockets + SPARES else []
        waits += [self.next_heartbeat] if any(worker.serves for worker in self.workers) else []
        return max(0.0, min(waits) - time.monotonic()) if waits else None

    def drain(self) -> None:
        """Makes the workers refuse new requests. Spares end at once."""
        for worker in self.workers:
            worker.child.send_command("drain" if worker.socket is not None else "finish")

    def reload(self) -> None:
        """Reloads the keys file. Spares get the keys when they start to serve."""
        if not self.keys.is_configured:
            logger.warning("SIGHUP reloads --keys-file, but the service has none; start it with --keys-file")
            return
        self.keys.read()
        for worker in self.workers:
            if worker.socket is not None:
                worker.child.send_command(("keys", self.keys.keys))

    def finish(self) -> None:
        """Ends the workers after their last answers."""
        for worker in self.workers:
            worker.child.send_command("finish")

    @property
    def waitables(self) -> list[Any]:
        """Returns objects to wait for. They become readable when a worker sends a message or ends."""
        return [one for worker in self.workers for one in worker.child.waitables]

    @property
    def any_alive(self) -> bool:
        return any(worker.child.is_alive for worker in self.workers)

    def kill(self) -> None:
        for worker in self.workers:
            worker.child.kill()

    def _start(self) -> None:
        worker = Worker(Child("http-spare", self.context, self.target, self.arguments))
        try:
            worker.child.start()
        except (EOFError, OSError) as error:
            self._record_failed_start(f"it could not be forked: {error!r}")
        else:
            self.workers.append(worker)

    def _listen(self, worker: Worker) -> None:
        for subject, value in worker.child.messages():
            match subject:
                case "standby":
                    worker.is_standby = True
                case "serving":
                    worker.serves = True
                    self.failures = 0
                case "heartbeat":
                    worker.heartbeats, worker.heartbeat_pending = worker.heartbeats + 1, False
                case "engine":
                    worker.has_engine = value
                case "model":
                    refusal = None if value.is_barrier else self.engines.handle_command(value)
                    worker.child.send_command(("model", value.number, refusal))
                case "used":
                    self.engines.mark_used(value)
                case "failed":
                    worker.failure_reason = value

    def _check_heartbeats(self) -> None:
        """Requests heartbeats and kills workers that do not answer."""
        now = time.monotonic()
        if now < self.next_heartbeat:
            return
        self.next_heartbeat = now + _LOOK_S
        for worker in self.workers:
            if not worker.serves:
                continue
            if worker.watchdog.hangs(worker.heartbeats):
                worker.failure_reason = f"its event loop did not respond for {HANG_S:g} s"
                worker.child.end()
            elif not worker.heartbeat_pending:
                worker.heartbeat_pending = True
                worker.child.send_command("ping")

    def _assign_sockets(self) -> None:
        """Assigns sockets without a worker to spares."""
        used_sockets = {worker.socket for worker in self.workers}
        free = [number for number in range(self.num_sockets) if number not in used_sockets]
        spares = [worker for worker in self.workers if worker.is_standby and worker.socket is None]
        for number, worker in zip(free, spares, strict=False):
            worker.socket = number
            worker.child.name = f"http-{number}"
            worker.child.send_command(("serve", number, self.keys.keys))
            worker.child.send_command(("models", self.reported_models))

    def _reap(self, worker: Worker) -> None:
        self.workers.remove(worker)
        if self.streams is not None and worker.child.process is not None and worker.child.process.pid is not None:
            self.streams.end(worker.child.process.pid)
        self._send_readiness()  # first, because the others report ready until they hear of it
        was_forked, cause = worker.child.was_forked, worker.child.reap()
        if worker.serves:
            cause = worker.failure_reason or cause
            logger.error("process %s ended (%s); a spare replaces it", worker.child.name, cause)
        elif worker.is_standby and worker.socket is None:
            logger.error("process %s ended (%s); a new one starts", worker.child.name, cause)
            self.next_template = time.monotonic() + backoff_s(1)
        elif was_forked or worker.child.started > self.failed_at:  # a lost fork server fails all its pending forks once
            self._record_failed_start(worker.failure_reason or cause)

    def _record_failed_start(self, cause: str) -> None:
        self.failures += 1
        if self.failures >= _MAX_FAILED_STARTS and not any(worker.serves for worker in self.workers):
            raise StartupError(f"no HTTP worker can start: {cause}")
        delay = backoff_s(self.failures)
        self.failed_at = time.monotonic()
        self.next_template = self.failed_at + delay
        logger.error("an HTTP worker did not start (%s); retry in %.1f s", cause, delay)

    def _send_readiness(self) -> None:
        """Sends readiness to every worker.

        Ready: all sockets have workers that are connected to the engine.
        """
        is_ready = sum(worker.serves and worker.has_engine for worker in self.workers) == self.num_sockets
        if is_ready != self.is_ready:
            self.is_ready = is_ready
            for worker in self.workers:
                if worker.socket is not None:
                    worker.child.send_command(("all_ready", is_ready))

    def _send_models(self) -> None:
        """Sends every worker the list of models when it changes."""
        registered = self.engines.registered
        if registered != self.reported_models:
            self.reported_models = registered
            for worker in self.workers:
                if worker.socket is not None:
                    worker.child.send_command(("models", registered))
