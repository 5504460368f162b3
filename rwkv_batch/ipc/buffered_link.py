"""A link over another transport, for example calls of a Ray actor.

That transport carries the bytes. Frames travel in pieces, so that a long frame does not look like silence. The bytes in
flight are bounded.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator

import msgspec

from rwkv_batch.ipc import wire
from rwkv_batch.ipc.wire import FrameTooLong, Incoming, Link, Outgoing

PIECE_BYTES = 1 << 20
WINDOW_BYTES = 256 << 20
"""Maximum bytes sent that the other end has not acknowledged."""
_MORE, _LAST = b"\1", b"\0"
"""First byte of a piece: whether the frame continues in the next one."""


class BufferedLink(Link[Incoming, Outgoing]):
    """A `Link` whose pieces a carrier moves. The carrier calls `take`, `put` and `acknowledge` on any thread."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[list[Incoming]]) -> None:
        super().__init__(decoder)
        self._can_send, self._has_input = threading.Condition(self._lock), threading.Condition(self._lock)
        self._inbox: deque[bytes] = deque()
        self._late_pieces: list[bytes] = []
        self._sent_bytes = self._acknowledged_bytes = 0
        self._last_put_at = time.monotonic()
        self.read_bytes = 0
        """bytes of the pieces that `receive` has read, for `acknowledge` of the other end"""

    # For the owner ---------------------------------------------------------------------------------------------

    def _send(self, body: bytes) -> None:
        room = PIECE_BYTES - 1
        pieces = [body] if len(body) <= room else [body[start : start + room] for start in range(0, len(body), room)]
        self._waiting.extend(_MORE + piece for piece in pieces[:-1])
        self._waiting.append(_LAST + pieces[-1])
        self._waiting_bytes += len(body) + len(pieces)
        self._can_send.notify()
        self._check_queue()

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
                raise FrameTooLong(length, wire.MAX_FRAME_BYTES)
            if piece[:1] == _LAST:
                yield from self._decoder.decode(frame[0] if len(frame) == 1 else b"".join(frame))
                frame, length = [], 0

    @property
    def is_closed(self) -> bool:
        return self._closed

    def _close(self) -> None:
        self._closed = True
        self._waiting.clear()
        self._inbox.clear()
        self._late_pieces.clear()
        self._can_send.notify_all()
        self._has_input.notify_all()

    def next_piece(self) -> bytes | None:
        """Wait for the next piece of `receive`; None: the link is closed. Subclasses may fetch input here."""
        if not self._inbox:
            self.before_wait()
        with self._has_input:
            while not self._inbox and not self._closed:
                self._has_input.wait()
            return None if self._closed else self._inbox.popleft()

    # For the carrier -------------------------------------------------------------------------------------------

    def take(self, timeout_s: float) -> list[bytes] | None:
        """Return pieces to send, at most `PIECE_BYTES`. Empty after `timeout_s` seconds; None: the link is closed."""
        until = time.monotonic() + timeout_s
        with self._can_send:
            while not self._closed and not self._may_send():
                left_s = until - time.monotonic()
                if left_s <= 0:
                    return []
                self._can_send.wait(left_s)
            if self._closed:
                return None
            outgoing = [self._waiting.popleft()]
            size = len(outgoing[0])
            while self._waiting and size + len(self._waiting[0]) <= PIECE_BYTES:
                outgoing.append(self._waiting.popleft())
                size += len(outgoing[-1])
            self._waiting_bytes -= size
            self._sent_bytes += size
            return outgoing

    def _may_send(self) -> bool:
        return bool(self._waiting) and self._sent_bytes - self._acknowledged_bytes < WINDOW_BYTES

    def put(self, pieces: list[bytes]) -> None:
        """Add received pieces. An empty list is a heartbeat."""
        with self._has_input:
            self._last_put_at = time.monotonic()
            if not self._closed:
                self._inbox.extend(self._late_pieces)
                self._inbox.extend(pieces)
                self._late_pieces.clear()
                self._has_input.notify()

    def put_stale(self, pieces: list[bytes]) -> None:
        """As `put`, for pieces that may be old: they wait for the next `put`.

        The sender may have given up this link, so its next message must come first.
        """
        with self._has_input:
            if not self._late_pieces and not self._closed:
                self._last_put_at = time.monotonic()
                self._late_pieces.extend(pieces)
                return
        self.put(pieces)

    def acknowledge(self, read_bytes: int) -> None:
        """Record how many bytes the other end has read.

        `read_bytes`: the total of the other end.
        """
        with self._can_send:
            self._acknowledged_bytes = max(self._acknowledged_bytes, read_bytes)
            self._can_send.notify()

    @property
    def has_input(self) -> bool:
        return bool(self._inbox)

    @property
    def silent_s(self) -> float:
        """Seconds since the last `put`."""
        return time.monotonic() - self._last_put_at
