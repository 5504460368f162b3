"""Processes that receive streams and note the gaps between deltas, in files that others read meanwhile.

A process that pickles or sends what it has noted receives nothing for as long, and one that others want to hear keeps
Python's lock from its own streams: so each writes a file, once a second, and does nothing else.

A delta of a stream over HTTP has come when the system says so (SO_TIMESTAMPNS), and not when the client, which runs on
the service's cores, had one of these and Python's lock. Where the system does not say, as under gVisor, its own clock
holds; `stamped_by` tells which.
"""

from __future__ import annotations

import multiprocessing
import selectors
import socket
import struct
import sys
import time
import urllib.parse
from array import array
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.service.engine_stream import EngineStream
from bench.service.gaps import Gap
from bench.tools.http_load import Exchange, Load, _open, _request

WRITE_S = 1.0
"""So often what was noted is written."""
_SO_TIMESTAMPNS = 35
"""Linux, asm-generic/socket.h: each piece that is read comes with the time at which the last of it arrived."""
_STAMP = struct.Struct("qq")
"""struct timespec: seconds and nanoseconds since 1970."""


class Notes:
    """Gaps in memory, written once a second; what is wrong with streams in a file beside, a line each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._gaps = array("d")
        self._written = time.monotonic()

    def gap(self, gap: Gap) -> None:
        """One more."""
        self._gaps.extend(gap)

    def failure(self, what: str) -> None:
        """A stream ended as it should not."""
        with self._path.with_suffix(".failures").open("a") as file:
            file.write(what.replace("\n", " ") + "\n")

    def write(self, *, now: bool = False) -> None:
        """Write what is noted, if a second is over or `now`."""
        if now or time.monotonic() > self._written + WRITE_S:
            self._written = time.monotonic()
            with self._path.open("ab") as file:
                self._gaps.tofile(file)
            del self._gaps[:]


class Arrivals:
    """When deltas came: by the system's stamps, else by the clock at the moment they are read."""

    def __init__(self) -> None:
        self.are_stamped = False
        self._last: dict[int, float] = {}

    def begin(self, stream: int, connection: socket.socket) -> None:
        """A stream begins anew on that connection."""
        self._last.pop(stream, None)
        if sys.platform == "linux":
            connection.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)

    def read(self, connection: socket.socket) -> tuple[bytes, float]:
        """A piece, and when it came (s since 1970)."""
        piece, extra, _, _ = connection.recvmsg(262144, 64)
        at = time.time()
        if extra and len(extra[0][2]) >= _STAMP.size:
            seconds, nanoseconds = _STAMP.unpack(extra[0][2][: _STAMP.size])
            at, self.are_stamped = seconds + nanoseconds / 1e9, True
        return piece, at

    def gap(self, stream: int, at: float) -> float | None:
        """How long after the stream's last delta this one came; None: it is the first."""
        before = self._last.get(stream)
        self._last[stream] = at
        return None if before is None else at - before


def receive(load: Load, host: str, port: int, path: Path, parent: Connection) -> None:
    """Main function of the HTTP client: streams that are opened anew when they end, until told to stop."""
    selector = selectors.DefaultSelector()
    notes, arrivals = Notes(path), Arrivals()

    def begin(number: int) -> None:
        exchange = _open(host, port, _request(load, host, number))
        arrivals.begin(number, exchange.connection)
        selector.register(exchange.connection, selectors.EVENT_READ, (number, exchange))

    def take(number: int, exchange: Exchange) -> None:
        piece, at = arrivals.read(exchange.connection)
        if piece:
            exchange.take(piece, b'"content"')
            if b'"content"' in piece and (gap := arrivals.gap(number, at)) is not None:
                notes.gap((number, time.monotonic(), gap))
            return
        if exchange.failed or b"[DONE]" not in exchange.tail:
            notes.failure(exchange.failed or "the stream ended without [DONE]")
        selector.unregister(exchange.connection)
        exchange.connection.close()
        begin(number)

    for number in range(load.concurrency):
        begin(number)
    while not parent.poll():
        for key, _ in selector.select(timeout=0.1):
            take(*key.data)
        notes.write()
    notes.write(now=True)
    parent.send(arrivals.are_stamped)


def receive_from_engine(engine: int, max_tokens: int, path: Path, parent: Connection) -> None:
    """Main function of the other: one stream straight from the engine's socket, until told to stop."""
    notes = Notes(path)
    stream = EngineStream(engine, max_tokens)
    told = 0
    while not parent.poll(WRITE_S):
        known = len(stream.gaps)
        for gap in stream.gaps[told:known]:
            notes.gap(gap)
        told = known
        notes.write(now=True)
    stream.close()
    parent.send(False)


class Beside:
    """A process of its own beside a run: `target`'s last arguments are the file that it writes and its end of a pipe,
    on which it is told to stop and answers with what it found."""

    def __init__(self, target: Callable[..., None], path: Path, *arguments: object) -> None:
        self.path = path
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(*arguments, path, theirs), daemon=True)
        self._process.start()

    def end(self) -> Any:
        """Have it end; returns its answer."""
        self._pipe.send("stop")
        return self._pipe.recv()


class Receiver(Beside):
    """One that receives streams, and what it has told by now."""

    def __init__(self, target: Callable[..., None], path: Path, *arguments: object) -> None:
        super().__init__(target, path, *arguments)
        self._read = 0
        self.gaps: list[Gap] = []
        self.stamped_by = "client"

    def look(self) -> list[Gap]:
        """Take what is new, which may miss the last second, and return it."""
        known = len(self.gaps)
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._read)
                told = file.read()
            whole = len(told) // _GAP.size * _GAP.size
            self._read += whole
            self.gaps += [(int(stream), at, gap) for stream, at, gap in _GAP.iter_unpack(told[:whole])]
        return self.gaps[known:]

    def stop(self) -> None:
        """Have it end, and take the rest."""
        self.stamped_by = "system" if self.end() else "client"
        self.look()

    @property
    def failures(self) -> list[str]:
        """What was wrong with streams."""
        path = self.path.with_suffix(".failures")
        return path.read_text().splitlines() if path.exists() else []


_GAP = struct.Struct("ddd")


def address(url: str) -> tuple[str, int]:
    """Host and port."""
    parts = urllib.parse.urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    return parts.hostname, parts.port
