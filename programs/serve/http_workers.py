"""The HTTP worker processes: one to each listening socket, and spares that take over from one that ends.

Every worker is forked from a process that has imported all it needs, says that it stands by, and is then given a
socket to serve or kept as a spare. Robyn aborts its whole process on some malformed requests, so a worker that has
served is replaced at once, however often that happens; one that cannot start is tried again after growing waits, and
when none serves and none can start, the service ends with the reason.
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
from rwkv_batch.errors import StartupError
from rwkv_batch.ipc.served_model import ServedModel
from rwkv_batch.ipc.watchdog import Watchdog

logger = logging.getLogger("supervisor")

SPARES = 4
_MAX_FAILED_STARTS = 5
"""So many in a row, and none serves: give up."""
PRELOAD_MODULE = "routes.serving.preload"
HANG_S = 120.0
"""A worker whose event loop has not come round for so long serves nobody, and still is given its part of the
connections: it is ended, and a spare takes its place."""
_LOOK_S = 5.0


def fork_context() -> ForkedContext:
    """Where HTTP workers are forked: a process that has imported what they need and has started no thread."""
    return ForkedContext(PRELOAD_MODULE, __name__)


def http_process(*arguments: Any) -> None:
    """Main function of an HTTP worker."""
    import routes.serving.preload  # noqa: F401  # before all else that imports Robyn
    from routes.serving.worker import run_http_worker

    run_http_worker(*arguments)


@dataclass(eq=False)
class Worker:
    """One HTTP worker process, which is started once."""

    child: Child
    is_standby: bool = False
    socket: int | None = None
    """Number of the listening socket it was given."""
    serves: bool = False
    has_engine: bool = False
    failure_reason: str = ""
    watchdog: Watchdog = field(default_factory=lambda: Watchdog(HANG_S, time.monotonic, _LOOK_S))
    heartbeats: int = 0
    """How often it has answered that its event loop comes round."""
    heartbeat_pending: bool = False
    """It is to answer that; it is never asked twice, so that one that is stopped leaves the pipe free."""


@dataclass(eq=False)
class HttpWorkers:
    """Keeps every listening socket served."""

    context: ForkedContext
    arguments: tuple[Any, ...]
    num_sockets: int
    keys: KeysFile
    engines: Engines | ClusterEngines
    target: Any = http_process
    workers: list[Worker] = field(default_factory=list)
    failures: int = 0
    next_template: float = 0.0
    failed_at: float = -math.inf
    """time.monotonic of the last failed start"""
    is_ready: bool = False
    reported_models: tuple[ServedModel, ...] = ()
    next_heartbeat: float = 0.0

    def poll(self) -> None:
        """Listen to the workers, replace those that have ended. Raises StartupError when none can start."""
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
        """Seconds to the next start that is planned or the next look at those that serve; None if there is none."""
        waits = [self.next_template] if len(self.workers) < self.num_sockets + SPARES else []
        waits += [self.next_heartbeat] if any(worker.serves for worker in self.workers) else []
        return max(0.0, min(waits) - time.monotonic()) if waits else None

    def drain(self) -> None:
        """Take no new work; those that have none end at once."""
        for worker in self.workers:
            worker.child.send_command("drain" if worker.socket is not None else "finish")

    def reload(self) -> None:
        """Read the file of keys again; spares are given the keys when they begin to serve."""
        if not self.keys.is_configured:
            logger.warning("SIGHUP asks to read --keys-file again, and there is none: nothing changes")
            return
        self.keys.read()
        for worker in self.workers:
            if worker.socket is not None:
                worker.child.send_command(("keys", self.keys.keys))

    def finish(self) -> None:
        """End when the last answer is out."""
        for worker in self.workers:
            worker.child.send_command("finish")

    @property
    def waitables(self) -> list[Any]:
        """What becomes readable when a worker speaks or ends."""
        return [one for worker in self.workers for one in worker.child.waitables]

    @property
    def any_alive(self) -> bool:
        """Whether any worker runs."""
        return any(worker.child.is_alive for worker in self.workers)

    def kill(self) -> None:
        """End all at once."""
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
                case "round":
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
        """Ask those that serve whether their event loops come round; end one that does not answer."""
        now = time.monotonic()
        if now < self.next_heartbeat:
            return
        self.next_heartbeat = now + _LOOK_S
        for worker in self.workers:
            if not worker.serves:
                continue
            if worker.watchdog.hangs(worker.heartbeats):
                worker.failure_reason = f"its event loop had not come round for {HANG_S:g} s"
                worker.child.end()
            elif not worker.heartbeat_pending:
                worker.heartbeat_pending = True
                worker.child.send_command("look")

    def _assign_sockets(self) -> None:
        """Give every socket without a worker to one that stands by."""
        taken = {worker.socket for worker in self.workers}
        free = [number for number in range(self.num_sockets) if number not in taken]
        spares = [worker for worker in self.workers if worker.is_standby and worker.socket is None]
        for number, worker in zip(free, spares, strict=False):
            worker.socket = number
            worker.child.name = f"http-{number}"
            worker.child.send_command(("serve", number, self.keys.keys))
            worker.child.send_command(("models", self.reported_models))

    def _reap(self, worker: Worker) -> None:
        self.workers.remove(worker)
        self._send_readiness()  # before all else: until the others hear of it, they call all ready
        was_forked, cause = worker.child.was_forked, worker.child.reap()
        if worker.serves:
            cause = worker.failure_reason or cause
            logger.error("process %s ended (%s); a spare takes its place", worker.child.name, cause)
        elif worker.is_standby and worker.socket is None:
            logger.error("process %s ended (%s); another one is made", worker.child.name, cause)
            self.next_template = time.monotonic() + backoff_s(1)
        elif was_forked or worker.child.started > self.failed_at:  # all that one lost process was to fork fail once
            self._record_failed_start(worker.failure_reason or cause)

    def _record_failed_start(self, cause: str) -> None:
        self.failures += 1
        if self.failures >= _MAX_FAILED_STARTS and not any(worker.serves for worker in self.workers):
            raise StartupError(f"no HTTP worker can start: {cause}")
        delay = backoff_s(self.failures)
        self.failed_at = time.monotonic()
        self.next_template = self.failed_at + delay
        logger.error("an HTTP worker did not start (%s); the next is tried in %.1f s", cause, delay)

    def _send_readiness(self) -> None:
        """Tell every worker when all sockets have begun or ceased to be served by workers that have the engine."""
        is_ready = sum(worker.serves and worker.has_engine for worker in self.workers) == self.num_sockets
        if is_ready != self.is_ready:
            self.is_ready = is_ready
            for worker in self.workers:
                if worker.socket is not None:
                    worker.child.send_command(("all", is_ready))

    def _send_models(self) -> None:
        """Tell every worker when a model has come, gone or changed."""
        registered = self.engines.registered
        if registered != self.reported_models:
            self.reported_models = registered
            for worker in self.workers:
                if worker.socket is not None:
                    worker.child.send_command(("models", registered))
