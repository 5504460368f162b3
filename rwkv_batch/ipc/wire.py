"""Messages and the link between HTTP workers and an engine.

The link runs over a Unix stream socket. A frame is a msgpack array of messages. On the socket, its length comes first
in four bytes. The sending thread writes directly, so that events need not wake another thread. The socket reports a
dead peer at once. Missing heartbeats reveal a peer that hangs.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from io import BufferedReader, RawIOBase
from typing import Any, Generic, TypeVar

import msgspec

from rwkv_batch.calls import AnyCall
from rwkv_batch.errors import ErrorInfo
from rwkv_batch.ipc.quotas import Balance, CountedJob
from rwkv_batch.request import Job, JobEvents, Load

logger = logging.getLogger(__name__)

MAX_WAITING_FRAMES = 50_000
MAX_WAITING_BYTES = 1 << 31
"""A peer with more unread bytes counts as dead."""
MAX_FRAME_BYTES = 1 << 30
"""Maximum frame size, sent or received. A whole session file fits (`--max-state-mb` is at most 1000)."""
MAX_OFFERED_BYTES = 1 << 30
"""With more unread bytes, requests and answers to calls are refused. Events, heartbeats and cancels still fit."""
MAX_JOB_BYTES = 1 << 26
"""Maximum size of an encoded job. While the engine decodes a job, it does nothing else."""
_LENGTH_BYTES = 4
HEARTBEAT_S = 0.5
_READ_BYTES = 1 << 18


NO_LOAD = Load(rows=0, prompt_tokens=0)


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="h"):
    """The first message of a connection, from the HTTP worker."""

    name: str
    pid: int


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    job: Job
    repeats: list[int] = []
    """see `job_packing`"""


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    job_id: str


class ConfirmTurn(msgspec.Struct, frozen=True, array_like=True, tag="t"):
    """The worker knows that the job's turn began: it would not let another engine run a turn that was stored."""

    job_id: str


class Call(msgspec.Struct, frozen=True, array_like=True, tag="q"):
    """A call to the engine. The Answer repeats `call_id`."""

    call_id: int
    call: AnyCall


class Observe(msgspec.Struct, frozen=True, array_like=True, tag="o"):
    """An ended HTTP request, for the metrics in the engine's process."""

    route: str
    status: int
    seconds: float
    first_byte_s: float
    entry: dict[str, Any] = {}
    """the request's fields of the access log; empty: it is not listed"""


class UsageReport(msgspec.Struct, frozen=True, array_like=True, tag="u"):
    """Usage of a job that counts against limits (`AcquireQuota`)."""

    job_id: str
    sampled: int
    """all sampled tokens since its start"""
    replayed: int = 0
    """all tokens of its session that were read again"""
    done: bool = False
    refund: bool = False
    """no engine admitted it, so it costs nothing"""


class RestoreQuotas(msgspec.Struct, frozen=True, array_like=True, tag="v"):
    """An HTTP worker's copy of the limits' ledger. The engine that gets it holds the ledger from now on."""

    balances: list[Balance]
    jobs: list[CountedJob]
    """the worker's own"""
    has_moved: bool = False
    """whether the worker knew an earlier holder of the ledger, which may have counted more than this worker knows"""


class ReleaseQuotas(msgspec.Struct, frozen=True, array_like=True, tag="w"):
    """To the worker, another engine holds the limits' ledger from now on."""


ToEngine = Hello | Submit | Cancel | ConfirmTurn | Call | Observe | UsageReport | RestoreQuotas | ReleaseQuotas


