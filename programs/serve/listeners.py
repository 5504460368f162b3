"""The listening sockets. The supervisor opens them first and holds them until the end.

While a worker is replaced, new connections wait in the socket's queue instead of being refused. The port is reserved
from the first moment on.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from rwkv_batch.errors import StartupError

BACKLOG = 1024
_FIRST_BYTES_S = 1
"""How long a connection without any bytes waits in the kernel. A worker finds the head of its first request there."""
_LISTENS = "0A"
"""State of a listening socket in /proc/net/tcp, see Linux's include/net/tcp_states.h."""
_NEXT_PORTS, _MAX_PORT = 20, 65535


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
            owner = _owner(port)
            reason = f"port {port} on {host} is in use{owner and f' by {owner}'}; stop it or give another --port"
            if free := _free_port(host, port):
                reason += f", {free} is free"
        else:
            reason = f"cannot listen on {host} port {port}: {error.strerror}; give another --host or --port"
        raise StartupError(reason) from None


def _owner(port: int) -> str:
    """Returns "NAME (process ID)" of the process on a port. "" if this user may not see it."""
    inodes = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        with contextlib.suppress(OSError):
            fields = [line.split() for line in table.read_text().splitlines()[1:]]
            inodes |= {f"socket:[{one[9]}]" for one in fields if one[3] == _LISTENS and one[1].endswith(f":{port:04X}")}
    for process in Path("/proc").glob("[0-9]*") if inodes else ():
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            for file in (process / "fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    if str(file.readlink()) in inodes:
                        return f"{(process / 'comm').read_text().strip()} (process {process.name})"
    return ""


def _free_port(host: str, port: int) -> int | None:
    """Returns the next higher free port, if it is near."""
    for candidate in range(port + 1, min(port + _NEXT_PORTS, _MAX_PORT) + 1):
        with contextlib.suppress(OSError):
            _bind(host, candidate).close()
            return candidate
    return None


def _new_socket(host: str) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted sockets inherit it. Else the first token waits until the client confirms the headers: 40 ms on a
    # connection that was used before.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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
