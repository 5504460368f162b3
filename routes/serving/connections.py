"""Finds the connection of a request.

The connection shows whether the client has left while its answer is computed. Robyn passes only the peer's address to
handlers, and it notices a disconnect by a failed write. But a write fixes the answer's status, so the socket itself is
checked. Robyn's server calls getpeername once per new connection, and every request of the connection has its result.
`identify_connections` replaces this function in Robyn's library. The result becomes an IPv6 address that holds the
connection's number, and `find` returns the connection.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import select
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from routes.context import CancellableTasks
from routes.serving.thread_states import keep_state

_PREFIX = socket.inet_pton(socket.AF_INET6, "100::")[:8]
"""No packet has such an address (RFC 6666)."""
_NUMBER = struct.Struct(">II")
"""Serial number and descriptor: the second half of the address."""
_SOCKADDR_IN6 = struct.Struct("=HHI16sI")
"""Family, port, flow information, address, scope."""
_TCP_INFO_BYTES = 136
_RECEIVED = struct.Struct("=Q")
_RECEIVED_OFFSET = 128
_IDLE = struct.Struct("=I")
_IDLE_OFFSET = 52
_MAX_HEAD_BYTES = 1 << 14
_HAS_LEFT = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL


@dataclass(slots=True, eq=False)
class Connection:
    serial: int
    descriptor: int
    inode: int
    """Identifies the socket. After it is closed, another one may have its descriptor."""
    peer: str
    """The peer's address."""
    is_trusted: bool = True
    """Whether its client may send large bodies: it has shown a secret, if the service has one."""
    handled_bytes: int = 0
    """Bytes that were received with its complete requests."""

    def received_bytes(self) -> int:
        """Return the bytes that the client has sent."""
        (received,) = _RECEIVED.unpack_from(self._tcp_info(), _RECEIVED_OFFSET)
        return int(received)

    def idle_s(self) -> float:
        """Return the seconds since the client's last bytes."""
        (idle_ms,) = _IDLE.unpack_from(self._tcp_info(), _IDLE_OFFSET)
        return float(idle_ms) / 1e3

    def _tcp_info(self) -> ctypes.Array[ctypes.c_char]:
        info = ctypes.create_string_buffer(_TCP_INFO_BYTES)
        length = ctypes.c_uint32(_TCP_INFO_BYTES)
        _libc.getsockopt(self.descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(length))
        return info

    def is_open(self) -> bool:
        """Return whether the client is connected. One that has shut down its sending side counts as gone."""
        poll = select.poll()
        poll.register(self.descriptor, select.POLLRDHUP)
        return not any(events & _HAS_LEFT for _, events in poll.poll(0)) and self.has_descriptor()

    def has_descriptor(self) -> bool:
        """Return whether the service has not closed the connection."""
        try:
            return os.fstat(self.descriptor).st_ino == self.inode
        except OSError:  # it was closed just now
            return False


_connections: dict[int, Connection] = {}
"""By descriptor. A new connection replaces a closed one."""
_serials = itertools.count()
ShowsSecret = Callable[[str, bytes], bool]
"""(peer's address, head of a request) -> whether the head shows a secret."""
_shows_secret: ShowsSecret | None = None
"""None: the service has no secret."""
cancelled_if_left: CancellableTasks[Connection] = CancellableTasks()
"""The running handlers that are cancelled if their client leaves."""


def find(address: str | None) -> Connection | None:
    """Return the connection with this address. None for other addresses and for closed connections."""
    try:
        packed = socket.inet_pton(socket.AF_INET6, address or "")
    except OSError:  # another kind of address
        return None
    serial, descriptor = _NUMBER.unpack(packed[8:])
    connection = _connections.get(descriptor)
    is_known = connection is not None and packed[:8] == _PREFIX and connection.serial == serial
    return connection if is_known else None


def start_request(address: str | None) -> Connection | None:
    """Like `find`, for a request that was just received to its end."""
    connection = find(address)
    if connection is not None:
        connection.handled_bytes = connection.received_bytes()
    return connection


def known_connections() -> list[Connection]:
    """Return the connections, and some that were closed."""
    return list(_connections.values())


def cancel_left() -> None:
    """Cancel the tasks whose clients have left. Any thread may call this a few times per second."""
    cancelled_if_left.cancel(lambda connection: not connection.is_open())