class Admitted(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """The job was admitted, or refused with `error` (then no EventBatch follows)."""

    job_id: str
    error: ErrorInfo | None


class Arrived(msgspec.Struct, frozen=True, array_like=True, tag="j"):
    """The job has arrived. This load and all later ones include it; admission follows between two steps."""

    job_id: str
    load: Load


class EventBatch(msgspec.Struct, frozen=True, array_like=True, tag="n"):
    """Events of one engine step for a worker's jobs."""

    events: list[JobEvents]
    load: Load = NO_LOAD


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="b"):
    """First message of a connection, and then one every `HEARTBEAT_S`."""

    load: Load
    started: float = 0.0
    """Unix time"""
    balances: list[Balance] = []
    """of the limits' ledger, if this engine holds it"""


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """The reply to a Call: the encoded answer (its type is the call's), or `error`."""

    call_id: int
    value: msgspec.Raw
    error: ErrorInfo | None


ToWorker = Arrived | Admitted | EventBatch | Answer | Heartbeat


class NotSent(Exception):  # noqa: N818 - named by its effect
    """A message was not sent. The link stays open."""


class FrameTooLong(NotSent):
    """A message exceeds its limit. It is not sent, or not read."""

    def __init__(self, num_bytes: int, limit: int) -> None:
        super().__init__(f"a message between processes has {num_bytes} bytes, the limit is {limit}")


class LinkFull(NotSent):
    def __init__(self, num_bytes: int) -> None:
        super().__init__(f"{num_bytes} bytes wait for the other process, the limit is {MAX_OFFERED_BYTES}")


Incoming = TypeVar("Incoming")
Outgoing = TypeVar("Outgoing")

to_engine_decoder = msgspec.msgpack.Decoder(list[ToEngine])
to_worker_decoder = msgspec.msgpack.Decoder(list[ToWorker])


class Link(ABC, Generic[Incoming, Outgoing]):
    """One end of a connection: encodes frames, limits them, and queues what is not sent yet.

    `send` and `offer` may be called on any thread and do not block. `receive` runs on one thread.
    """

    def __init__(self, decoder: msgspec.msgpack.Decoder[list[Incoming]]) -> None:
        self._decoder = decoder
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._closed = False
        self.before_wait: Callable[[], None] = lambda: None
        """`receive` calls it before it waits for input"""
        self.num_pieces = 0
        """pieces that `receive` has read; a long frame has several"""

    @property
    def is_sending(self) -> bool:
        """Whether sent data is still in this process."""
        return bool(self._waiting)

    def send(self, *messages: Outgoing) -> None:
        """Send messages as one frame. A closed link drops it: the receiving side reports the loss.

        Raises FrameTooLong; then nothing is sent and the link stays open. A peer that reads nothing loses the link.
        """
        body = self._encode(messages, MAX_FRAME_BYTES)
        with self._lock:
            if not self._closed:
                self._send(body)

    def offer(self, message: Outgoing, max_bytes: int | None = None) -> None:
        """Send a message whose size a client chose. It never closes the link.

        max_bytes: limit of its size, by default `MAX_FRAME_BYTES`. Raises FrameTooLong and LinkFull.
        """
        body = self._encode((message,), MAX_FRAME_BYTES if max_bytes is None else max_bytes)
        with self._lock:
            is_full = 2 * len(self._waiting) > MAX_WAITING_FRAMES or self._waiting_bytes + len(body) > MAX_OFFERED_BYTES
            if self._waiting and is_full:
                raise LinkFull(self._waiting_bytes)
            if not self._closed:
                self._send(body)

    def _encode(self, messages: tuple[Outgoing, ...], max_bytes: int) -> bytes:
        body = self._encoder.encode(messages)
        if len(body) > max_bytes:
            raise FrameTooLong(len(body), max_bytes)
        return body

    def close(self) -> None:
        """Close the connection. Any thread. `receive` then ends at both ends."""
        with self._lock:
            self._close()

    def _check_queue(self) -> None:
        """Close the connection if the peer has read too little."""
        if len(self._waiting) > MAX_WAITING_FRAMES or self._waiting_bytes > MAX_WAITING_BYTES:
            logger.error("a peer has %d unread frames; closing its connection", len(self._waiting))
            self._close()

    @abstractmethod
    def receive(self) -> Iterator[Incoming]:
        """Yield messages. Ends when the peer is gone or the link is closed.

        Raises msgspec.DecodeError for an invalid frame, FrameTooLong for one that is too long.
        """

    @abstractmethod
    def _send(self, body: bytes) -> None:
        """Send an encoded frame, or queue it. The lock is held."""

    @abstractmethod
    def _close(self) -> None:
        """Close the connection and drop the queue. The lock is held."""


