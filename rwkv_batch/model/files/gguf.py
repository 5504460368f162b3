"""Reads the header of a GGUF file: single values of its metadata, and the places of its tensors. Without torch.

The file is untrusted. Every count and length is compared with the bytes that are left before anything is read.
"""

from __future__ import annotations

import math
import re
import struct
from typing import IO

from native.safetensors import ITEM_BYTES
from rwkv_batch.model.files.place import (
    BLOCKS,
    MAX_HEADER_BYTES,
    MAX_NAME,
    MAX_TENSORS,
    NotWeights,
    Place,
    TensorIndex,
    dense_strides,
)

MAGIC = b"GGUF"
ARCHITECTURE, SPLIT_COUNT = "general.architecture", "split.count"
RWKV7_ARCHITECTURE = "rwkv7"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_MAX_SIZE = 1 << 48
_MAX_VALUES = 1 << 12
"""Most values of the metadata; public files have about 40."""
_MAX_TEXT = 1 << 16
"""Longest kept text of the metadata, in bytes; a chat template has about 5,000."""
_MIN_ALIGNMENT, _MAX_ALIGNMENT = 8, 1 << 16
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Type of a metadata value -> its format in `struct`"""
_TEXT, _LIST = 8, 9
TYPE_NUMBERS = {
    "float32": 0,
    "float16": 1,
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 6,
    "q5_1": 7,
    "q8_0": 8,
    "q2_k": 10,
    "q3_k": 11,
    "q4_k": 12,
    "q5_k": 13,
    "q6_k": 14,
    "iq4_nl": 20,
    "iq4_xs": 23,
    "float64": 28,
    "bfloat16": 30,
}
"""Type of a tensor's numbers, as in Place -> its number in GGUF"""
_TYPES = {number: dtype for dtype, number in TYPE_NUMBERS.items()}
_OTHER_TYPES = {
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}
_LAYER = re.compile(r"^blk\.(\d{1,4})\.")


class _Header:
    """The bytes from the file's start, and how far they are read."""

    def __init__(self, data: bytes, file_size: int) -> None:
        self._data, self._file_size = data, file_size
        self.at = 0

    def take(self, length: int) -> int:
        """Skip `length` bytes and return where they begin. Raises ValueError if the header has fewer."""
        begin, self.at = self.at, self.at + length
        if self.at > self._file_size:
            raise ValueError(f"truncated: its header needs {self.at - self._file_size} bytes more")
        if self.at > len(self._data):
            raise ValueError(f"its header is longer than {len(self._data)} bytes")
        return begin

    def number(self, form: str) -> int | float | bool:
        size = struct.calcsize(f"<{form}")
        found: tuple[int | float | bool, ...] = struct.unpack_from(f"<{form}", self._data, self.take(size))
        return found[0]

    def whole(self, form: str = "Q", limit: int = _MAX_SIZE) -> int:
        """Read an unsigned integer of at most `limit`."""
        value = int(self.number(form))
        if value > limit:
            raise ValueError(f"its header has the size {value}, at most {limit} is allowed")
        return value

    def text(self, limit: int) -> str:
        """Read a text; a longer one is cut to `limit` bytes."""
        length = self.whole()
        begin = self.take(length)
        return self._data[begin : begin + min(length, limit)].decode("utf-8", "replace")

    def skip_list(self) -> int:
        """Skip a list of single values and return its length."""
        kind, count = self.whole("I"), self.whole()
        if kind in _NUMBERS:
            self.take(count * struct.calcsize(f"<{_NUMBERS[kind]}"))
        elif kind == _TEXT:
            for _ in range(count):  # each takes eight bytes or more, so the header's length bounds the steps
                self.take(self.whole())
        else:
            raise ValueError(f"its metadata has a list of type {kind}")
        return count


