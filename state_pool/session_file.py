"""A session as a safetensors file, to be carried away and brought back. Runs in any thread; holds nothing.

The file holds the state's parts by name, and in its metadata the model's fingerprint, how many tokens the
session stands for, and the token ids that follow the state. It opens with every safetensors reader.

Whatever a file holds comes from outside: its numbers are bounded here, and nothing but `InvalidSessionFile` is raised.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from state_pool.codec import ITEM_BYTES, LAYOUT_VERSION, Layout
from state_pool.errors import PoolError, SessionTooLarge
from state_pool.resharding import SAME_LAYOUT_HINT, has_same_layers

FORMAT = "rwkv-session-2"
"""Written. "rwkv-session-1" is read too: its checksum covers the replay and the parts' names and bytes only."""
MAX_HEADER_BYTES = 1 << 24
"""Longest header read: room for about two million replayed token ids."""
MAX_FILE_BYTES = 1000 << 20
"""Longest file written: the most that `--max-state-mb` lets a service read."""
MAX_PARTS = 1024
"""Most parts of a state; a pipeline of n devices has 2 n."""
MAX_TOKENS = 1 << 48
"""Most tokens that a session may stand for: what is added to it later still fits 64 bits everywhere."""
_MAX_SIZE = 1 << 40
_MAX_MESSAGE = 300
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
_DTYPES = {short: dtype for dtype, short in _NAMES.items()}
_EXPONENT = {"F64": 0x7FF << 52, "F32": 0xFF << 23, "F16": 0x1F << 10, "BF16": 0xFF << 7}
"""The bits of a number that are all set in infinity and NaN only."""
_Size = Annotated[int, Meta(ge=0, le=_MAX_SIZE)]
_TokenId = Annotated[int, Meta(ge=0, lt=1 << 32)]


class _Part(msgspec.Struct, forbid_unknown_fields=True):
    """A part of the state, as a safetensors header describes it."""

    dtype: Literal["F64", "F32", "F16", "BF16", "I64", "I32", "I8", "U8"]
    shape: Annotated[list[_Size], Meta(max_length=8)]
    data_offsets: tuple[_Size, _Size]


class _Metadata(msgspec.Struct):
    """The metadata: text by name, as safetensors has it."""

    format: str
    fingerprint: Annotated[str, Meta(max_length=256)]
    layout_version: str
    num_tokens: str
    replay: str
    checksum: str


class InvalidSessionFile(PoolError):  # noqa: N818 - names what the file is
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
    parts: Mapping[str, bytes | memoryview]
    """Raw little-endian bytes by name. Empty: the zero state; everything is in `replay`."""

    def encode(self) -> bytes:
        """As the bytes of a safetensors file. Raises SessionTooLarge."""
        header: dict[str, Any] = {
            "__metadata__": {
                "format": FORMAT,
                "fingerprint": self.fingerprint,
                "layout_version": str(LAYOUT_VERSION),
                "num_tokens": str(self.num_tokens),
                "replay": json.dumps(self.replay, separators=(",", ":")),
                "checksum": _checksum(self),
            }
        }
        at = 0
        for name, data in self.parts.items():
            dtype, shape = self.layout[name]
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + len(data)]}
            at += len(data)
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        if (num_bytes := 8 + len(text) + at) > MAX_FILE_BYTES:
            raise SessionTooLarge(
                f"the session makes a file of {num_bytes} bytes; at most {MAX_FILE_BYTES} can be carried away"
            )
        return b"".join([struct.pack("<Q", len(text)), text, *self.parts.values()])

    def check(self, fingerprint: str, layout: Layout, vocab: int) -> None:
        """Raises NotASession unless it belongs to this model and this arrangement of its state."""
        if self.fingerprint != fingerprint:
            raise InvalidSessionFile(
                f"the session belongs to another model (fingerprint {_truncated_repr(self.fingerprint)}, "
                f"this one is {fingerprint})"
            )
        if self.parts and not has_same_layers(self.layout, layout):
            raise InvalidSessionFile(
                f"the session's state is laid out as {_truncated_repr(self.layout)}, this server keeps {layout}: {SAME_LAYOUT_HINT}"
            )
        if max(self.replay, default=0) >= vocab:
            at, token = next((at, token) for at, token in enumerate(self.replay) if token >= vocab)
            raise InvalidSessionFile(
                f"token id {token} at position {at} of its replay is outside the model's vocabulary of {vocab}"
            )


def decode(data: bytes) -> SessionFile:
    """The session in a file's bytes. Raises NotASession, saying what is wrong, and nothing else.

    Reads every byte several times: for a thread that nobody waits on.
    """
    try:
        return _decode(data)
    except InvalidSessionFile:
        raise
    except (ValueError, struct.error, RecursionError) as error:
        raise InvalidSessionFile(f"this is not a session file: {_truncate(str(error))}") from None


