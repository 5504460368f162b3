"""Exported sessions as safetensors files. Any thread; no state.

The file has the state's parts by name. Its metadata has the model's fingerprint, the session's token count and the
token ids that follow the state. File contents are untrusted: numbers are bounded, and only InvalidSessionFile is
raised.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from native import safetensors
from native.safetensors import DTYPES, ITEM_BYTES, SHORT_NAMES
from state_pool.errors import PoolError, SessionTooLarge
from state_pool.layout import LAYOUT_VERSION, SAME_LAYOUT_HINT, Layout, has_same_layers
from state_pool.origins import is_same_model

FORMAT = "rwkv-session-2"
"""The written format. "rwkv-session-1" is read too; its checksum covers only replay, part names and bytes."""
MAX_HEADER_BYTES = 1 << 24
"""about two million replayed token ids"""
MAX_FILE_BYTES = 1000 << 20
"""Longest file written: the largest `--max-state-mb`."""
MAX_PARTS = 1024
"""Most parts of a state; a pipeline of n devices has 2 n."""
MAX_TOKENS = 1 << 48
"""Most tokens of a session; sums stay within 64 bits."""
_PIECE = 1 << 16
"""Characters or token ids that are processed at once, in about a millisecond."""
_MAX_SIZE = 1 << 40
_MAX_MESSAGE = 300
_EXPONENT = {"F64": 0x7FF << 52, "F32": 0xFF << 23, "F16": 0x1F << 10, "BF16": 0xFF << 7}
"""The exponent bits: all are set only in infinity and NaN."""
_Size = Annotated[int, Meta(ge=0, le=_MAX_SIZE)]
_TokenId = Annotated[int, Meta(ge=0, lt=1 << 32)]


class _Part(msgspec.Struct, forbid_unknown_fields=True):
    dtype: Literal["F64", "F32", "F16", "BF16", "I64", "I32", "I8", "U8"]
    shape: Annotated[list[_Size], Meta(max_length=8)]
    data_offsets: tuple[_Size, _Size]


class _Metadata(msgspec.Struct):
    format: str
    fingerprint: Annotated[str, Meta(max_length=256)]
    layout_version: str
    num_tokens: str
    replay: str
    checksum: str


class InvalidSessionFile(PoolError):  # noqa: N818 - names what the file is
    """The bytes are no session file, or not one of this model."""


@dataclass(frozen=True, slots=True)
class SessionFile:
    fingerprint: str
    num_tokens: int
    replay: list[int]
    layout: Layout
    parts: Mapping[str, bytes | memoryview]
    """Little-endian bytes by name. Empty: the zero state; all tokens are in `replay`."""

    def encode(self) -> bytes:
        """Return the bytes of a safetensors file. Raises SessionTooLarge."""
        metadata = {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "layout_version": str(LAYOUT_VERSION),
            "num_tokens": str(self.num_tokens),
            "replay": f"[{','.join(_id_texts(self.replay, ','))}]",
            "checksum": _checksum(self),
        }
        entries = {name: safetensors.Entry(*self.layout[name], len(data)) for name, data in self.parts.items()}
        header = safetensors.header(entries, metadata)
        if (num_bytes := len(header) + sum(map(len, self.parts.values()))) > MAX_FILE_BYTES:
            raise SessionTooLarge(
                f"the session needs a file of {num_bytes} bytes; at most {MAX_FILE_BYTES} can be exported"
            )
        return b"".join([header, *self.parts.values()])

    def check(self, fingerprint: str, layout: Layout, vocab: int) -> None:
        """Check that the session fits this model and state layout. Raises InvalidSessionFile."""
        if not is_same_model(self.fingerprint, fingerprint):
            raise InvalidSessionFile(
                f"the session belongs to another model (fingerprint {_truncated_repr(self.fingerprint)}, "
                f"this one is {fingerprint})"
            )
        if self.parts and not has_same_layers(self.layout, layout):
            raise InvalidSessionFile(
                f"the session's state has the layout {_truncated_repr(self.layout)}, this server uses {layout}: "
                f"{SAME_LAYOUT_HINT}"
            )
        if max(self.replay, default=0) >= vocab:
            at, token = next((i, token) for i, token in enumerate(self.replay) if token >= vocab)
            raise InvalidSessionFile(
                f"token id {token} at position {at} of its replay is outside the model's vocabulary of {vocab}"
            )


def decode(data: bytes) -> SessionFile:
    """Parse a session file. Raises only InvalidSessionFile.

    Reads every byte several times: call it on a background thread.
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
        raise ValueError(
            f"its header claims {length} bytes of {len(data)}, at most {MAX_HEADER_BYTES}; give a file of /state/export"
        )
    header = _parse_header(data[8 : 8 + length])
    metadata = msgspec.convert(header.pop("__metadata__", None), _Metadata)
    checksum = _CHECKSUMS.get(metadata.format)
    if checksum is None or metadata.layout_version != str(LAYOUT_VERSION):
        known = f"{' or '.join(_CHECKSUMS)} of layout {LAYOUT_VERSION}"
        found = f"{_truncated_repr(metadata.format)} of layout {_truncated_repr(metadata.layout_version)}"
        raise ValueError(f"its format is {found}, not {known}")
    layout, parts = _parts(msgspec.convert(header, dict[str, _Part]), memoryview(data)[8 + length :])
    replay = _parse_replay(metadata.replay)
    if not parts and not replay:
        raise ValueError("it holds neither a state nor tokens")
    file = SessionFile(metadata.fingerprint, _num_tokens(metadata.num_tokens, replay, parts), replay, layout, parts)
    if metadata.checksum != checksum(file):
        raise ValueError("its checksum does not match its content: it was damaged; export the session again")
    for name, part in parts.items():
        _check_finite(name, SHORT_NAMES[layout[name][0]], part)
    return file


