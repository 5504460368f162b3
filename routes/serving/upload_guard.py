"""Answers requests that never reach a handler: bodies without end, and forms that Robyn cannot parse.

Robyn reads a body to its end before it calls a handler, and has no limit of its own. So nothing can be refused earlier
than by closing the connection. The kernel counts the bytes of each connection. Clients that have shown no secret may
send far less.

Robyn never answers some forms that end early, and keeps their connections after their clients have left. Only the end
of the process frees those, so a worker with many of them ends, and a spare replaces it.

Robyn answers 500 without a reason to a form that it cannot parse. It logs the reason first, on the thread that sends
its answer. A filter of that log sends a better answer and closes the connection.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import resource
import socket
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from http import HTTPStatus

from routes.context import RequestLimiter
from routes.response.http_response import NATIVE_ERRORS, ErrorFormat, error_response
from routes.serving.access import MAX_ANONYMOUS_BYTES, unauthorized
from routes.serving.connections import Connection, known_connections
from rwkv_batch.errors import ErrorInfo, ErrorKind

SLACK_BYTES = 16 << 20
"""A body that is larger than its limit by less than this still gets an answer with the reason."""
_MAX_STRANGER_BYTES = MAX_ANONYMOUS_BYTES + SLACK_BYTES
_MAX_BODIES = 4
"""All bodies together may take as much memory as so many of the largest size."""
ROBYN_SERVER = "robyn.server"
_PARSE_FAILURE = re.compile(r"Failed to parse request for `(.*)`: (.*)", re.DOTALL)
MAX_STUCK = 256
"""Stuck connections after which a worker ends as soon as it neither answers nor reads a request."""
MAX_STUCK_CHECKS = 100
"""Checks in a row with too many: connections that are just being closed look stuck, and last bytes are being sent."""
MAX_IDLE_S = 10.0
"""Seconds after a client's last bytes within which Robyn finds that its form is broken."""
_GROWTH_BYTES = 16 << 20
"""Growth of the process after which its connections are checked."""


class UploadGuard:
    """Closes connections whose unanswered bytes exceed a limit. One thread uses it, a few times per second."""

    def __init__(self, max_body_bytes: int, limiter: RequestLimiter) -> None:
        self._limiter = limiter
        self._limit = max_body_bytes + SLACK_BYTES
        self._sizes = open("/proc/self/statm", "rb", buffering=0)  # noqa: SIM115 - clients may hold all descriptors later
        self._resident = self._resident_bytes()
        self._max_stuck = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        self._stuck_checks = 0

    def check(self, connections: Iterable[Connection]) -> bool:
        """Check strangers' connections, and all if the process has grown.

        Freed memory is used again, so a stranger's body need not make the process grow. Returns whether stuck
        connections take so many descriptors that the process should end.
        """
        opened, closed = list[Connection](), list[Connection]()
        for one in connections:
            (opened if one.is_open() else closed).append(one)
        num_stuck = sum(map(_is_stuck, closed))
        is_idle = not self._limiter.num_active and not any(_unanswered(opened).values())
        too_many = num_stuck >= (min(MAX_STUCK, self._max_stuck) if is_idle else self._max_stuck)
        self._stuck_checks = self._stuck_checks + 1 if too_many else 0
        _close_largest(_unanswered(one for one in opened if not one.is_trusted), _MAX_STRANGER_BYTES, _refusal())
        resident = self._resident_bytes()
        self._resident = min(self._resident, resident)
        if resident - self._resident >= _GROWTH_BYTES:
            self._resident = resident
            _close_largest(_unanswered(one for one in opened if one.is_trusted), self._limit)
        return self._stuck_checks >= MAX_STUCK_CHECKS

    def _resident_bytes(self) -> int:
        """Return the size of the process. Opens no file."""
        return int(os.pread(self._sizes.fileno(), 256, 0).split()[1]) * os.sysconf("SC_PAGESIZE")


def _is_stuck(connection: Connection) -> bool:
    """Return whether a client has left, and its request was never handled. Linux counts its FIN as a byte."""
    return connection.has_descriptor() and connection.received_bytes() > connection.handled_bytes + 1


def _unanswered(connections: Iterable[Connection]) -> dict[Connection, int]:
    """Return each client's sent bytes since its last answered request."""
    return {one: one.received_bytes() - one.handled_bytes for one in connections}


class BrokenForms(logging.Filter):
    """Answers 400 with the reason in place of Robyn's 500. A filter of the logger ROBYN_SERVER.

    The log does not name the connection. So Robyn's answer remains if several connections have an unanswered request.
    Those that have long been idle do not count: Robyn parses bytes when they arrive.
    """

    def __init__(self, formats: Mapping[str, ErrorFormat]) -> None:
        """formats: of errors, by path"""
        super().__init__()
        self._formats = formats

    def filter(self, record: logging.LogRecord) -> bool:
        failure = _PARSE_FAILURE.fullmatch(record.getMessage())
        if failure is None:
            return True
        path, reason = failure.groups()
        there = [one for one in known_connections() if one.has_descriptor()]  # also a client that has left meanwhile
        waiting = [one for one in there if one.received_bytes() > one.handled_bytes and one.idle_s() < MAX_IDLE_S]
        if len(waiting) == 1 and waiting[0].is_open():
            message = f"the body is not a form (multipart/form-data) as its headers say: {reason}; check its boundary"
            error = ErrorInfo(kind=ErrorKind.NOT_JSON, message=message)
            info = error if waiting[0].is_trusted else unauthorized(None).info
            _disconnect(waiting[0], _raw_answer(info, self._formats.get(path, NATIVE_ERRORS)))
            record.levelno, record.levelname = logging.INFO, "INFO"
        return True


@cache
def _refusal() -> bytes:
    """Return the answer to a large body without a secret."""
    return _raw_answer(unauthorized(None, has_large_body=True).info, NATIVE_ERRORS)


def _raw_answer(error: ErrorInfo, error_format: ErrorFormat) -> bytes:
    answer = error_response(error, error_format)
    headers = {"Content-Type": answer.content_type, "Content-Length": str(len(answer.body)), "Connection": "close"}
    lines = [f"{name}: {value}\r\n" for name, value in {**headers, **answer.headers}.items()]
    head = f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}\r\n{''.join(lines)}\r\n"
    return head.encode() + answer.body


def _close_largest(unanswered: Mapping[Connection, int], limit: int, answer: bytes = b"") -> None:
    """Close the connections above the limit.

    Closes more until all together have at most `_MAX_BODIES` times the limit.

    answer: sent to those with large bodies. Robyn answers nothing while it reads a body.
    """
    total = sum(unanswered.values())
    sent: Counter[str] = Counter()
    for connection, size in unanswered.items():
        sent[connection.peer] += size
    # The client that sent most comes first: many small bodies do not close another client's large one.
    for connection in sorted(unanswered, key=lambda one: (sent[one.peer], unanswered[one]), reverse=True):
        if unanswered[connection] > limit or total > _MAX_BODIES * limit:
            total -= unanswered[connection]
            _disconnect(connection, answer if unanswered[connection] > MAX_ANONYMOUS_BYTES else b"")


def _disconnect(connection: Connection, answer: bytes) -> None:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.descriptor)) as copy:
        if os.fstat(copy.fileno()).st_ino == connection.inode:  # the descriptor may belong to another socket now
            copy.send(answer, socket.MSG_DONTWAIT)
            copy.shutdown(socket.SHUT_RDWR)
