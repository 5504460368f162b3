"""Malformed session files as an attacker would write them. Some have valid checksums."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

from state_pool.session_file import SessionFile, _checksum_1, decode


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack_from("<Q", data)
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def join(header: Any, body: bytes) -> bytes:
    """Join header and body to a file; `header` may be encoded text."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def with_metadata(data: bytes, **changes: Any) -> bytes:
    """Return the file with other metadata and the old checksum."""
    header, body = split(data)
    header["__metadata__"] |= changes
    return join(header, body)


def as_format_1(file: SessionFile, **changes: Any) -> bytes:
    """Return the file in the first format. Its checksum stays valid, since it does not cover these fields."""
    return with_metadata(file.encode(), **{"format": "rwkv-session-1", "checksum": _checksum_1(file)} | changes)


def malformed_files(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield (fault, file), made from a valid file."""
    file = decode(data)
    header, body = split(data)
    name = next(name for name in header if name != "__metadata__")
    text = json.dumps(header)

    def part(**changes: Any) -> bytes:
        return join({**header, name: {**header[name], **changes}}, body)

    for num_tokens in ("1" + "0" * 30, str(2**63), "-1", "1e3", "1_0", "\u0661", "", " 1", "9" * 5000):
        yield f"num_tokens {num_tokens[:8]}", as_format_1(file, num_tokens=num_tokens)
    yield "num_tokens not text", as_format_1(file, num_tokens=7)
    yield "num_tokens changed", with_metadata(data, num_tokens=str(file.num_tokens + 1))
    yield "fingerprint not text", as_format_1(file, fingerprint=[])
    yield "a long fingerprint", as_format_1(file, fingerprint="x" * 100_000)
    yield "replay beyond 32 bits", as_format_1(file, replay="[4294967296]", num_tokens="9")
    yield "replay not a list", as_format_1(file, replay="{}")
    yield "replay of floats", as_format_1(file, replay="[1.0]", num_tokens="9")
    yield "a format of another day", with_metadata(data, format="rwkv-session-99")
    yield "no metadata", join({name: header[name]}, body)
    yield "metadata is a list", join({**header, "__metadata__": []}, body)
    for shape in ([float("inf")], [float("nan")], [1.0], [True], ["1"], [10**30], [-1], [[1]], {"0": 1}, None, 7):
        yield f"shape {shape}", part(shape=shape)
    yield "a shape of many dimensions", part(shape=[1] * 100_000)
    yield "a product of large sizes", part(shape=[1 << 40] * 8)
    begin, end = header[name]["data_offsets"]
    for offsets in (
        [float(begin), float(end)],
        [begin],
        [begin, end, end],
        [begin, 10**30],
        [end, begin],
        "01",
        [-1, 1],
    ):
        yield f"offsets {offsets}", part(data_offsets=offsets)
    for dtype in ("F8", "f32", None, 7, ["F32"]):
        yield f"dtype {dtype}", part(dtype=dtype)
    yield "a part of other fields", part(extra=1)
    yield "a part that is a list", join({**header, name: []}, body)
    yield "a name twice", join((text[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}").encode(), body)
    yield "a name that is no text", join(text.replace(json.dumps(name), '"\\ud800"').encode(), body)
    yield "deep nesting", join(b"[" * 100_000, body)
    yield "deep nesting, closed", join(b'{"a":' * 50_000 + b"1" + b"}" * 50_000, body)
    yield "a header of lists", join(b"[" + b"[]," * 300_000 + b"[]]", body)
    yield "a header of names", join(b"{" + b'"a":0,' * 200_000 + b'"b":0}', body)
    yield "a header longer than any", struct.pack("<Q", 1 << 40) + data[8:]
    yield "a header that is no JSON", join(b"\xff" * 64, body)
    yield "neither state nor tokens", SessionFile(file.fingerprint, 0, [], {}, {}).encode()
    yield "more bytes than parts", data + b"x"