def read_gguf(file: IO[bytes], size: int) -> TensorIndex:
    """Return the index of the tensors [...] of a GGUF file.

    The file begins with MAGIC. Raises NotWeights or ValueError.
    """
    file.seek(0)
    header = _Header(file.read(MAX_HEADER_BYTES), size)
    header.take(len(MAGIC))
    version = header.whole("I")
    if version not in _VERSIONS:
        big_endian = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
        what = "little-endian" if big_endian else f"GGUF of version 2 or 3 (it has version {version})"
        raise NotWeights(f"{what}; convert the model again")
    num_tensors, num_values = header.whole(), header.whole()
    if num_tensors > MAX_TENSORS or num_values > _MAX_VALUES:
        raise ValueError(
            f"its header has {num_tensors} tensors and {num_values} values, at most {MAX_TENSORS} and {_MAX_VALUES} "
            "are allowed"
        )
    metadata = _metadata(header, num_values)
    _check_kind(metadata)
    infos = [_info(header) for _ in range(num_tensors)]
    alignment = int(metadata.get("general.alignment", "32"))
    if not _MIN_ALIGNMENT <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        raise ValueError(f"its alignment is {alignment}, expected a power of two from {_MIN_ALIGNMENT}")
    if unaligned := [place.name for place in infos if place.begin % alignment]:
        raise ValueError(f"tensor {unaligned[0]!r} is not aligned to {alignment} bytes")
    base = -(-header.at // alignment) * alignment
    places = [place._replace(begin=base + place.begin) for place in infos]
    end = max((place.begin + place.num_bytes for place in places), default=0)
    if end > size:
        raise ValueError(f"truncated: {end - size} of {end} bytes are missing")
    if len({place.name for place in places}) < len(places):
        raise ValueError("two of its tensors have the same name")
    _check_sizes(metadata, {place.name: place.shape for place in places})
    return TensorIndex(places, metadata)


def _metadata(header: _Header, count: int) -> dict[str, str]:
    """Return single values as text, and the lengths of lists."""
    found: dict[str, str] = {}
    for _ in range(count):  # each takes twelve bytes or more
        key = header.text(MAX_NAME)
        kind = header.whole("I")
        if kind == _TEXT:
            found[key] = header.text(_MAX_TEXT)
        elif kind == _LIST:
            found[key] = str(header.skip_list())
        elif kind in _NUMBERS:
            found[key] = str(header.number(_NUMBERS[kind]))
        else:
            raise ValueError(f"its metadata {key!r} has the unknown type {kind}")
        if key == ARCHITECTURE:
            _check_kind(found)  # before the tokens of a large vocabulary
    return found


def _check_kind(metadata: dict[str, str]) -> None:
    """Check what the file is. Raises NotWeights."""
    architecture = metadata.get(ARCHITECTURE)
    if architecture is None and SPLIT_COUNT not in metadata:
        raise NotWeights(f"RWKV-7: its metadata has no {ARCHITECTURE}")
    if architecture not in (None, RWKV7_ARCHITECTURE):
        raise NotWeights(
            f"RWKV-7: its {ARCHITECTURE} is {architecture[:MAX_NAME]!r}; give a GGUF file of {RWKV7_ARCHITECTURE!r}"
        )
    if (kind := metadata.get("general.type", "model")) != "model":
        raise NotWeights(f"a model: its general.type is {kind[:MAX_NAME]!r}; give the model's GGUF file")
    tokenizer = metadata.get("tokenizer.ggml.model", "rwkv")
    if tokenizer != "rwkv":
        raise NotWeights(
            f"a model with the World vocabulary: its tokenizer.ggml.model is {tokenizer[:MAX_NAME]!r}; "
            "use 'World' weights"
        )


def _info(header: _Header) -> Place:
    """Read one tensor's entry; `begin` is relative to the first tensor."""
    name = header.text(MAX_NAME)
    sizes = tuple(header.whole() for _ in range(header.whole("I", _MAX_DIMENSIONS)))
    kind, begin = header.whole("I"), header.whole()
    shape = sizes[::-1]  # GGUF has the fastest dimension first
    total = math.prod(shape)
    if total > _MAX_SIZE:
        raise ValueError(f"tensor {name!r} has impossible sizes")
    dtype = _TYPES.get(kind)
    if dtype is None:
        raise NotWeights(
            f"of a type that can be read (tensor {name!r} is {_OTHER_TYPES.get(kind, f'type {kind}')}); allowed are "
            f"F32, F16, BF16, {', '.join(BLOCKS).upper()}; quantise the model to one of these"
        )
    numbers, num_bytes = BLOCKS[dtype] if dtype in BLOCKS else (1, ITEM_BYTES[dtype])
    if numbers > 1 and (not shape or shape[-1] % numbers):
        raise ValueError(f"tensor {name!r} has rows that are not whole blocks of {numbers}")
    return Place(name, dtype, begin, total // numbers * num_bytes, shape, dense_strides(shape))


def _check_sizes(metadata: dict[str, str], shapes: dict[str, tuple[int, ...]]) -> None:
    """Check that metadata and tensors agree. Raises ValueError."""
    if int(metadata.get(SPLIT_COUNT, "1")) > 1:
        return
    layers = 1 + max((int(found[1]) for name in shapes if (found := _LAYER.match(name))), default=-1)
    table = shapes.get("token_embd.weight", (0, 0))
    real = {
        "rwkv7.block_count": layers,
        "rwkv7.embedding_length": table[-1],
        "rwkv7.wkv.head_size": 64,
        "tokenizer.ggml.tokens": table[0],
    }
    for key, size in real.items():
        if metadata.get(key, str(size)) != str(size):
            raise ValueError(f"its metadata has {key} {metadata[key][:MAX_NAME]}, its tensors {size}")