class _Input(RawIOBase):
    """A stream that calls `before_wait` before each read."""

    def __init__(self, raw: RawIOBase, before_wait: Callable[[], None]) -> None:
        self._raw, self._before_wait = raw, before_wait

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._before_wait()
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class SocketLink(Link[Incoming, Outgoing]):
    """A `Link` over a stream socket. Its pieces are chunks of `_READ_BYTES`.

    If the socket's buffer is full, a temporary thread sends the rest. `close` may be called on any thread; the
    receiving thread then sees the end of the stream. The descriptor closes with its last user, never under a reader.
    """

    def __init__(self, connection: socket.socket, decoder: msgspec.msgpack.Decoder[list[Incoming]], name: str) -> None:
        super().__init__(decoder)
        self._connection = connection
        self._name = name

    def _send(self, body: bytes) -> None:
        frame = len(body).to_bytes(_LENGTH_BYTES, "big") + body
        if not self._waiting:
            frame = frame[self._send_now(frame) :]
        if frame:
            self._enqueue(frame)

    def receive(self) -> Iterator[Incoming]:
        """See Link. Raises FrameTooLong before it reads the frame."""
        raw = _Input(self._connection.makefile("rb", 0), self.before_wait)
        with contextlib.suppress(OSError), BufferedReader(raw, _READ_BYTES) as stream:
            while len(head := stream.read(_LENGTH_BYTES)) == _LENGTH_BYTES:
                if (length := int.from_bytes(head, "big")) > MAX_FRAME_BYTES:
                    raise FrameTooLong(length, MAX_FRAME_BYTES)
                body = self._read(stream, length)
                if body is None:
                    return
                yield from self._decoder.decode(body)

    def _read(self, stream: BufferedReader[Any], length: int) -> bytearray | None:
        """Read a frame's body. None: the stream ended inside the frame."""
        body = bytearray(length)
        view = memoryview(body)
        while view:
            count = stream.readinto(view[:_READ_BYTES])
            if not count:
                return None
            view = view[count:]
            self.num_pieces += 1
        return body

    def _close(self) -> None:
        self._closed = True
        self._waiting.clear()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _send_now(self, frame: bytes) -> int:
        """Returns the number of bytes that fit without blocking."""
        try:
            return self._connection.send(frame, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            self._close()
            return len(frame)

    def _enqueue(self, frame: bytes) -> None:
        self._waiting.append(frame)
        self._waiting_bytes += len(frame)
        self._check_queue()
        if len(self._waiting) == 1:
            try:
                threading.Thread(target=self._send_waiting, name=f"{self._name}-send", daemon=True).start()
            except RuntimeError as error:  # out of threads: give up the peer, not the sender
                logger.error("no thread to send to a slow peer (%s); closing its connection", error)
                self._close()

    def _send_waiting(self) -> None:
        """Send the queued frames. A frame stays first in the queue until it is sent. So none overtakes it.

        The last frame is removed and the loop ends under one hold of the lock. So a concurrent `send` sees either the
        queue or no thread.
        """
        with self._lock:
            frame = self._waiting[0] if self._waiting else None
        while frame is not None:
            try:
                self._connection.sendall(frame)
            except OSError:
                self.close()
            with self._lock:
                if self._waiting:
                    self._waiting.popleft()
                    self._waiting_bytes -= len(frame)
                frame = self._waiting[0] if self._waiting else None
