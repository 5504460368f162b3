"""The engine as seen by an HTTP worker: sends calls over a link and reports when the engine is lost.

Any thread may call. The client's own thread connects, receives and runs the callbacks.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import msgspec

from rwkv_batch.calls import Answer as AnswerT
from rwkv_batch.calls import EngineCall, Reply
from rwkv_batch.errors import MAY_BE_KEPT, ErrorInfo, ErrorKind, ServiceError
from rwkv_batch.ipc import wire
from rwkv_batch.ipc.job_packing import pack
from rwkv_batch.ipc.quotas import Balance
from rwkv_batch.protocol import OnAdmitted, Sink
from rwkv_batch.request import Job, JobEvents, Load

logger = logging.getLogger(__name__)

_RETRY_S = 0.05
LOADING = ErrorInfo(
    kind=ErrorKind.ENGINE_LOST, message="the engine is still loading the model; retry in 2 s", retry_after_s=2.0
)
_LOST = ErrorInfo(
    kind=ErrorKind.ENGINE_LOST,
    message="the engine process was lost and is being restarted; send the request again",
    retry_after_s=2.0,
)
_SHUTDOWN_ERROR = ErrorInfo(
    kind=ErrorKind.DRAINING,
    message="the service was shut down before this answer was complete; send the request again in a moment",
    retry_after_s=5.0,
)

WorkerLink = wire.Link[wire.ToWorker, wire.ToEngine]
Connect = Callable[[], WorkerLink | None]
"""Returns a new link to the engine, or None if there is none. May block briefly."""


def unix_connector(address: str) -> Connect:
    def connect() -> WorkerLink | None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(address)
        except OSError:
            connection.close()
            return None
        return wire.SocketLink(connection, wire.to_worker_decoder, "engine-client")

    return connect


class _Listener(NamedTuple):
    sink: Sink
    is_turn: bool
    """whether it is a session's turn, which a lost engine may have kept"""


class _PendingCall(NamedTuple):
    reply: Reply[Any]
    answer_type: type[Any]


class _Pending:
    def __init__(self) -> None:
        self.admissions: dict[str, OnAdmitted] = {}
        self.listeners: dict[str, _Listener] = {}
        self.calls: dict[int, _PendingCall] = {}


