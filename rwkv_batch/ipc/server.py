"""The engine's process: one engine, a link to each HTTP worker, a pipe to the supervisor.

Threads:
- the engine's own, which also sends the events of each step
- one that accepts connections, and one per HTTP worker that receives
- one that sends heartbeats
- the main thread, which waits for the supervisor
"""

from __future__ import annotations

import faulthandler
import importlib
import logging
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import msgspec

from native.priority import at_low_priority, lower_process_priority
from rwkv_batch import load_progress
from rwkv_batch.calls import AcquireQuota, EngineCall, GetMetrics, GetStatus, ListRequests
from rwkv_batch.config import EngineConfig
from rwkv_batch.errors import ErrorInfo, ErrorKind, ServiceError, StartupError
from rwkv_batch.ipc import wire
from rwkv_batch.ipc.event_frames import split_frames
from rwkv_batch.ipc.held_ledger import Arrivals, HeldLedger
from rwkv_batch.ipc.job_packing import unpack
from rwkv_batch.ipc.metrics import Metrics
from rwkv_batch.ipc.process import LogConfig, become_child, freeze_garbage_collector, gc_paused
from rwkv_batch.ipc.quotas import Balance
from rwkv_batch.ipc.watchdog import Watchdog
from rwkv_batch.protocol import ManagedEngine
from rwkv_batch.request import Job, JobEvents, Usage

logger = logging.getLogger(__name__)

MAX_WORKERS = 256
BATCHES = "batches"
"""name of the batch process, a client that is not an HTTP worker"""
MONITOR_INTERVAL_S = 0.05
"""Seconds between checks of the engine's thread. Until the next check, /readyz reports a dead engine as ready."""
FLUSH_TIMEOUT_S = 2.0
"""Seconds that an ending process waits for workers to read their last events."""
ENCODED_NONE = msgspec.Raw(msgspec.msgpack.encode(None))
PeerLink = wire.Link[wire.ToEngine, wire.ToWorker]
HandleCall = Callable[[EngineCall[Any], Callable[[Any], None]], None]


class Peer:
    """One HTTP worker's connection. Its jobs are cancelled when it closes."""

    def __init__(
        self, link: PeerLink, engine: ManagedEngine, arrivals: Arrivals, metrics: Metrics, ledger: HeldLedger
    ) -> None:
        self.name = "?"
        self.pid = 0
        self.since = time.time()
        self.jobs: set[str] = set()
        self._engine = engine
        self._arrivals = arrivals
        self._metrics = metrics
        self._ledger = ledger
        self._events: list[JobEvents] = []
        self._arrived: deque[str] = deque()
        self._admitted: deque[wire.Admitted] = deque()
        """both not sent yet: a message per job would let threads exchange Python's lock for each"""
        self._link = link
        link.before_wait = self.flush_answers
        ledger.add_worker(self)
        self._send_lock = threading.Lock()
        """held from reading a load until it is sent, so that loads arrive in order"""

    def serve(self, handle_call: HandleCall) -> None:
        """Returns when the worker is gone. `handle_call` answers its calls."""
        try:
            for message in self._link.receive():
                self._handle(message, handle_call)
        except Exception:  # an invalid frame or message ends this worker's jobs, not the engine
            logger.exception("the connection of HTTP worker %s failed; closing it", self.name)
        finally:
            self._link.close()
            for job_id in list(self.jobs):
                self._engine.cancel(job_id)
                self._metrics.forget(job_id)
            self._ledger.end_all(self)

    def _handle(self, message: wire.ToEngine, handle_call: HandleCall) -> None:
        match message:
            case wire.Submit():
                self._submit(unpack(message))
            case wire.Cancel(job_id):
                self._engine.cancel(job_id)
            case wire.ConfirmTurn(job_id):
                self._engine.confirm_turn(job_id)
            case wire.Call(call_id, AcquireQuota(usage)):
                self._answer(call_id, self._acquire_quota(usage))
            case wire.UsageReport():
                self._ledger.report(message)
            case wire.RestoreQuotas():
                self._ledger.restore(message, self)
            case wire.ReleaseQuotas():
                self._ledger.release(self)
            case wire.Call(call_id, call):
                handle_call(call, lambda value: self._answer(call_id, value))
            case wire.Observe():
                self._metrics.observe_request(message)
            case wire.Hello(name, pid):
                self.name, self.pid = name, pid

    def _acquire_quota(self, usage: Usage) -> bool | ServiceError:
        if not self._ledger.is_complete:
            return False
        refusal = self._ledger.acquire(usage, self)
        if refusal is not None:
            self._metrics.observe_refusal(usage.job_id, refusal.kind)
            return ServiceError.from_info(refusal)
        return True

    def _submit(self, job: Job) -> None:
        self._metrics.observe_arrival(job.job_id)
        self.jobs.add(job.job_id)
        self._arrivals.add(job)
        self._arrived.append(job.job_id)
        self._engine.submit(job, self._deliver, lambda refusal: self._admit(job, refusal))

    def _deliver(self, events: JobEvents) -> None:
        self._ledger.observe(events, self)
        if events.done:
            self.jobs.discard(events.job_id)
        self._events.append(events)

    @property
    def is_flushed(self) -> bool:
        """Whether no event for the worker is left in this process."""
        return not self._link.is_sending

    def send_heartbeat(self, started: float, balances: list[Balance]) -> None:
        with self._send_lock:
            self._link.send(wire.Heartbeat(self._arrivals.load, started, balances))

    def flush_answers(self) -> None:
        """Send which jobs have arrived and which were admitted. Any thread."""
        if not (self._arrived or self._admitted):
            return
        with self._send_lock:
            load = self._arrivals.load
            arrived = [wire.Arrived(self._arrived.popleft(), load) for _ in range(len(self._arrived))]
            self._link.send(*arrived, *(self._admitted.popleft() for _ in range(len(self._admitted))))

    def flush_events(self) -> None:
        self.flush_answers()
        if self._events:
            events, self._events = self._events, []
            self._metrics.observe_events(events)
            for frame in split_frames(events):
                try:
                    with self._send_lock:
                        self._link.send(wire.EventBatch(frame, self._arrivals.load))
                except wire.FrameTooLong as error:
                    self._fail_jobs({event.job_id for event in frame}, error)

    def _fail_jobs(self, job_ids: set[str], error: wire.FrameTooLong) -> None:
        info = ErrorInfo(kind=ErrorKind.INTERNAL, message=f"the answer cannot be sent: {error}; request less at once")
        for job_id in job_ids:
            self._engine.cancel(job_id)
            self._link.send(wire.EventBatch([JobEvents(job_id=job_id, deltas=[], done=True, error=info)]))

    def _admit(self, job: Job, refusal: ServiceError | None) -> None:
        self._arrivals.remove(job)
        if refusal is not None:
            self.jobs.discard(job.job_id)
            self._metrics.observe_refusal(job.job_id, refusal.info.kind)
        self._admitted.append(wire.Admitted(job.job_id, None if refusal is None else refusal.info))
        if refusal is not None:  # perhaps by an engine without a next step
            self.flush_answers()

    def _answer(self, call_id: int, value: Any) -> None:
        if not isinstance(value, ServiceError):
            try:
                self._link.offer(wire.Answer(call_id, msgspec.Raw(msgspec.msgpack.encode(value)), None))
                return
            except wire.NotSent as error:
                kind = ErrorKind.OVERLOADED if isinstance(error, wire.LinkFull) else ErrorKind.BODY_TOO_LARGE
                value = ServiceError(kind, f"the answer cannot be sent: {error}")
        self._link.send(wire.Answer(call_id, ENCODED_NONE, value.info))


