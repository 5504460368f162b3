"""Types of numbers in files, and the header of a safetensors file. Without torch."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
              "uint8": 1, "bool": 1}  # fmt: skip
"""Bytes per number, by torch's names."""
SHORT_NAMES = dict(zip(ITEM_BYTES, "F64 F32 F16 BF16 I64 I32 I16 I8 U8 BOOL".split(), strict=True))
"""Torch's name of a type -> its name in a safetensors file."""
DTYPES = {short: dtype for dtype, short in SHORT_NAMES.items()}


class Entry(NamedTuple):
    dtype: str
    """torch's name"""
    shape: tuple[int, ...]
    num_bytes: int


def header(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes before the first tensor. The tensors follow in the order of `entries`, without gaps."""
    ends = itertools.accumulate(entry.num_bytes for entry in entries.values())
    found: dict[str, object] = {"__metadata__": metadata}
    for (name, entry), end in zip(entries.items(), ends, strict=True):
        offsets = [end - entry.num_bytes, end]
        found[name] = {"dtype": SHORT_NAMES[entry.dtype], "shape": entry.shape, "data_offsets": offsets}
    text = msgspec.json.encode(found)
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
