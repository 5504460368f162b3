"""Writes GGUF files, tensor by tensor. Without torch."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, NamedTuple

from native.safetensors import ITEM_BYTES
from rwkv_batch.model.files.gguf import MAGIC, TYPE_NUMBERS
from rwkv_batch.model.files.place import BLOCKS

ALIGNMENT = 32
_VERSION = 3
_U32, _I32, _F32, _TEXT, _LIST = 4, 5, 6, 8, 9

Value = str | int | float | Sequence[str] | Sequence[int]


class Entry(NamedTuple):
    name: str
    dtype: str
    """as in Place"""
    shape: tuple[int, ...]
    data: Callable[[], Iterable[bytes | memoryview]]

    @property
    def num_bytes(self) -> int:
        numbers, num_bytes = BLOCKS[self.dtype] if self.dtype in BLOCKS else (1, ITEM_BYTES[self.dtype])
        return math.prod(self.shape) // numbers * num_bytes


def write_gguf(file: IO[bytes], metadata: Mapping[str, Value], entries: Sequence[Entry]) -> None:
    """Write the header and then each tensor's data, aligned."""
    file.write(gguf_header(metadata, entries))
    for entry in entries:
        written = sum(file.write(part) for part in entry.data())
        assert written == entry.num_bytes, f"{entry.name}: {written} bytes, not {entry.num_bytes}"
        file.write(b"\0" * (-written % ALIGNMENT))


def gguf_header(metadata: Mapping[str, Value], entries: Sequence[Entry]) -> bytes:
    """Return the bytes up to the first tensor's data."""
    out = [MAGIC, struct.pack("<IQQ", _VERSION, len(entries), len(metadata))]
    out += [_text(key) + _value(value) for key, value in metadata.items()]
    at = 0
    for entry in entries:
        out.append(_text(entry.name) + struct.pack(f"<I{len(entry.shape)}Q", len(entry.shape), *entry.shape[::-1]))
        out.append(struct.pack("<IQ", TYPE_NUMBERS[entry.dtype], at))
        at += entry.num_bytes
        at += -at % ALIGNMENT
    header = b"".join(out)
    return header + b"\0" * (-len(header) % ALIGNMENT)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Value) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _TEXT) + _text(value)
    if isinstance(value, int):
        return struct.pack("<II", _U32, value)
    if isinstance(value, float):
        return struct.pack("<If", _F32, value)
    texts = [one for one in value if isinstance(one, str)]
    numbers = [one for one in value if isinstance(one, int)]
    items = b"".join(map(_text, texts)) if texts else struct.pack(f"<{len(numbers)}i", *numbers)
    return struct.pack("<IIQ", _LIST, _TEXT if texts else _I32, len(value)) + items
