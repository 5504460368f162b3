"""Reads the header of a safetensors file. Without torch."""

from __future__ import annotations

import math
import struct
from typing import IO, Annotated

import msgspec
from msgspec import Meta

from native.safetensors import DTYPES, ITEM_BYTES
from rwkv_batch.model.files.place import (
    MAX_HEADER_BYTES,
    MAX_NAME,
    NotWeights,
    Place,
    TensorIndex,
    dense_strides,
)

_MAX_DIMENSIONS = 8
_MAX_SIZE = 1 << 48


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[list[Annotated[int, Meta(ge=0, le=_MAX_SIZE)]], Meta(max_length=_MAX_DIMENSIONS)]
    data_offsets: tuple[int, int]


def read_safetensors(file: IO[bytes], size: int) -> TensorIndex:
    """Return the index of a file's tensors [...]. Raises NotWeights, ValueError or msgspec's errors."""
    file.seek(0)
    if size < 8:
        raise ValueError(f"truncated: it has {size} bytes")
    (length,) = struct.unpack("<Q", file.read(8))
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise ValueError(f"its header of {length} bytes is longer than the file or than {MAX_HEADER_BYTES}")
    header = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
    metadata = msgspec.json.decode(header.pop("__metadata__", b"{}"), type=dict[str, str])
    places: list[Place] = []
    at = 0
    entries = ((name, msgspec.json.decode(raw, type=_Entry)) for name, raw in header.items())
    for name, entry in sorted(entries, key=lambda item: item[1].data_offsets):
        if entry.dtype not in DTYPES:
            kind = f"tensor {name[:MAX_NAME]!r} is {entry.dtype[:MAX_NAME]!r}"
            raise NotWeights(f"a weight file ({kind}); save it as bf16, fp16 or fp32")
        dtype, (begin, end) = DTYPES[entry.dtype], entry.data_offsets
        if begin != at or end - begin != math.prod(entry.shape) * ITEM_BYTES[dtype]:
            raise ValueError(f"tensor {name[:MAX_NAME]!r} has bytes {begin} to {end}, expected them from {at}")
        at = end
        shape = tuple(entry.shape)
        places.append(Place(name, dtype, 8 + length + begin, end - begin, shape, dense_strides(shape)))
    if (missing := 8 + length + at - size) > 0:
        raise ValueError(f"truncated: {missing} of {8 + length + at} bytes are missing")
    if missing:
        raise ValueError(f"its tensors end at {8 + length + at}, the file has {size} bytes")
    return TensorIndex(places, metadata)
