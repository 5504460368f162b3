"""A session as a safetensors file, to be carried away and brought back. Runs in any thread; holds nothing.

The file holds the state's parts by name, and in its metadata the model's fingerprint, how many tokens the
session stands for, and the token ids that follow the state. It opens with every safetensors reader.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from state_pool.codec import LAYOUT_VERSION, Layout
from state_pool.errors import PoolError

FORMAT = "rwkv-session-1"
MAX_HEADER_BYTES = 1 << 24
"""Longest header read: room for about two million replayed token ids."""
_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int8": "I8",
    "uint8": "U8",
}
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I8": 1, "U8": 1}
_EXPONENT = {"F64": 0x7FF << 52, "F32": 0xFF << 23, "F16": 0x1F << 10, "BF16": 0xFF << 7}
"""The bits of a number that are all set in infinity and NaN only."""


class NotASession(PoolError):  # noqa: N818 - names what the file is
    """The bytes are not a session file, or not one of this model."""


@dataclass(frozen=True, slots=True)
class SessionFile:
    """What the file says."""

    fingerprint: str
    num_tokens: int
    """Tokens that state and replay stand for together."""
    replay: list[int]
    """Token ids that follow the state."""
    layout: Layout
    parts: dict[str, bytes]
    """Empty: the zero state; everything is in `replay`."""

    def encode(self) -> bytes:
        """As the bytes of a safetensors file."""
        header: dict[str, Any] = {
            "__metadata__": {
                "format": FORMAT,
                "fingerprint": self.fingerprint,
                "layout_version": str(LAYOUT_VERSION),
                "num_tokens": str(self.num_tokens),
                "replay": json.dumps(self.replay, separators=(",", ":")),
                "checksum": _checksum(self.replay, self.parts),
            }
        }
        at = 0
        for name, data in self.parts.items():
            dtype, shape = self.layout[name]
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + len(data)]}
            at += len(data)
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return b"".join([struct.pack("<Q", len(text)), text, *self.parts.values()])

    def check(self, fingerprint: str, layout: Layout) -> None:
        """Raises NotASession unless it belongs to this model and this arrangement of its state."""
        if self.fingerprint != fingerprint:
            raise NotASession(
                f"the session belongs to another model (fingerprint {self.fingerprint}, this one is {fingerprint})"
            )
        if self.parts and self.layout != layout:
            raise NotASession(
                f"the session's state is laid out as {self.layout}, this server keeps {layout}: "
                "start with the same state dtype and devices"
            )


def decode(data: bytes) -> SessionFile:
    """The session in a file's bytes. Raises NotASession, saying what is wrong.

    Reads every byte several times: for a thread that nobody waits on.
    """
    try:
        return _decode(data)
    except (ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError) as error:
        raise NotASession(f"this is not a session file: {error}") from None


def _decode(data: bytes) -> SessionFile:
    (length,) = struct.unpack_from("<Q", data)
    if length > min(MAX_HEADER_BYTES, len(data) - 8):
        raise ValueError(f"its header claims {length} bytes of {len(data)}")
    header = json.loads(data[8 : 8 + length])
    about = header.pop("__metadata__")
    if about["format"] != FORMAT or about["layout_version"] != str(LAYOUT_VERSION):
        raise ValueError(f"its format is {about['format']!r} version {about['layout_version']!r}, wanted {FORMAT!r} 1")
    body = memoryview(data)[8 + length :]
    layout: Layout = {}
    parts: dict[str, bytes] = {}
    at = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        shape = tuple(int(size) for size in entry["shape"])
        if begin != at or min(shape, default=1) < 0 or end - begin != math.prod(shape) * _ITEM_BYTES[entry["dtype"]]:
            raise ValueError(f"part {name!r} has bytes {begin} to {end} for shape {shape} of {entry['dtype']}")
        layout[name] = (_dtype(entry["dtype"]), shape)
        parts[name] = bytes(body[begin:end])
        at = end
    if at != len(body):
        raise ValueError(f"its parts have {at} bytes, the file has {len(body)}")
    replay = json.loads(about["replay"])
    if not isinstance(replay, list) or not all(type(token) is int and 0 <= token < 1 << 32 for token in replay):
        raise ValueError("its replay is not a list of token ids")
    num_tokens = int(about["num_tokens"])
    if num_tokens < len(replay):
        raise ValueError(f"it claims {num_tokens} tokens and replays {len(replay)}")
    if about["checksum"] != _checksum(replay, parts):
        raise ValueError("its checksum does not fit its content: it was damaged on the way")
    for name, part in parts.items():
        _check_finite(name, header[name]["dtype"], part)
    return SessionFile(str(about["fingerprint"]), num_tokens, replay, layout, parts)


def _check_finite(name: str, dtype: str, data: bytes) -> None:
    """Raises NotASession if a number of this part is NaN or infinite: every answer from it would be noise."""
    if dtype not in _EXPONENT:
        return
    mask = _EXPONENT[dtype]
    wrong = (np.frombuffer(data, f"<u{_ITEM_BYTES[dtype]}") & mask) == mask
    if wrong.any():
        raise NotASession(
            f"part {name!r} of the state has {np.count_nonzero(wrong)} numbers that are NaN or infinite, the first at "
            f"{wrong.argmax()}: whatever goes on from it is noise; export the session again from where it works"
        )


def _dtype(name: str) -> str:
    return next(dtype for dtype, short in _NAMES.items() if short == name)


def _checksum(replay: list[int], parts: dict[str, bytes]) -> str:
    """Of everything a session is made of, in the order of names."""
    digest = hashlib.blake2b(json.dumps(replay).encode(), digest_size=16)
    for name in sorted(parts):
        digest.update(name.encode())
        digest.update(parts[name])
    return digest.hexdigest()
