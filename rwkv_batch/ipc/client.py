"""The engine as an HTTP worker sees it: forwards over a link, and tells everyone when the engine dies.

Threads: any may call; one of its own connects, receives and runs the callbacks.
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
from rwkv_batch.ipc.wire import (
    Admitted,
    Answer,
    Arrived,
    Call,
    Cancel,
    EventBatch,
    FrameTooLong,
    Heartbeat,
    Hello,
    Link,
    Observe,
    SocketLink,
    Submit,
    ToEngine,
    ToWorker,
    UsageReport,
    to_worker_decoder,
)
from rwkv_batch.protocol import OnAdmitted, Sink
from rwkv_batch.request import Job, JobEvents, Load

logger = logging.getLogger(__name__)

_RETRY_S = 0.05
LOADING = ErrorInfo(
    kind=ErrorKind.ENGINE_LOST,
    message="the engine is not running yet (it is loading the model); try again in a moment",
    retry_after_s=2.0,
)
_LOST = ErrorInfo(
    kind=ErrorKind.ENGINE_LOST,
    message="the engine process was lost and is being restarted; send the request again",
    retry_after_s=2.0,
)
_LOST_TURN = ErrorInfo(
    kind=ErrorKind.ENGINE_LOST,
    message=f"the engine process was lost and is being restarted; {MAY_BE_KEPT}",
)
_SHUTDOWN_ERROR = ErrorInfo(
    kind=ErrorKind.DRAINING,
    message="the service was shut down before this answer was complete; send the request again in a moment",
    retry_after_s=5.0,
)
_SHUTDOWN_ERROR_TURN = ErrorInfo(
    kind=ErrorKind.DRAINING, message=f"the service was shut down before this answer was complete; {MAY_BE_KEPT}"
)

WorkerLink = Link[ToWorker, ToEngine]
Connect = Callable[[], WorkerLink | None]
"""Gives a new link to the engine, or None while there is none; may wait a moment."""


def unix_connector(address: str) -> Connect:
    """Links to an engine of this machine, which listens on a Unix socket."""

    def connect() -> WorkerLink | None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(address)
        except OSError:
            connection.close()
            return None
        return SocketLink(connection, to_worker_decoder, "engine-client")

    return connect


class _Listener(NamedTuple):
    """Who hears of a job."""

    sink: Sink
    is_turn: bool
    """Of a session, which may have been kept when the engine is lost."""


class _PendingCall(NamedTuple):
    """A call without an answer yet."""

    reply: Reply[Any]
    answer_type: type[Any]


class _Pending:
    """Who waits for what on one connection."""

    def __init__(self) -> None:
        self.admissions: dict[str, OnAdmitted] = {}
        self.listeners: dict[str, _Listener] = {}
        self.calls: dict[int, _PendingCall] = {}


class EngineClient:
    """EngineProtocol over the links that `connect` gives. Reconnects for as long as the process lives.

    `on_change` is called with True when the engine is there and with False when it is lost, `on_load` with what it has
    to do and the job that it counts from now on, if it has just come; both on the client's thread.
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
        """The service is being shut down: an engine that is lost now is not started again."""
        self._lock = threading.Lock()
        self._link: WorkerLink | None = None
        self._newest: WorkerLink | None = None
        """the connection that may have brought nothing yet"""
        self._waiting = _Pending()
        self._reason = LOADING
        self._call_ids = itertools.count()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-client", daemon=True)

    def start(self, name: str) -> None:
        """Begin to connect, as the HTTP worker of that name; returns at once."""
        self._name = name
        self._thread.start()

    def stop(self) -> None:
        """Close the connection for good; everyone who waits is told."""
        self._stopped.set()
        with self._lock:
            if self._newest is not None:
                self._newest.close()

    def drop(self) -> None:
        """Give the connection up, because nothing comes: the engine is lost, until it is heard again."""
        with self._lock:
            if self._link is not None:
                self._link.close()

    @property
    def reason(self) -> ErrorInfo:
        """Why there is no engine, where there is none."""
        return self._reason

    @property
    def is_connected(self) -> bool:
        """Whether an engine that has loaded its model is at the other end."""
        return self._link is not None

    @property
    def num_received(self) -> int:
        """What has come on this connection, in pieces of which a long message has many."""
        newest = self._newest
        return 0 if newest is None else newest.num_pieces

    @property
    def num_jobs(self) -> int:
        """Jobs under way."""
        return len(self._waiting.listeners)

    def submit(self, job: Job, sink: Sink, on_admitted: OnAdmitted) -> None:
        """See EngineProtocol."""
        with self._lock:
            link, refusal = self._link, ServiceError.from_info(self._reason)
            if link is not None:
                self._waiting.admissions[job.job_id] = on_admitted
                is_turn = any(row.session is not None for row in job.rows)
                self._waiting.listeners[job.job_id] = _Listener(sink, is_turn)
                try:
                    link.send(Submit(job))
                    return
                except FrameTooLong as error:
                    del self._waiting.admissions[job.job_id], self._waiting.listeners[job.job_id]
                    refusal = _too_long(error)
        on_admitted(refusal)

    def cancel(self, job_id: str) -> None:
        """See EngineProtocol."""
        self._send(Cancel(job_id))

    def call(self, call: EngineCall[AnswerT], reply: Reply[AnswerT]) -> None:
        """See EngineProtocol."""
        with self._lock:
            link, refusal = self._link, ServiceError.from_info(self._reason)
            if link is not None:
                call_id = next(self._call_ids)
                self._waiting.calls[call_id] = _PendingCall(reply, call.answer_type())
                try:
                    link.send(Call(call_id, call))  # type: ignore[arg-type]  # AnyCall names all of them
                    return
                except FrameTooLong as error:
                    del self._waiting.calls[call_id]
                    refusal = _too_long(error)
        reply(refusal)

    def observe(self, observation: Observe) -> None:
        """Report an ended HTTP request; forgotten when there is no engine."""
        self._send(observation)

    def report_usage(self, spent: UsageReport) -> None:
        """Report what a job that another engine runs has used; forgotten when there is no engine."""
        self._send(spent)

    def _send(self, message: ToEngine) -> None:
        with self._lock:
            if self._link is not None:
                self._link.send(message)

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
        except Exception:  # whatever carries the link: without this thread the engine is never reached again
            logger.exception("no connection to the engine can be made; it is tried again")
            return None

    def _serve(self, link: WorkerLink) -> None:
        link.send(Hello(self._name, os.getpid()))
        with self._lock:
            self._newest = link
        if self._stopped.is_set():
            link.close()
        try:
            self._receive(link)
        except Exception:  # a foreign frame, or a waiter's fault: all others have been told, and it connects anew
            logger.exception("the connection to the engine failed; reconnecting")

    def _receive(self, link: WorkerLink) -> None:
        """Hand out what comes until the link is lost, then tell everyone who waits. Raises what a waiter did, last."""
        is_connected = False  # a process that stands still may be at the other end
        try:
            for message in link.receive():
                if not is_connected:
                    is_connected = True
                    self._set_connected(link)
                self._handle(message)
        finally:
            link.close()
            with self._lock:
                self._newest = None  # its descriptor goes with it, and not when this client does
            if is_connected:
                self._report_engine_lost()

    def _set_connected(self, link: WorkerLink) -> None:
        with self._lock:
            self._link = link
        self._on_change(True)

    def _handle(self, message: ToWorker) -> None:
        match message:
            case Heartbeat(load):
                self._on_load(load, None)
            case Arrived(job_id, load):
                self._on_load(load, job_id)
            case EventBatch(batch, load):
                self._on_load(load, None)
                for events in batch:
                    pop = self._waiting.listeners.pop if events.done else self._waiting.listeners.get
                    listener = pop(events.job_id, None)
                    if listener is not None:
                        listener.sink(events)
            case Admitted(job_id, error):
                if error is not None:
                    self._waiting.listeners.pop(job_id, None)
                on_admitted = self._waiting.admissions.pop(job_id)
                on_admitted(None if error is None else ServiceError.from_info(error))
            case Answer(call_id, value, error):
                reply, answer_type = self._waiting.calls.pop(call_id)
                reply(_decoded(value, answer_type) if error is None else ServiceError.from_info(error))

    def _report_engine_lost(self) -> None:
        lost, lost_turn = (_SHUTDOWN_ERROR, _SHUTDOWN_ERROR_TURN) if self.is_shutting_down else (_LOST, _LOST_TURN)
        with self._lock:
            self._link = None
            self._reason = lost
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
        with contextlib.ExitStack() as callbacks:  # also behind one that raises; the last to come in is called first
            for callback in reversed(notifications):
                callbacks.callback(callback)


def _too_long(error: FrameTooLong) -> ServiceError:
    return ServiceError(ErrorKind.BODY_TOO_LARGE, f"the request cannot be sent to the engine: {error}")


def _decoded(value: bytes, answer_type: type[Any]) -> Any:
    """The answer; a ServiceError if it is not of the type that was asked for, so that nobody waits for ever."""
    try:
        return msgspec.msgpack.decode(value, type=answer_type)
    except msgspec.DecodeError as error:
        logger.exception("the engine's answer to a call cannot be read")
        return ServiceError(ErrorKind.INTERNAL, f"the engine's answer cannot be read: {error}")
