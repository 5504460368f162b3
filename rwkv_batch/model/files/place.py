"""Places of tensors in a file, and limits of the header readers. Without torch."""

from __future__ import annotations

import math
from typing import NamedTuple

PTH, SAFETENSORS = ".pth", (".safetensors", ".st")
MEMORY_BYTES = 1 << 30
"""Of the process that reads headers."""
CPU_S = 10
"""CPU seconds per file. The process rounds up to a whole second."""
MAX_HEADER_BYTES = 8 << 20
"""Longest header and pickle; 1.4 MB for the largest public model, mostly GGUF's tokens."""
MAX_TENSORS = 1 << 14
MAX_NAME = 256
BLOCKS = {
    "q4_0": (32, 18),
    "q4_1": (32, 20),
    "q5_0": (32, 22),
    "q5_1": (32, 24),
    "q8_0": (32, 34),
    "q2_k": (256, 84),
    "q3_k": (256, 110),
    "q4_k": (256, 144),
    "q5_k": (256, 176),
    "q6_k": (256, 210),
    "iq4_nl": (32, 18),
    "iq4_xs": (256, 136),
}
"""GGUF's block types: numbers and bytes per block."""


class Place(NamedTuple):
    name: str
    dtype: str
    """as in torch: "bfloat16", or one of BLOCKS"""
    begin: int
    num_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class TensorIndex(NamedTuple):
    places: list[Place]
    metadata: dict[str, str]
    """of a safetensors file, or GGUF's single values"""


class NotWeights(Exception):  # noqa: N818 - names what the file is
    """The file is readable but has no dict of dense tensors. The message continues "FILE is not ..."."""


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