def _parse_replay(text: str) -> list[int]:
    """Parse token ids in pieces. Parsing holds Python's lock, which the engine needs meanwhile."""
    body = text[1:-1]
    if len(body) <= _PIECE:
        return msgspec.json.decode(text, type=list[_TokenId])
    if not (text.startswith("[") and text.endswith("]")) or text.endswith(",]"):
        raise ValueError("its replay is not a list of token ids")
    ids: list[int] = []
    at = 0
    while at < len(body):
        comma = body.find(",", at + _PIECE)
        end = len(body) if comma < 0 else comma
        if not (piece := msgspec.json.decode(f"[{body[at:end]}]", type=list[_TokenId])):
            raise ValueError("its replay has two commas without a token id")
        ids += piece
        at = end + 1
    return ids


def _parse_header(text: bytes) -> dict[str, Any]:
    """Parse the header as plain data.

    Names and lists are counted first, because a parsed entry needs many times its bytes.
    """
    for sign, limit in ((b'"', 20), (b"{", 1), (b"[", 2)):
        if text.count(sign) > limit * (MAX_PARTS + 8):
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
    raise ValueError(f"its header has the number {_truncated_repr(text)}; only whole numbers are allowed")


def _parts(header: dict[str, _Part], body: memoryview) -> tuple[Layout, dict[str, bytes]]:
    """Return layout and bytes of all parts. They must fill the body without gaps."""
    layout: Layout = {}
    parts: dict[str, bytes] = {}
    at = 0
    for name, part in sorted(header.items(), key=lambda item: item[1].data_offsets):
        begin, end = part.data_offsets
        if begin != at or end - begin != math.prod(part.shape) * ITEM_BYTES[DTYPES[part.dtype]]:
            raise ValueError(
                f"part {_truncated_repr(name)} has bytes {begin} to {end} for shape {part.shape} of {part.dtype}; "
                f"the parts before it end at {at}"
            )
        layout[name] = (DTYPES[part.dtype], tuple(part.shape))
        parts[name] = bytes(body[begin:end])
        at = end
    if at != len(body):
        raise ValueError(f"its parts have {at} bytes, the file has {len(body)}")
    return layout, parts


def _num_tokens(text: str, replay: list[int], parts: Mapping[str, bytes]) -> int:
    """Return the session's token count: at least the replay, and exactly the replay without a state."""
    if not (text.isascii() and text.isdigit()) or len(text) > len(str(MAX_TOKENS)) or int(text) > MAX_TOKENS:
        raise ValueError(f"num_tokens is {_truncated_repr(text)}, not a whole number of at most {MAX_TOKENS}")
    num_tokens = int(text)
    if num_tokens < len(replay) or (not parts and num_tokens != len(replay)):
        raise ValueError(f"num_tokens is {num_tokens}, with {len(replay)} tokens to replay after {len(parts)} parts")
    return num_tokens


def _check_finite(name: str, dtype: str, data: bytes) -> None:
    """Check that a part has no NaN or infinity. Raises InvalidSessionFile."""
    if dtype not in _EXPONENT:
        return
    mask = _EXPONENT[dtype]
    wrong = (np.frombuffer(data, f"<u{ITEM_BYTES[DTYPES[dtype]]}") & mask) == mask
    if wrong.any():
        raise InvalidSessionFile(
            f"part {_truncated_repr(name)} of the state has {np.count_nonzero(wrong)} numbers that are NaN or "
            f"infinite, the first at {wrong.argmax()}; export the session again from a server where it works"
        )


def _checksum(file: SessionFile) -> str:
    """Hash all content, and all metadata that decides where the session fits."""
    metadata = json.dumps([FORMAT, LAYOUT_VERSION, file.fingerprint, file.num_tokens])
    digest = hashlib.blake2b(metadata[:-1].encode() + b", ", digest_size=16)
    _update_with_ids(digest, file.replay)
    digest.update(b"]")
    for name in sorted(file.parts):
        digest.update(json.dumps([name, *file.layout[name]]).encode())
        digest.update(file.parts[name])
    return digest.hexdigest()


def _update_with_ids(digest: hashlib.blake2b, ids: Sequence[int]) -> None:
    digest.update(b"[")
    for number, piece in enumerate(_id_texts(ids, ", ")):
        digest.update(f", {piece}".encode() if number else piece.encode())
    digest.update(b"]")


def _id_texts(ids: Sequence[int], separator: str) -> Iterator[str]:
    """Yield the texts of token ids in pieces. So other threads run between them."""
    for start in range(0, len(ids), _PIECE // 8):
        yield separator.join(map(str, ids[start : start + _PIECE // 8]))


def _checksum_1(file: SessionFile) -> str:
    """The checksum of "rwkv-session-1". Fields outside it are still bounded and checked against the model."""
    digest = hashlib.blake2b(digest_size=16)
    _update_with_ids(digest, file.replay)
    for name in sorted(file.parts):
        digest.update(name.encode())
        digest.update(file.parts[name])
    return digest.hexdigest()


_CHECKSUMS: dict[str, Callable[[SessionFile], str]] = {"rwkv-session-1": _checksum_1, FORMAT: _checksum}


def _truncated_repr(value: object) -> str:
    return _truncate(repr(value))


def _truncate(text: str) -> str:
    return text if len(text) <= _MAX_MESSAGE else text[:_MAX_MESSAGE] + "…"
