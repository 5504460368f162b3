"""What crosses the local socket between HTTP workers and the engine process, and how.

A frame is a msgpack array of messages; everything that waits when the sender's thread wakes goes out as
one frame, so the news of all jobs of an engine step usually share one. A Unix stream socket tells both
ends at once when the other has died, which is why there is no heartbeat.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

import msgspec

from rwkv_batch.errors import ErrorInfo
from rwkv_batch.request import Job, JobEvents

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 1 << 30
MAX_WAITING_MESSAGES = 200_000
"""A peer that leaves so many messages unread is taken for dead."""
_MESSAGES_PER_FRAME = 4096


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="h"):
    """First message of a connection, from the HTTP worker."""

    name: str
    pid: int


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """`EngineFace.submit`."""

    job: Job


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """`EngineFace.cancel`."""

    job_id: str


class Call(msgspec.Struct, frozen=True, array_like=True, tag="q"):
    """`EngineFace.call`; `call_id` returns in the Answer."""

    call_id: int
    verb: str
    arguments: dict[str, Any]


class Observe(msgspec.Struct, frozen=True, array_like=True, tag="o"):
    """One HTTP request that has ended, for the figures that the engine process keeps for all workers."""

    route: str
    status: int
    seconds: float
    first_byte_s: float


ToEngine = Hello | Submit | Cancel | Call | Observe


class Admitted(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """The job was taken, or refused with `error` (then no News follows)."""

    job_id: str
    error: ErrorInfo | None


class News(msgspec.Struct, frozen=True, array_like=True, tag="n"):
    """What one engine step brought for one job."""

    events: JobEvents


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """The reply to a Call: plain data, or `error`."""

    call_id: int
    value: Any
    error: ErrorInfo | None


ToWorker = Admitted | News | Answer

Incoming = TypeVar("Incoming")
Outgoing = TypeVar("Outgoing")

to_engine_decoder = msgspec.msgpack.Decoder(list[ToEngine])
to_worker_decoder = msgspec.msgpack.Decoder(list[ToWorker])


class Link(Generic[Incoming, Outgoing]):
    """One end of a connection: `send` from any thread without waiting, `receive` on one thread.

    A thread of its own writes to the socket, because a write may block. `close` may come from any thread;
    the receiving thread then sees the end of the stream.
    """

    def __init__(self, connection: Connection, decoder: msgspec.msgpack.Decoder[list[Incoming]], name: str) -> None:
        self._connection = connection
        self._decoder = decoder
        self._encoder = msgspec.msgpack.Encoder()
        self._outbox: queue.SimpleQueue[Outgoing | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._sender = threading.Thread(target=self._send_loop, name=f"{name}-send", daemon=True)
        self._sender.start()

    def send(self, message: Outgoing) -> None:
        """Queue a message. A closed link drops it: the receiving side's end-of-stream handling tells everyone."""
        self._outbox.put(message)
        if self._outbox.qsize() > MAX_WAITING_MESSAGES and not self._closed.is_set():
            logger.error("a peer left more than %d messages unread; closing its connection", MAX_WAITING_MESSAGES)
            self.close()

    def receive(self) -> Iterator[Incoming]:
        """Messages until the peer is gone or the link is closed. Raises msgspec.DecodeError for a foreign frame."""
        while not self._closed.is_set():
            try:
                frame = self._connection.recv_bytes(MAX_FRAME_BYTES)
            except (EOFError, OSError):
                return
            yield from self._decoder.decode(frame)

    def close(self) -> None:
        """Shut the connection down. The descriptor goes with the last thread's reference, never under a reader."""
        if not self._closed.is_set():
            self._closed.set()
            self._outbox.put(None)
            _shutdown(self._connection)

    def _send_loop(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while not self._closed.is_set():
                waiting = [self._outbox.get()]
                while len(waiting) < _MESSAGES_PER_FRAME and not self._outbox.empty():
                    waiting.append(self._outbox.get_nowait())
                frame = [message for message in waiting if message is not None]
                if frame:
                    self._connection.send_bytes(self._encoder.encode(frame))
        self.close()


def _shutdown(connection: Connection) -> None:
    """End both directions, so that a thread that waits in `recv_bytes` returns."""
    with contextlib.suppress(OSError):
        end = socket.socket(fileno=connection.fileno())
        try:
            end.shutdown(socket.SHUT_RDWR)
        finally:
            end.detach()
