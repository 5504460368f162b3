"""Stream sockets between the processes of a world: bytes are late, links stall, and are cut within a frame."""

from __future__ import annotations

import io
import random
from collections import deque
from typing import Any

from test.simulation.tasks import Tasks


class Pipe:
    def __init__(self, network: Network) -> None:
        self._network = network
        self._pieces: deque[tuple[float, bytes]] = deque()
        """bytes on their way, and when they arrive"""
        self._size = 0
        self._last_at = 0.0
        self._ends_at: float | None = None
        self.holds_until = 0.0
        """virtual time before which nothing arrives: the link stalls"""
        self.is_cut = False
        """whether nothing that is sent arrives"""

    def send(self, data: bytes) -> int:
        """Take what fits. Raises BlockingIOError, BrokenPipeError."""
        network = self._network
        if self._ends_at is not None and network.tasks.now >= self._ends_at:
            raise BrokenPipeError("the peer is gone")
        room = network.buffer_bytes - self._size
        if room <= 0:
            raise BlockingIOError("the buffer is full")
        data = bytes(data[:room])
        if self.is_cut:
            return len(data)
        at = 0
        while at < len(data):
            size = network.rng.randint(1, len(data) - at) if network.rng.random() < 0.2 else len(data) - at
            self._last_at = max(self._last_at, network.tasks.now + network.delay())
            self._pieces.append((self._last_at, data[at : at + size]))
            at += size
        self._size += len(data)
        return len(data)

    def has_input(self) -> bool:
        """Return whether bytes or the end have arrived."""
        now = self._network.tasks.now
        if self._pieces:
            return now >= max(self._pieces[0][0], self.holds_until)
        return self._ends_at is not None and now >= self._ends_at

    def receive(self, maximum: int) -> bytes:
        """Wait for bytes; b"": the end."""
        self._network.tasks.wait(self.has_input)
        if not self._pieces or not self.has_input():
            return b""
        at, piece = self._pieces.popleft()
        if len(piece) > maximum:
            self._pieces.appendleft((at, piece[maximum:]))
        self._size -= min(maximum, len(piece))
        return piece[:maximum]

    def wait_for_room(self) -> None:
        """Wait until the buffer has room, or the other end is gone."""
        tasks = self._network.tasks
        tasks.wait(lambda: self._size < self._network.buffer_bytes or (self._ends_at or tasks.now + 1) <= tasks.now)

    def end(self, late_s: float = 0.0) -> None:
        """Nothing follows. The receiver notices after what is on its way, and `late_s` seconds at the earliest."""
        if self._ends_at is None:
            self._ends_at = self._network.tasks.now + late_s

    def cut(self, late_s: float) -> None:
        """Lose part of the data on its way and everything after it."""
        self.is_cut = True
        kept = self._network.rng.randint(0, self._size)
        pieces, self._pieces, self._size = self._pieces, deque(), 0
        for at, piece in pieces:
            if kept > 0:
                self._pieces.append((at, piece[:kept]))
                self._size += len(piece[:kept])
            kept -= len(piece)
        self.holds_until = min(self.holds_until, self._network.tasks.now + late_s)
        self.end(late_s)


class Socket:
    """Implements the part of `socket.socket` that the links use."""

    def __init__(self, network: Network, *_: Any) -> None:
        self.process = network.tasks.process
        self.address = ""
        self.incoming: Pipe | None = None
        self.outgoing: Pipe | None = None
        self._network = network
        self._backlog: deque[Socket] = deque()

    def bind(self, address: str) -> None:
        self.address = address

    def listen(self, _most: int) -> None:
        self._network.listeners[self.address] = self

    def accept(self) -> tuple[Socket, None]:
        self._network.tasks.wait(lambda: bool(self._backlog))
        accepted = self._backlog.popleft()
        accepted.process = self._network.tasks.process
        return accepted, None

    def connect(self, address: str) -> None:
        self._network.tasks.pause()
        listener = self._network.listeners.get(address)
        if listener is None:
            raise ConnectionRefusedError(address)
        other = Socket(self._network)
        other.process = listener.process
        self.incoming = other.outgoing = Pipe(self._network)
        self.outgoing = other.incoming = Pipe(self._network)
        listener._backlog.append(other)
        self._network.links.append((self, other))

    def send(self, data: bytes, _flags: int = 0) -> int:
        assert self.outgoing is not None
        return self.outgoing.send(data)

    def sendall(self, data: bytes) -> None:
        assert self.outgoing is not None
        while data:
            try:
                data = data[self.outgoing.send(data) :]
            except BlockingIOError:
                self.outgoing.wait_for_room()

    def makefile(self, _mode: str, _buffering: int) -> io.RawIOBase:
        assert self.incoming is not None
        return _Reader(self.incoming)

    def shutdown(self, _how: int) -> None:
        self.close()

    def close(self) -> None:
        for pipe in (self.incoming, self.outgoing):
            if pipe is not None:
                pipe.end()


class _Reader(io.RawIOBase):
    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._pipe.receive(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class Network:
    """All sockets of a world."""

    def __init__(self, tasks: Tasks, rng: random.Random) -> None:
        self.tasks = tasks
        self.rng = rng
        self.listeners: dict[str, Socket] = {}
        self.links: list[tuple[Socket, Socket]] = []
        self._ended_links: list[tuple[Socket, Socket]] = []
        """links of ended processes: the other end notices when they no longer stall"""
        self.buffer_bytes = 100_000
        self._delays = rng.choice(((0.0,), (0.0, 0.001, 0.005), (0.001, 0.02, 0.1)))

    def socket(self, *arguments: Any) -> Socket:
        """Replaces `socket.socket`."""
        return Socket(self, *arguments)

    def delay(self) -> float:
        return self.rng.choice(self._delays)

    def kill(self, process: Any) -> None:
        """The process's end: its sockets close."""
        self.listeners = {address: one for address, one in self.listeners.items() if one.process is not process}
        for ends in self.links:
            for end in ends:
                if end.process is process:
                    end.close()
        self._ended_links += [ends for ends in self.links if any(end.process is process for end in ends)]
        self.links = [ends for ends in self.links if all(end.process is not process for end in ends)]

    def cut(self) -> None:
        """Cut one link, perhaps within a frame. One end may notice late."""
        if self.links:
            one, other = self.links.pop(self.rng.randrange(len(self.links)))
            late_s = [0.0, self.rng.choice((0.0, 0.05, 1.0))]
            self.rng.shuffle(late_s)
            for end, late in zip((one, other), late_s, strict=True):
                assert end.incoming is not None
                end.incoming.cut(late)

    @property
    def is_stalled(self) -> bool:
        """Whether a link lets nothing arrive."""
        pipes = [end.incoming for ends in [*self.links, *self._ended_links] for end in ends if end.incoming is not None]
        return any(pipe.holds_until > self.tasks.now for pipe in pipes)

    def stall(self, seconds: float) -> None:
        """Let nothing arrive on one link, in one direction or both."""
        if self.links:
            ends = self.rng.choice(self.links)
            for end in self.rng.choice((ends, ends[:1], ends[1:])):
                assert end.incoming is not None
                end.incoming.holds_until = self.tasks.now + seconds
