"""A link whose bytes something else carries: what is sent waits to be taken, what has come is put in.

Frames travel in pieces, so that a long one is no silence. What has left and was not read at the other end is bounded.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Generic

import msgspec

from rwkv_batch.ipc import wire
from rwkv_batch.ipc.wire import FrameTooLong, Incoming, Outgoing

logger = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20
WINDOW_BYTES = 256 << 20
"""So much may have left that the other end has not said to have read."""
_MORE, _LAST = b"\1", b"\0"
"""First byte of a piece: whether the frame goes on in the next one."""


class CarriedLink(Generic[Incoming, Outgoing]):
    """A `Link`; its carrier calls `take`, `put` and `acknowledge`, from any thread."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[list[Incoming]]) -> None:
        self._decoder = decoder
        self._encoder = msgspec.msgpack.Encoder()
        lock = threading.Lock()
        self._may_leave, self._has_come = threading.Condition(lock), threading.Condition(lock)
        self._outbox: deque[bytes] = deque()
        self._outbox_bytes = 0
        self._inbox: deque[bytes] = deque()
        self._held: list[bytes] = []
        self._taken_bytes = self._acknowledged_bytes = 0
        self._closed = False
        self._heard = time.monotonic()
        self.num_pieces = 0
        """What `receive` has read."""
        self.read_bytes = 0
        """The same in bytes, for the other end to be told."""

    # As its owner sees it --------------------------------------------------------------------------------------

    @property
    def is_sending(self) -> bool:
        """See Link."""
        return bool(self._outbox)

    def send(self, *messages: Outgoing) -> None:
        """See Link."""
        body = self._encoder.encode(messages)
        if len(body) > wire.MAX_FRAME_BYTES:
            raise FrameTooLong(len(body))
        room = PIECE_BYTES - 1
        pieces = [body] if len(body) <= room else [body[at : at + room] for at in range(0, len(body), room)]
        with self._may_leave:
            if self._closed:
                return
            self._outbox.extend(_MORE + piece for piece in pieces[:-1])
            self._outbox.append(_LAST + pieces[-1])
            self._outbox_bytes += len(body) + len(pieces)
            self._may_leave.notify()
            if len(self._outbox) > wire.MAX_WAITING_FRAMES or self._outbox_bytes > wire.MAX_WAITING_BYTES:
                logger.error("a peer left %d frames unread; closing its connection", len(self._outbox))
                self._close()

    def receive(self) -> Iterator[Incoming]:
        """See Link."""
        frame: list[bytes] = []
        length = 0
        while (piece := self.next_piece()) is not None:
            self.num_pieces += 1
            self.read_bytes += len(piece)
            frame.append(piece[1:])
            length += len(piece) - 1
            if length > wire.MAX_FRAME_BYTES:
                raise FrameTooLong(length)
            if piece[:1] == _LAST:
                yield from self._decoder.decode(frame[0] if len(frame) == 1 else b"".join(frame))
                frame, length = [], 0

    def close(self) -> None:
        """See Link."""
        with self._may_leave:
            self._close()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def _close(self) -> None:
        self._closed = True
        self._outbox.clear()
        self._inbox.clear()
        self._held.clear()
        self._may_leave.notify_all()
        self._has_come.notify_all()

    def next_piece(self) -> bytes | None:
        """What `receive` reads next, once it is there; None: the link is closed. Who has to fetch it does so here."""
        with self._has_come:
            while not self._inbox and not self._closed:
                self._has_come.wait()
            return None if self._closed else self._inbox.popleft()

    # As its carrier sees it --------------------------------------------------------------------------------------

    def take(self, timeout_s: float) -> list[bytes] | None:
        """Pieces to be carried away, `PIECE_BYTES` at most; none after `timeout_s` seconds; None: it is closed."""
        until = time.monotonic() + timeout_s
        with self._may_leave:
            while not self._closed and not self._has_leave():
                left_s = until - time.monotonic()
                if left_s <= 0:
                    return []
                self._may_leave.wait(left_s)
            if self._closed:
                return None
            taken = [self._outbox.popleft()]
            size = len(taken[0])
            while self._outbox and size + len(self._outbox[0]) <= PIECE_BYTES:
                taken.append(self._outbox.popleft())
                size += len(taken[-1])
            self._outbox_bytes -= size
            self._taken_bytes += size
            return taken

    def _has_leave(self) -> bool:
        return bool(self._outbox) and self._taken_bytes - self._acknowledged_bytes < WINDOW_BYTES

    def put(self, pieces: list[bytes]) -> None:
        """Pieces have been carried here; none is a sign of life."""
        with self._has_come:
            self._heard = time.monotonic()
            if not self._closed:
                self._inbox.extend(self._held)
                self._inbox.extend(pieces)
                self._held.clear()
                self._has_come.notify()

    def put_late(self, pieces: list[bytes]) -> None:
        """As `put`, of what may have been on its way for long: its sender, who may have given this end up, is heard
        once more before it is read."""
        with self._has_come:
            if not self._held and not self._closed:
                self._heard = time.monotonic()
                self._held.extend(pieces)
                return
        self.put(pieces)

    def acknowledge(self, read_bytes: int) -> None:
        """The other end has read so many bytes since the beginning."""
        with self._may_leave:
            self._acknowledged_bytes = max(self._acknowledged_bytes, read_bytes)
            self._may_leave.notify()

    @property
    def has_come(self) -> bool:
        """Whether something was put in and not read yet."""
        return bool(self._inbox)

    @property
    def silent_s(self) -> float:
        """Seconds since `put` was called last."""
        return time.monotonic() - self._heard
