"""Bounds the memory of bodies that an HTTP worker is receiving.

Robyn reads a body to its end before it calls a handler, and has no limit of its own. So nothing can be refused earlier
than by closing the connection. The kernel counts the bytes of each connection.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections import Counter
from collections.abc import Iterable

from routes.serving.connections import Connection

SLACK_BYTES = 16 << 20
"""A body that is larger than its limit by less than this still gets an answer with the reason."""
_MAX_BODIES = 4
"""All bodies together may take as much memory as so many of the largest size."""
_GROWTH_BYTES = 16 << 20
"""Growth of the process after which its connections are checked."""
_TCP_INFO_BYTES = 136
_COUNTERS = struct.Struct("=QQ")
"""Bytes that the client has acknowledged and bytes received."""
_COUNTERS_OFFSET = 120
_GREETING_BYTES = 64
"""A connection that was sent at most this much had no answer yet, only "100 Continue"."""
_libc = ctypes.CDLL(None)


class UploadGuard:
    """Closes connections whose unanswered bytes exceed a limit. One thread uses it, a few times per second."""

    def __init__(self, max_body_bytes: int) -> None:
        self._limit = max_body_bytes + SLACK_BYTES
        self._sizes = open("/proc/self/statm", "rb", buffering=0)  # noqa: SIM115 - clients may hold all descriptors later
        self._resident = self._resident_bytes()
        self._answered: dict[int, tuple[int, int]] = {}
        """By serial number: bytes acknowledged, and bytes received by then."""

    def check(self, connections: Iterable[Connection]) -> None:
        """Check all connections if the process has grown."""
        resident = self._resident_bytes()
        self._resident = min(self._resident, resident)
        if resident - self._resident < _GROWTH_BYTES:
            return
        self._resident = resident
        unanswered = {one: self._unanswered_bytes(one) for one in connections if one.is_open()}
        self._answered = {one.serial: self._answered[one.serial] for one in unanswered}
        total = sum(unanswered.values())
        sent: Counter[str] = Counter()
        for connection, size in unanswered.items():
            sent[connection.peer] += size
        # The client that sent most comes first: many small bodies do not close another client's large one.
        for connection in sorted(unanswered, key=lambda one: (sent[one.peer], unanswered[one]), reverse=True):
            if unanswered[connection] > self._limit or total > _MAX_BODIES * self._limit:
                total -= unanswered[connection]
                _disconnect(connection)

    def _resident_bytes(self) -> int:
        """Return the size of the process. Opens no file."""
        return int(os.pread(self._sizes.fileno(), 256, 0).split()[1]) * os.sysconf("SC_PAGESIZE")

    def _unanswered_bytes(self, connection: Connection) -> int:
        """Return how much the client has sent after the last answer."""
        info = ctypes.create_string_buffer(_TCP_INFO_BYTES)
        length = ctypes.c_uint32(_TCP_INFO_BYTES)
        _libc.getsockopt(connection.descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(length))
        acknowledged, received = _COUNTERS.unpack_from(info.raw, _COUNTERS_OFFSET)
        before = self._answered.get(connection.serial, (0, 0))
        if acknowledged > before[0] + _GREETING_BYTES:
            before = (acknowledged, received)
        self._answered[connection.serial] = before
        return int(received - before[1])


def _disconnect(connection: Connection) -> None:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.descriptor)) as copy:
        if os.fstat(copy.fileno()).st_ino == connection.inode:  # the descriptor may belong to another socket now
            copy.shutdown(socket.SHUT_RDWR)
