"""A PostgreSQL server behind a link that can be cut for one process: what was sent arrives when it is mended."""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

_SOCKET = ".s.PGSQL.5432"
_PIECE = 1 << 16


class DatabaseLink:
    """Forwards connections to a server's socket; a process that is cut off waits as for a network that drops all."""

    def __init__(self, folder: Path, server: Path) -> None:
        """`folder` gets the socket that clients connect to, `server` is the server's own folder."""
        self._server = str(server / _SOCKET)
        self._cut = 0
        """the process that is cut off"""
        self.held = 0
        """pieces that had to wait for the link to be mended"""
        self._whole = threading.Event()
        self._whole.set()
        self._listener = socket.create_server(str(folder / _SOCKET), family=socket.AF_UNIX, backlog=64)
        threading.Thread(target=self._accept, name="database-link", daemon=True).start()

    def cut(self, pid: int) -> None:
        """From now on nothing goes to or from that process."""
        self._cut = pid
        self._whole.clear()

    def mend(self) -> None:
        """All goes on, with what was sent meanwhile."""
        self._cut = 0
        self._whole.set()

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                pid = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
                threading.Thread(target=self._connect, args=(client, pid), daemon=True).start()

    def _connect(self, client: socket.socket, pid: int) -> None:
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            server.connect(self._server)
        except OSError:
            client.close()
            return
        threading.Thread(target=self._pump, args=(server, client, pid), daemon=True).start()
        self._pump(client, server, pid)

    def _pump(self, source: socket.socket, sink: socket.socket, pid: int) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(_PIECE):
                self.held += self._cut == pid
                while self._cut == pid:
                    self._whole.wait()
                sink.sendall(piece)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def linked(address: str) -> Iterator[tuple[str, DatabaseLink]]:
    """A database's address through a link of its own, and the link. `address` names the server's folder as its host."""
    found = re.search(r"host=([^#&]+)", address)
    if found is None:
        raise ValueError(f"{address} names no folder")
    with tempfile.TemporaryDirectory(prefix="link-", dir="/tmp") as folder:
        link = DatabaseLink(Path(folder), Path(found[1]))
        with contextlib.closing(link):
            yield address.replace(found[1], folder), link