class EngineServer:
    """Connects HTTP workers to the engine. Links are given to `serve` or accepted by `listen`."""

    def __init__(self, engine: ManagedEngine) -> None:
        self._engine = engine
        self._arrivals = Arrivals(lambda: engine.load)
        self._metrics = Metrics()
        self._ledger = HeldLedger(self._metrics)
        self._peers: set[Peer] = set()
        self._started = time.time()
        engine.on_delivered(self._flush_events)
        threading.Thread(target=self._heartbeat_loop, name="heartbeat", daemon=True).start()

    def listen(self, address: str) -> None:
        """Accept HTTP workers of this machine. Returns at once."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(address)
        listener.listen(MAX_WORKERS)
        threading.Thread(target=self._accept_loop, args=(listener,), name="accept", daemon=True).start()

    def serve(self, link: PeerLink) -> None:
        """Returns when the HTTP worker at the other end is gone."""
        peer = Peer(link, self._engine, self._arrivals, self._metrics, self._ledger)
        peer.send_heartbeat(self._started, self._ledger.balances())
        self._peers.add(peer)
        try:
            peer.serve(self._handle_call)
        finally:
            self._peers.discard(peer)

    def finish(self, timeout_s: float) -> None:
        """Wait until all events have left this process."""
        deadline = time.monotonic() + timeout_s
        while not all(peer.is_flushed for peer in self._peers.copy()) and time.monotonic() < deadline:
            time.sleep(0.01)

    def _heartbeat_loop(self) -> None:
        while True:
            time.sleep(wire.HEARTBEAT_S)
            balances = self._ledger.balances()
            for peer in self._peers.copy():
                peer.send_heartbeat(self._started, balances)

    def _accept_loop(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            link: PeerLink = wire.SocketLink(connection, wire.to_engine_decoder, "worker")
            threading.Thread(target=self.serve, args=(link,), name="worker-receive", daemon=True).start()

    def _flush_events(self) -> None:
        for peer in self._peers.copy():
            peer.flush_events()

    def _handle_call(self, call: EngineCall[Any], reply: Callable[[Any], None]) -> None:
        """Answer metrics here, and pass other calls to the engine. Adds processes to the status."""
        match call:
            case GetMetrics():
                self._engine.call(GetStatus(), lambda value: reply(_unless_failed(value, self._metrics.render)))
            case ListRequests():
                reply(self._metrics.recent_requests())
            case GetStatus():
                self._engine.call(call, lambda value: reply(_unless_failed(value, self._with_processes)))
            case _:
                self._engine.call(call, reply)

    def _with_processes(self, status: dict[str, Any]) -> dict[str, Any]:
        clients = [
            {
                "name": peer.name,
                "pid": peer.pid,
                "connected_s": round(time.time() - peer.since, 1),
                "jobs": len(peer.jobs),
            }
            for peer in sorted(self._peers.copy(), key=lambda peer: peer.name)
            if peer.pid
        ]
        engine = {"pid": os.getpid(), "up_s": round(time.time() - self._started, 1)}
        workers = [client for client in clients if client["name"] != BATCHES]
        batches = next((client for client in clients if client["name"] == BATCHES), None)
        return {**status, "processes": {"engine": engine, "http_workers": workers, "batches": batches}}


def _unless_failed(value: Any, then: Callable[[Any], Any]) -> Any:
    return value if isinstance(value, ServiceError) else then(value)


def started_engine(config: EngineConfig, factory: str) -> ManagedEngine:
    """Create and start an engine. Raises StartupError, with one line, for any failure."""
    try:
        module, _, class_name = factory.partition(":")
        load = partial(importlib.import_module, module)
        with gc_paused():
            loaded = at_low_priority(load, config.only_idle_cores) if config.loads_at_low_priority else load()
        engine: ManagedEngine = getattr(loaded, class_name)(config)
        engine.start()
    except (StartupError, OSError, MemoryError) as error:
        raise StartupError(str(error) or type(error).__name__) from error
    except Exception as error:  # files, compilers and drivers raise any exception; the supervisor needs one line
        logger.debug("the engine did not start", exc_info=True)
        reason = f"the engine did not start: {type(error).__name__}: {error}"
        raise StartupError(f"{reason}; --verbose shows the traceback") from error
    freeze_garbage_collector()
    return engine


def run_engine(
    config: EngineConfig, address: str, factory: str, log_config: LogConfig, name: str, supervisor: Connection
) -> None:
    """Main function of the engine's process.

    factory: the engine's class as "module:Class"
    supervisor: gets ("loading", share of layers), then ("ready", None) or ("failed", one line). It may send "drain",
    and gets ("drained", None) when the states are stored.
    """
    become_child(name, log_config)
    load_progress.listeners.append(lambda share: _send(supervisor, "loading", share))
    try:
        engine = started_engine(config, factory)
    except StartupError as error:
        if not _send(supervisor, "failed", str(error)):
            logger.error("the supervisor is gone, and the engine did not start: %s", error)
        sys.exit(1)
    workers = EngineServer(engine)
    workers.listen(address)
    try:
        supervisor.send(("ready", None))
        _follow_supervisor(engine, config, supervisor)
    except (EOFError, OSError):
        logger.error("the supervisor is gone; storing the states and ending")
        engine.stop()
    workers.finish(FLUSH_TIMEOUT_S)  # the end of a long answer may exceed the socket's buffer
    if config.loads_at_low_priority:
        lower_process_priority(config.only_idle_cores)  # freeing a model's memory takes a while, too


def _send(supervisor: Connection, subject: str, value: object) -> bool:
    """Return False if the supervisor is gone."""
    try:
        supervisor.send((subject, value))
    except OSError:
        return False
    return True


def _follow_supervisor(engine: ManagedEngine, config: EngineConfig, supervisor: Connection) -> None:
    """Wait for the supervisor's commands until the engine is drained. Raises EOFError or OSError if it is gone."""
    monitor = EngineMonitor(engine, config)
    while True:
        while not supervisor.poll(MONITOR_INTERVAL_S):
            monitor()
        match supervisor.recv():
            case "drain":
                if rows := engine.load.rows:
                    logger.info("rows to finish: %d, in at most %.0f s", rows, config.drain_timeout_s)
                engine.drain(config.drain_timeout_s)
                if rows := engine.load.rows:
                    logger.warning("%.0f s are over (--drain-timeout-s), rows cut: %d", config.drain_timeout_s, rows)
                engine.stop()
                logger.info("all sessions are stored")
                supervisor.send(("drained", None))
                supervisor.recv()
                return


class EngineMonitor:
    """Ends the process when its engine has died or hangs. Called every `MONITOR_INTERVAL_S`."""

    def __init__(self, engine: ManagedEngine, config: EngineConfig) -> None:
        self._engine = engine
        self._timeout_s = config.step_timeout_s
        self._watchdog = Watchdog(config.step_timeout_s, time.monotonic, MONITOR_INTERVAL_S)

    def __call__(self) -> None:
        if not self._engine.is_alive:
            _die("the engine's thread has died; ending the process")
        if self._watchdog.hangs(self._engine.loop_count):
            faulthandler.dump_traceback()
            _die("the engine's loop has hung for %g s (step_timeout_s); ending the process", self._timeout_s)


def _die(reason: str, *arguments: object) -> NoReturn:
    """Exit the process at once; the supervisor restarts it. HTTP workers see the socket close and answer 503."""
    logger.critical(reason, *arguments)
    logging.shutdown()
    os._exit(1)  # a normal exit would free tensors on a device that may be lost, and abort
