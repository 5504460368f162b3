"""Runs Robyn on an existing listening socket.

Robyn's API does not support this. `Robyn.start` opens a socket of its own. It gets a random loopback port here. Then
its descriptor is replaced by the given socket.
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

    processpool.SocketHeld = hold  # type: ignore[misc,assignment]  # `start` looks it up there
    app.start(host="127.0.0.1", port=0, _check_port=False)


def _listening() -> set[int]:
    return {int(name) for name in os.listdir("/dev/fd") if _listens(int(name))}


def _listens(descriptor: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
        with socket.socket(fileno=os.dup(descriptor)) as copy:
            return bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        return False  # closed in the meantime, like the descriptor of the listing itself
