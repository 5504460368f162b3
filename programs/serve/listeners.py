"""The listening sockets, made before anything else and held until the end, whichever process reads them.

A connection that comes while a worker is being replaced waits in its socket's queue instead of being refused, and the
port is ours from the first moment on: another server finds it in use.
"""

from __future__ import annotations

import errno
import socket
import sys
from dataclasses import dataclass

from rwkv_batch.errors import StartupError

BACKLOG = 1024


@dataclass(frozen=True)
class Listeners:
    """Sockets that listen: one for each HTTP worker, and the public one where a proxy stands in front."""

    workers: list[socket.socket]
    front: socket.socket | None = None

    def close(self) -> None:
        """Listen no more."""
        for one in (*self.workers, *([self.front] if self.front else [])):
            one.close()


def open_direct(host: str, port: int, count: int, stall_timeout_s: float) -> Listeners:
    """`count` sockets that share the address, among which the kernel spreads connections. Raises StartupError."""
    exclusive = _bind(host, port)
    exclusive.listen(
        BACKLOG
    )  # of two who come at the same moment one fails here: the claim shares the port with nobody
    try:
        exclusive.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        workers = []
        for _ in range(count):
            one = _new_socket(host)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            one.bind((host, port))
            workers.append(_listen(one, stall_timeout_s))
    finally:
        exclusive.close()
    return Listeners(workers)


def open_behind_proxy(host: str, port: int, count: int, stall_timeout_s: float) -> Listeners:
    """The public address for a proxy, and a port of the loopback interface for each worker. Raises StartupError."""
    front = _bind(host, port)
    front.listen(BACKLOG)
    return Listeners([_listen(_bind("127.0.0.1", 0), stall_timeout_s) for _ in range(count)], front)


def open_listeners(host: str, port: int, count: int, stall_timeout_s: float, *, front: bool) -> Listeners:
    """Listen on `host`, `port` for `count` HTTP workers. Raises StartupError if the address cannot be had."""
    try:
        return (open_behind_proxy if front else open_direct)(host, port, count, stall_timeout_s)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            reason = f"port {port} on {host} is in use; stop its owner or give another --port"
        else:
            reason = f"cannot listen on {host} port {port}: {error.strerror}; give another --host or --port"
        raise StartupError(reason) from None


def _new_socket(host: str) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return listener


def _bind(host: str, port: int) -> socket.socket:
    listener = _new_socket(host)
    try:
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


def _listen(listener: socket.socket, stall_timeout_s: float) -> socket.socket:
    """Its connections inherit the time after which the kernel cuts off a client that reads nothing.

    Robyn only notices such a client when its connection ends, and holds its place until then.
    """
    if sys.platform == "linux":
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_timeout_s * 1000))
    listener.listen(BACKLOG)
    return listener