_GETPEERNAME = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_libc = ctypes.CDLL(None, use_errno=True)
_getpeername = _GETPEERNAME(("getpeername", _libc))
_recv = ctypes.PyDLL(None).recv


@_GETPEERNAME
def _numbered_peer(descriptor: int, address: int, length: int) -> int:
    """Like getpeername(2), but write an address that holds the connection's number."""
    keep_state()
    result: int = _getpeername(descriptor, address, length)
    if result == 0:
        serial = next(_serials) & 0xFFFF_FFFF
        peer = _peer_text(ctypes.string_at(address, _SOCKADDR_IN6.size))
        is_trusted = _shows_secret is None or _shows_secret(peer, _peek(descriptor))
        _connections[descriptor] = Connection(serial, descriptor, os.fstat(descriptor).st_ino, peer, is_trusted)
        packed = _PREFIX + _NUMBER.pack(serial, descriptor)
        ctypes.memmove(address, _SOCKADDR_IN6.pack(socket.AF_INET6, 0, 0, packed, 0), _SOCKADDR_IN6.size)
        ctypes.c_uint32.from_address(length).value = _SOCKADDR_IN6.size
    return result


def _peek(descriptor: int) -> bytes:
    """Return the first bytes that a new connection has sent. Robyn reads them later.

    The listening sockets accept a connection when its first bytes arrive (TCP_DEFER_ACCEPT).
    """
    buffer = ctypes.create_string_buffer(_MAX_HEAD_BYTES)
    count = _recv(descriptor, buffer, _MAX_HEAD_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    return buffer.raw[: max(0, count)]


def _peer_text(sockaddr: bytes) -> str:
    (family,) = struct.unpack_from("=H", sockaddr)
    return socket.inet_ntop(family, sockaddr[8:24] if family == socket.AF_INET6 else sockaddr[4:8])


def identify_connections(library: Path, shows_secret: ShowsSecret | None = None) -> None:
    """Replace getpeername in a loaded library. Raises RuntimeError if it does not call it, OSError if Linux refuses.

    shows_secret: decides which clients are trusted; None: all
    """
    global _shows_secret  # noqa: PLW0603 - the library's function is replaced once per process, too
    _shows_secret = shows_secret
    library = library.resolve()
    slot = _load_address(library) + _slot_offset(library, b"getpeername")
    page = ctypes.c_void_p(slot // mmap.PAGESIZE * mmap.PAGESIZE)
    if _libc.mprotect(page, ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ | mmap.PROT_WRITE):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(library))
    ctypes.c_void_p.from_address(slot).value = ctypes.cast(_numbered_peer, ctypes.c_void_p).value


def _load_address(library: Path) -> int:
    """Return the address at which a library was loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) > 5 and Path(fields[5]) == library and int(fields[2], 16) == 0:
            return int(fields[0].partition("-")[0], 16)
    raise RuntimeError(f"{library} is not loaded")


_SECTION = struct.Struct("<IIQQQQII16x")
"""Name, type, flags, address, offset, size, link, info."""
_RELOCATION = struct.Struct("<QII8x")
"""Offset, type, index of the symbol."""
_SYMBOL = struct.Struct("<I20x")
"""Offset of its name."""
_RELOCATIONS = 4
"""Type of a section: SHT_RELA."""


def _slot_offset(library: Path, function: bytes) -> int:
    """Return the offset of an imported function's pointer in the library. The library is a 64-bit ELF file."""
    file = library.read_bytes()
    (table,) = struct.unpack_from("<Q", file, 0x28)
    size, count = struct.unpack_from("<HH", file, 0x3A)
    sections = [_SECTION.unpack_from(file, table + size * number) for number in range(count)]
    for _, kind, _, _, start, length, link, _ in sections:
        if kind != _RELOCATIONS:
            continue
        symbols, names = sections[link][4], sections[sections[link][6]][4]
        for slot, _, symbol in _RELOCATION.iter_unpack(file[start : start + length]):
            (name,) = _SYMBOL.unpack_from(file, symbols + symbol * _SYMBOL.size)
            if symbol and file.startswith(function + b"\0", names + name):
                return int(slot)
    raise RuntimeError(f"{library.name} does not call {function.decode()}")
