"""Tokens and states as bytes of database rows, with checksums."""

from __future__ import annotations

import hashlib
import json
import math
import struct
import sys
import zlib
from array import array
from collections.abc import Iterator, Sequence

LAYOUT_VERSION = 1
"""Format of the stored bytes: parts in layout order, little-endian, cut into chunks."""
CHUNK_BYTES = 1 << 20
"""Bytes of a state per row. A turn's commit waits for at most one such write."""
CHUNKS_PER_STATE = 1 << 20
"""Row id of chunk n of state s is s * CHUNKS_PER_STATE + n."""

Layout = dict[str, tuple[str, tuple[int, ...]]]
ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int8": 1, "uint8": 1}
"""Bytes per number of each dtype that a layout may name."""


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Pack token ids as unsigned 32-bit little-endian."""
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    """Unpack the token ids of a log row."""
    packed = array("I")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()


def checksum(data: bytes | memoryview, *numbers: int) -> bytes:
    """Return 16 bytes over the data and the numbers that identify its row."""
    return checksum_pieces((data,), *numbers)


def checksum_pieces(pieces: Sequence[bytes | memoryview], *numbers: int) -> bytes:
    """`checksum` of data in pieces."""
    digest = hashlib.blake2b(digest_size=16)
    for piece in pieces:
        digest.update(piece)
    digest.update(struct.pack(f"<{len(numbers)}q", *numbers))
    return digest.digest()


def chunk_checksum(data: bytes | memoryview, at: int) -> int:
    """Return a CRC-32 over a chunk and its row number. Detects damage, not tampering."""
    return zlib.crc32(data, zlib.crc32(struct.pack("<q", at)))


def layout_text(layout: Layout) -> str:
    """Encode a layout for the database, in part order. Equal layouts give equal text."""
    return json.dumps([[name, dtype, list(shape)] for name, (dtype, shape) in layout.items()], separators=(",", ":"))


def part_sizes(layout: Layout) -> dict[str, int]:
    return {name: math.prod(shape) * ITEM_BYTES[dtype] for name, (dtype, shape) in layout.items()}


def split_chunks(parts: dict[str, memoryview], order: Sequence[str]) -> Iterator[memoryview]:
    """Yield the state's bytes part by part, in chunks of at most CHUNK_BYTES. No chunk spans two parts."""
    for name in order:
        whole = parts[name].cast("B")
        for start in range(0, len(whole), CHUNK_BYTES):
            yield whole[start : start + CHUNK_BYTES]


def join_parts(chunks: Sequence[bytes], sizes: dict[str, int]) -> dict[str, bytes]:
    """Invert `split_chunks`. Raises ValueError if the sizes do not match."""
    parts: dict[str, bytes] = {}
    at = 0
    for name, size in sizes.items():
        count = -(-size // CHUNK_BYTES)
        parts[name] = b"".join(chunks[at : at + count])
        if len(parts[name]) != size:
            raise ValueError(f"part {name} has {len(parts[name])} bytes, {size} expected")
        at += count
    if at != len(chunks):
        raise ValueError(f"{len(chunks)} chunks, {at} expected")
    return parts
