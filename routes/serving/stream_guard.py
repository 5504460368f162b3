"""Ends the streams of a killed HTTP worker with an error event.

A killed process can write nothing. So a worker passes each stream's connection to the supervisor, with the bytes that
end the stream. If the worker ends first, the supervisor writes them.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import resource
import select
import socket
import struct
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from routes.serving.connections import Connection  # the supervisor does without asyncio

logger = logging.getLogger(__name__)

_HEAD = struct.Struct(">II")
"""Process id of the worker, number of the stream."""
_MAX_MESSAGE_BYTES = 1 << 14
_RESERVED_FILES = 256
"""Descriptors that the supervisor needs for other purposes."""
_RETRY_S = 1.0
"""after an error of the thread that receives"""


class StreamGuard:
    """A worker's side of the guarded streams. Thread-safe, and never blocks.

    Streams beyond the link's capacity are not guarded.
    """

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._numbers = itertools.count()
        self._unsent: deque[bytes] = deque()

    def watch(self, connection: Connection, last_event: bytes) -> int | None:
        """Pass a stream's connection and the event that ends it. Return the stream's number, None if it is refused."""
        number = next(self._numbers) & 0xFFFF_FFFF
        chunk = b"%x\r\n%s\r\n0\r\n\r\n" % (len(last_event), last_event)
        try:
            socket.send_fds(self._link, [_HEAD.pack(os.getpid(), number) + chunk], [connection.descriptor])
        except OSError:
            return None
        if not connection.is_open():  # its descriptor may be another connection's
            self.release(number)
            return None
        return number

    def release(self, number: int) -> None:
        """Tell the supervisor that a stream has ended."""
        self._unsent.append(_HEAD.pack(os.getpid(), number))
        self.flush()

    def flush(self) -> None:
        """Send the ends of streams for which the link had no room. Call it a few times per second."""
        with contextlib.suppress(OSError, IndexError):
            while self._unsent:
                message = self._unsent.popleft()
                try:
                    self._link.send(message)
                except OSError:
                    self._unsent.append(message)
                    raise


class GuardedStreams:
    """The supervisor's side: the streams of all workers."""

    def __init__(self) -> None:
        self._link, self.worker_link = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for link in (self._link, self.worker_link):
            link.setblocking(False)
        self._streams: dict[tuple[int, int], tuple[int, bytes]] = {}
        """Connection and last bytes by process id and number."""
        self._lock = threading.Lock()
        maximum = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, maximum))
        self._max_streams = maximum - _RESERVED_FILES
        threading.Thread(target=self._follow, name="stream-guard", daemon=True).start()

    def end(self, pid: int) -> None:
        with self._lock:
            self._receive()
            for key in [key for key in self._streams if key[0] == pid]:
                descriptor, last_bytes = self._streams.pop(key)
                with contextlib.suppress(OSError), socket.socket(fileno=descriptor) as connection:
                    connection.send(last_bytes)  # does not block: the worker has set it so
                    connection.shutdown(socket.SHUT_WR)

    def _follow(self) -> None:
        poll = select.poll()
        poll.register(self._link, select.POLLIN)
        while True:
            try:
                poll.poll()
                with self._lock:
                    self._receive()
            except (OSError, struct.error):  # nothing restarts this thread, and later streams need it
                logger.exception("a message of an HTTP worker about its streams cannot be read; the next one is")
                time.sleep(_RETRY_S)

    def _receive(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                flags = socket.MSG_CMSG_CLOEXEC
                data, descriptors, _, _ = socket.recv_fds(self._link, _MAX_MESSAGE_BYTES, 1, flags)
                self._handle(data, descriptors)

    def _handle(self, data: bytes, descriptors: list[int]) -> None:
        key = _HEAD.unpack_from(data)
        if descriptors and len(self._streams) < self._max_streams:
            self._streams[key] = descriptors[0], data[_HEAD.size :]
            return
        closed = [*descriptors]
        if key in self._streams:
            closed.append(self._streams.pop(key)[0])
        for descriptor in closed:
            os.close(descriptor)
