"""How tokens and states become bytes in rows, and how damage is noticed."""

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
"""Meaning of the stored bytes: parts in the order of the layout, raw little-endian, cut into chunks."""
CHUNK_BYTES = 1 << 20
"""Bytes of a state per row, so that a turn's commit never waits for more than one such write."""
CHUNKS_PER_STATE = 1 << 20
"""Row id of chunk n of state s is s * CHUNKS_PER_STATE + n."""

Layout = dict[str, tuple[str, tuple[int, ...]]]
ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int8": 1, "uint8": 1}
"""Bytes of a number of each type that a layout may name."""


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as unsigned 32-bit little-endian."""
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    """The token ids in a log row."""
    packed = array("I")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()


def checksum(data: bytes | memoryview, *numbers: int) -> bytes:
    """16 bytes over the data and the numbers that say where it belongs."""
    return checksum_pieces((data,), *numbers)


def checksum_pieces(pieces: Sequence[bytes | memoryview], *numbers: int) -> bytes:
    """The same, of data that is in pieces."""
    digest = hashlib.blake2b(digest_size=16)
    for piece in pieces:
        digest.update(piece)
    digest.update(struct.pack(f"<{len(numbers)}q", *numbers))
    return digest.digest()


def chunk_checksum(data: bytes | memoryview, at: int) -> int:
    """CRC-32 over a piece of a state and its row number: megabytes at memory speed, for damage and not for malice."""
    return zlib.crc32(data, zlib.crc32(struct.pack("<q", at)))


def layout_text(layout: Layout) -> str:
    """The layout as stored beside each state; equal layouts give equal text, in part order."""
    return json.dumps([[name, dtype, list(shape)] for name, (dtype, shape) in layout.items()], separators=(",", ":"))


def part_sizes(layout: Layout) -> dict[str, int]:
    """Bytes of each part."""
    return {name: math.prod(shape) * ITEM_BYTES[dtype] for name, (dtype, shape) in layout.items()}


def split_chunks(parts: dict[str, memoryview], order: Sequence[str]) -> Iterator[memoryview]:
    """The state's bytes, part after part, in pieces of at most CHUNK_BYTES; no piece spans two parts."""
    for name in order:
        whole = parts[name].cast("B")
        for start in range(0, len(whole), CHUNK_BYTES):
            yield whole[start : start + CHUNK_BYTES]


def join_parts(chunks: Sequence[bytes], sizes: dict[str, int]) -> dict[str, bytes]:
    """The inverse of `split_chunks`; raises ValueError if the bytes do not add up."""
    parts: dict[str, bytes] = {}
    at = 0
    for name, size in sizes.items():
        count = -(-size // CHUNK_BYTES)
        parts[name] = b"".join(chunks[at : at + count])
        if len(parts[name]) != size:
            raise ValueError(f"part {name} has {len(parts[name])} bytes, {size} were stored")
        at += count
    if at != len(chunks):
        raise ValueError(f"{len(chunks)} chunks where {at} were stored")
    return parts
