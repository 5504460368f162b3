"""The listening sockets. The supervisor opens them first and holds them until the end.

While a worker is replaced, new connections wait in the socket's queue instead of being refused. The port is reserved
from the first moment on.
"""

from __future__ import annotations

import errno
import socket
import sys
from dataclasses import dataclass

from rwkv_batch.errors import StartupError

BACKLOG = 1024
_FIRST_BYTES_S = 1
"""How long a connection without any bytes waits in the kernel. A worker finds the head of its first request there."""


@dataclass(frozen=True)
class Listeners:
    """Listening sockets: one per HTTP worker, and the public one for nginx."""

    workers: list[socket.socket]
    front: socket.socket | None = None

    def close(self) -> None:
        for listener in (*self.workers, *([self.front] if self.front else [])):
            listener.close()


def open_direct(host: str, port: int, count: int, stall_timeout_s: float) -> Listeners:
    """Opens `count` sockets on one address. The kernel spreads connections over them. Raises StartupError."""
    exclusive = _bind(host, port)
    exclusive.listen(BACKLOG)  # an exclusive socket, so that one of two services that start at the same time fails here
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
    """Opens the public address for nginx and a loopback port per worker. Raises StartupError."""
    front = _bind(host, port)
    front.listen(BACKLOG)
    return Listeners([_listen(_bind("127.0.0.1", 0), stall_timeout_s) for _ in range(count)], front)


def open_listeners(host: str, port: int, count: int, stall_timeout_s: float, *, front: bool) -> Listeners:
    """Opens the sockets for `count` HTTP workers. Raises StartupError if the address is not available."""
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
    """Listens on a socket. Connections are closed when the client reads nothing for `stall_timeout_s`.

    The kernel does this: Robyn notices such a client only at the end of its connection.
    """
    if sys.platform == "linux":
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_timeout_s * 1000))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _FIRST_BYTES_S)
    listener.listen(BACKLOG)
    return listener