class EngineClient:
    """EngineProtocol over links from `connect`. Reconnects while the process lives.

    on_change: called with True on connection and with False on loss.
    on_load: called with the engine's load, and with the id of a job that just arrived there.

    Both run on the client's thread.
    """

    def __init__(
        self,
        connect: Connect,
        on_change: Callable[[bool], None] = lambda is_connected: None,
        on_load: Callable[[Load, str | None], None] = lambda load, job_id: None,
    ) -> None:
        self._connect = connect
        self._name = ""
        self._on_change = on_change
        self._on_load = on_load
        self.is_shutting_down = False
        """whether the service is shutting down, so that a lost engine is not restarted"""
        self._lock = threading.Lock()
        self._link: WorkerLink | None = None
        self._newest: WorkerLink | None = None
        """the latest connection, which may not have received anything yet"""
        self.engine_started = 0.0
        """Unix time"""
        self.balances: list[Balance] = []
        """clients' balances in the limits' ledger, if this engine holds it"""
        self._waiting = _Pending()
        self.reason = LOADING
        """why it is not connected"""
        self._call_ids = itertools.count()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-client", daemon=True)

    def start(self, name: str) -> None:
        """Returns at once."""
        self._name = name
        self._thread.start()

    def stop(self) -> None:
        """Close the connection for good. All waiting callbacks get an error."""
        self._stopped.set()
        with self._lock:
            if self._newest is not None:
                self._newest.close()

    def drop(self) -> None:
        """Call if the engine is silent. The client then reconnects."""
        with self._lock:
            if self._link is not None:
                self._link.close()

    @property
    def is_connected(self) -> bool:
        """Whether an engine is connected. An engine counts once its model is loaded."""
        return self._link is not None

    @property
    def num_received(self) -> int:
        """Number of pieces received on this connection. A long message has many pieces."""
        newest = self._newest
        return 0 if newest is None else newest.num_pieces

    def submit(self, job: Job, sink: Sink, on_admitted: OnAdmitted) -> None:
        with self._lock:
            link, refusal = self._link, ServiceError.from_info(self.reason)
            if link is not None:
                self._waiting.admissions[job.job_id] = on_admitted
                is_turn = any(row.session is not None for row in job.rows)
                self._waiting.listeners[job.job_id] = _Listener(sink, is_turn)
                try:
                    link.offer(pack(job), wire.MAX_JOB_BYTES)
                    return
                except wire.NotSent as error:
                    del self._waiting.admissions[job.job_id], self._waiting.listeners[job.job_id]
                    refusal = _refusal(error)
        on_admitted(refusal)

    def cancel(self, job_id: str) -> None:
        self._send(wire.Cancel(job_id))

    def confirm_turn(self, job_id: str) -> None:
        self._send(wire.ConfirmTurn(job_id))

    def call(self, call: EngineCall[AnswerT], reply: Reply[AnswerT]) -> None:
        with self._lock:
            link, refusal = self._link, ServiceError.from_info(self.reason)
            if link is not None:
                call_id = next(self._call_ids)
                self._waiting.calls[call_id] = _PendingCall(reply, call.answer_type())
                try:
                    link.offer(wire.Call(call_id, call))  # type: ignore[arg-type]  # AnyCall names all of them
                    return
                except wire.NotSent as error:
                    del self._waiting.calls[call_id]
                    refusal = _refusal(error)
        reply(refusal)

    def observe(self, observation: wire.Observe) -> None:
        """Report an ended HTTP request. Dropped if there is no engine."""
        self._send(observation)

    def report_usage(self, *reports: wire.UsageReport | wire.RestoreQuotas | wire.ReleaseQuotas) -> None:
        """Report usage that counts against clients' limits. Dropped if there is no engine."""
        if reports:
            self._send(*reports)

    def _send(self, *messages: wire.ToEngine) -> None:
        with self._lock:
            if self._link is not None:
                self._link.send(*messages)

    def _run(self) -> None:
        while not self._stopped.is_set():
            link = self._try_connect()
            if link is None:
                self._stopped.wait(_RETRY_S)
            else:
                self._serve(link)

    def _try_connect(self) -> WorkerLink | None:
        try:
            return self._connect()
        except Exception:  # any transport's error: without this thread the client never reconnects
            logger.exception("cannot connect to the engine; retrying")
            return None

    def _serve(self, link: WorkerLink) -> None:
        link.send(wire.Hello(self._name, os.getpid()))
        with self._lock:
            self._newest = link
        if self._stopped.is_set():
            link.close()
        try:
            self._receive(link)
        except Exception:  # an invalid frame, or a callback's fault: all other callbacks have run
            logger.exception("the connection to the engine failed; reconnecting")

    def _receive(self, link: WorkerLink) -> None:
        """Handle messages until the link is lost, then fail everything that waits.

        Raises a callback's exception last.
        """
        try:
            for message in link.receive():
                self._handle(link, message)
        finally:
            link.close()
            with self._lock:
                self._newest = None  # closes its descriptor now
            if self._link is link:
                self._report_engine_lost()

    def _handle(self, link: WorkerLink, message: wire.ToWorker) -> None:
        if isinstance(message, wire.Heartbeat):
            self.engine_started, self.balances = message.started, message.balances
        if self._link is not link:  # not before its first message: the other process may hang
            with self._lock:
                self._link = link
            self._on_change(True)
        match message:
            case wire.Heartbeat(load):
                self._on_load(load, None)
            case wire.Arrived(job_id, load):
                self._on_load(load, job_id)
            case wire.EventBatch(batch, load):
                self._on_load(load, None)
                for events in batch:
                    pop = self._waiting.listeners.pop if events.done else self._waiting.listeners.get
                    listener = pop(events.job_id, None)
                    if listener is not None:
                        listener.sink(events)
            case wire.Admitted(job_id, error):
                if error is not None:
                    self._waiting.listeners.pop(job_id, None)
                on_admitted = self._waiting.admissions.pop(job_id)
                on_admitted(None if error is None else ServiceError.from_info(error))
            case wire.Answer(call_id, value, error):
                reply, answer_type = self._waiting.calls.pop(call_id)
                reply(_decoded(value, answer_type) if error is None else ServiceError.from_info(error))

    def _report_engine_lost(self) -> None:
        lost = _SHUTDOWN_ERROR if self.is_shutting_down else _LOST
        lost_turn = _of_turn(lost)
        with self._lock:
            self._link = None
            self.balances = []
            self.reason = lost
            waiting, self._waiting = self._waiting, _Pending()
        notifications: list[Callable[[], None]] = [partial(self._on_change, False)]
        for job_id, on_admitted in waiting.admissions.items():
            listener = waiting.listeners.pop(job_id, None)
            error = lost_turn if listener is not None and listener.is_turn else lost
            notifications.append(partial(on_admitted, ServiceError.from_info(error)))
        for job_id, listener in waiting.listeners.items():
            error = lost_turn if listener.is_turn else lost
            notifications.append(partial(listener.sink, JobEvents(job_id=job_id, deltas=[], done=True, error=error)))
        notifications.extend(
            partial(pending_call.reply, ServiceError.from_info(lost)) for pending_call in waiting.calls.values()
        )
        with contextlib.ExitStack() as callbacks:  # runs all callbacks even if one raises, in reverse order
            for callback in reversed(notifications):
                callbacks.callback(callback)


def _of_turn(lost: ErrorInfo) -> ErrorInfo:
    """Return the error of a session's turn, which may have been kept."""
    message = f"{lost.message.partition('; ')[0]}; {MAY_BE_KEPT}"
    return msgspec.structs.replace(lost, message=message, retry_after_s=None)


def _refusal(error: wire.NotSent) -> ServiceError:
    problem = f"the request cannot be sent to the engine: {error}"
    if isinstance(error, wire.LinkFull):
        return ServiceError(ErrorKind.OVERLOADED, f"{problem}; retry in 1 s", retry_after_s=1)
    return ServiceError(ErrorKind.BODY_TOO_LARGE, f"{problem}; send less at once")


def _decoded(value: bytes, answer_type: type[Any]) -> Any:
    """Returns a ServiceError if the answer has another type than expected."""
    try:
        return msgspec.msgpack.decode(value, type=answer_type)
    except msgspec.DecodeError as error:
        logger.exception("the engine's answer to a call cannot be decoded")
        return ServiceError(ErrorKind.INTERNAL, f"the engine's answer to a call cannot be decoded: {error}")