def _decode(data: bytes) -> SessionFile:
    if len(data) < 8:
        raise ValueError(f"it has {len(data)} bytes")
    (length,) = struct.unpack_from("<Q", data)
    if length > min(MAX_HEADER_BYTES, len(data) - 8):
        raise ValueError(f"its header claims {length} bytes of {len(data)}, at most {MAX_HEADER_BYTES}")
    header = _parse_header(data[8 : 8 + length])
    metadata = msgspec.convert(header.pop("__metadata__", None), _Metadata)
    checksum = _CHECKSUMS.get(metadata.format)
    if checksum is None or metadata.layout_version != str(LAYOUT_VERSION):
        known = f"{' or '.join(_CHECKSUMS)} of layout {LAYOUT_VERSION}"
        raise ValueError(
            f"its format is {_truncated_repr(metadata.format)} of layout {_truncated_repr(metadata.layout_version)}, not {known}"
        )
    layout, parts = _parts(msgspec.convert(header, dict[str, _Part]), memoryview(data)[8 + length :])
    replay = msgspec.json.decode(metadata.replay, type=list[_TokenId])
    if not parts and not replay:
        raise ValueError("it holds neither a state nor tokens")
    file = SessionFile(metadata.fingerprint, _num_tokens(metadata.num_tokens, replay, parts), replay, layout, parts)
    if metadata.checksum != checksum(file):
        raise ValueError("its checksum does not fit its content: it was damaged on the way")
    for name, part in parts.items():
        _check_finite(name, _NAMES[layout[name][0]], part)
    return file


def _parse_header(text: bytes) -> dict[str, Any]:
    """The header as plain data. Names and lists are counted first, since each costs many times its bytes."""
    for sign, most in ((b'"', 20), (b"{", 1), (b"[", 2)):
        if text.count(sign) > most * (MAX_PARTS + 8):
            raise ValueError(f"its header has more entries than the {MAX_PARTS} parts that a state may have")
    header: Any = json.loads(
        text, object_pairs_hook=_reject_duplicates, parse_constant=_refuse_number, parse_float=_refuse_number
    )
    return msgspec.convert(header, dict[str, Any])


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"its header has {_truncated_repr(name)} twice")
        found[name] = value
    return found


def _refuse_number(text: str) -> Any:
    raise ValueError(f"its header has the number {_truncated_repr(text)} where whole numbers are wanted")


def _parts(header: dict[str, _Part], body: memoryview) -> tuple[Layout, dict[str, bytes]]:
    """Layout and bytes of every part; together they are the whole body, without a gap."""
    layout: Layout = {}
    parts: dict[str, bytes] = {}
    at = 0
    for name, part in sorted(header.items(), key=lambda item: item[1].data_offsets):
        begin, end = part.data_offsets
        if begin != at or end - begin != math.prod(part.shape) * ITEM_BYTES[_DTYPES[part.dtype]]:
            raise ValueError(
                f"part {_truncated_repr(name)} has bytes {begin} to {end} for shape {part.shape} of {part.dtype}; "
                f"the parts before it end at {at}"
            )
        layout[name] = (_DTYPES[part.dtype], tuple(part.shape))
        parts[name] = bytes(body[begin:end])
        at = end
    if at != len(body):
        raise ValueError(f"its parts have {at} bytes, the file has {len(body)}")
    return layout, parts


def _num_tokens(text: str, replay: list[int], parts: Mapping[str, bytes]) -> int:
    """What the session stands for: the replay at least, and nothing else when there is no state."""
    if not (text.isascii() and text.isdigit()) or len(text) > len(str(MAX_TOKENS)) or int(text) > MAX_TOKENS:
        raise ValueError(f"num_tokens is {_truncated_repr(text)}, not a whole number of at most {MAX_TOKENS}")
    num_tokens = int(text)
    if num_tokens < len(replay) or (not parts and num_tokens != len(replay)):
        raise ValueError(f"num_tokens is {num_tokens}, with {len(replay)} tokens to replay after {len(parts)} parts")
    return num_tokens


def _check_finite(name: str, dtype: str, data: bytes) -> None:
    """Raises NotASession if a number of this part is NaN or infinite: every answer from it would be noise."""
    if dtype not in _EXPONENT:
        return
    mask = _EXPONENT[dtype]
    wrong = (np.frombuffer(data, f"<u{ITEM_BYTES[_DTYPES[dtype]]}") & mask) == mask
    if wrong.any():
        raise InvalidSessionFile(
            f"part {_truncated_repr(name)} of the state has {np.count_nonzero(wrong)} numbers that are NaN or infinite, the "
            f"first at {wrong.argmax()}: whatever goes on from it is noise; export the session from where it works"
        )


def _checksum(file: SessionFile) -> str:
    """Of everything that the session is made of and everything that decides where it may be used."""
    metadata = [FORMAT, LAYOUT_VERSION, file.fingerprint, file.num_tokens, file.replay]
    digest = hashlib.blake2b(json.dumps(metadata).encode(), digest_size=16)
    for name in sorted(file.parts):
        digest.update(json.dumps([name, *file.layout[name]]).encode())
        digest.update(file.parts[name])
    return digest.hexdigest()


def _checksum_1(file: SessionFile) -> str:
    """As "rwkv-session-1" has it: what it leaves out is bounded and compared with the model all the same."""
    digest = hashlib.blake2b(json.dumps(file.replay).encode(), digest_size=16)
    for name in sorted(file.parts):
        digest.update(name.encode())
        digest.update(file.parts[name])
    return digest.hexdigest()


_CHECKSUMS: dict[str, Callable[[SessionFile], str]] = {"rwkv-session-1": _checksum_1, FORMAT: _checksum}


def _truncated_repr(value: object) -> str:
    """A value from the file, short enough to be told."""
    return _truncate(repr(value))


def _truncate(text: str) -> str:
    return text if len(text) <= _MAX_MESSAGE else text[:_MAX_MESSAGE] + "…"
