"""A PostgreSQL server behind a link. The link can be cut for one process. Data sent meanwhile arrives later."""

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
    """Forwards connections to a server's socket. For a cut process, the network seems to drop everything."""

    def __init__(self, folder: Path, server: Path) -> None:
        """`folder` gets the socket for clients; `server` is the server's folder."""
        self._server = str(server / _SOCKET)
        self._cut = 0
        """pid of the cut process"""
        self.held = 0
        """chunks delayed by the cut"""
        self._whole = threading.Event()
        self._whole.set()
        self._listener = socket.create_server(str(folder / _SOCKET), family=socket.AF_UNIX, backlog=64)
        threading.Thread(target=self._accept, name="database-link", daemon=True).start()

    def cut(self, pid: int) -> None:
        """Stop all traffic to and from that process."""
        self._cut = pid
        self._whole.clear()

    def mend(self) -> None:
        """Resume all traffic, with the delayed data."""
        self._cut = 0
        self._whole.set()

    def close(self) -> None:
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
    """Yield a database's address through a new link, and the link.

    The host in `address` must be the server's folder. Raises ValueError otherwise.
    """
    found = re.search(r"host=([^#&]+)", address)
    if found is None:
        raise ValueError(f"{address} names no folder")
    with tempfile.TemporaryDirectory(prefix="link-", dir="/tmp") as folder:
        link = DatabaseLink(Path(folder), Path(found[1]))
        with contextlib.closing(link):
            yield address.replace(found[1], folder), link
