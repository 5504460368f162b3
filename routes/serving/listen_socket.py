"""Robyn on a socket that listens already, which it has no interface for.

`Robyn.start` makes a listening socket of its own from host and port. It gets one on a port of the loopback interface
that nobody knows, whose descriptor is then made another name of the given socket: Robyn accepts from that one.
"""

from __future__ import annotations

import os
import socket
import stat

from robyn import Robyn, processpool


def serve(app: Robyn, listener: socket.socket) -> None:
    """Serve `app` on `listener` until the process ends."""
    make = processpool.SocketHeld

    def hold(host: str, port: int) -> processpool.SocketHeld:
        before = _listening()
        held = make(host, port)
        (descriptor,) = _listening() - before
        os.dup2(listener.fileno(), descriptor, inheritable=False)
        return held

    processpool.SocketHeld = hold  # type: ignore[misc,assignment]  # where `start` looks for it
    app.start(host="127.0.0.1", port=0, _check_port=False)


def _listening() -> set[int]:
    """Descriptors of this process that are sockets which listen."""
    return {int(name) for name in os.listdir("/dev/fd") if _listens(int(name))}


def _listens(descriptor: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
        with socket.socket(fileno=os.dup(descriptor)) as copy:
            return bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        return False  # closed meanwhile, like the one that the listing itself has used
