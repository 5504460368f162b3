"""Decodes GGUF's blocks one number at a time. `ggml-common.h` of llama.cpp defines the blocks."""

from __future__ import annotations

import struct
from collections.abc import Callable

NON_LINEAR = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]


def half(block: bytes, at: int) -> float:
    return float(struct.unpack_from("<e", block, at)[0])


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def nibble(codes: bytes, j: int) -> int:
    """Return code j of 32 in 16 bytes: the lower halves come first."""
    return codes[j] & 15 if j < 16 else codes[j - 16] >> 4


def small(block: bytes, at_minimum: int | None, at_fifth: int | None, at: int, offset: int) -> list[float]:
    """Return Q4_0, Q4_1, Q5_0 or Q5_1: 32 numbers."""
    scale, minimum = half(block, 0), 0.0 if at_minimum is None else half(block, at_minimum)
    fifth = 0 if at_fifth is None else int.from_bytes(block[at_fifth : at_fifth + 4], "little")
    codes = [nibble(block[at : at + 16], j) | (fifth >> j & 1) << 4 for j in range(32)]
    return [(code - offset) * scale + minimum for code in codes]


def q8_0(block: bytes) -> list[float]:
    return [signed(byte) * half(block, 0) for byte in block[2:]]


def q2_k(block: bytes) -> list[float]:
    scale, minimum = half(block, 80), half(block, 82)
    out = []
    for j in range(256):
        part, inner = divmod(j, 128)
        shift, at = divmod(inner, 32)
        code = block[16 + 32 * part + at] >> 2 * shift & 3
        packed = block[j // 16]
        out.append(scale * (packed & 15) * code - minimum * (packed >> 4))
    return out


def q3_k(block: bytes) -> list[float]:
    masks, codes, packed, scale = block[:32], block[32:96], block[96:108], half(block, 108)
    scales = []
    for j in range(16):
        low = packed[j % 8] & 15 if j < 8 else packed[j - 8] >> 4
        scales.append((low | (packed[8 + j % 4] >> 2 * (j // 4) & 3) << 4) - 32)
    out = []
    for j in range(256):
        part, inner = divmod(j, 128)
        shift, at = divmod(inner, 32)
        code = codes[32 * part + at] >> 2 * shift & 3
        missing = 0 if masks[at] & 1 << (4 * part + shift) else 4
        out.append(scale * scales[j // 16] * (code - missing))
    return out


def scale_and_minimum(packed: bytes, j: int) -> tuple[int, int]:
    """Return six bits each for group j of Q4_K and Q5_K."""
    if j < 4:
        return packed[j] & 63, packed[j + 4] & 63
    return packed[j + 4] & 15 | packed[j - 4] >> 6 << 4, packed[j + 4] >> 4 | packed[j] >> 6 << 4


def q45_k(block: bytes, at_fifth: int | None, at: int) -> list[float]:
    scale, minimum = half(block, 0), half(block, 2)
    out = []
    for j in range(256):
        group, inner = divmod(j, 32)
        byte = block[at + 32 * (group // 2) + inner]
        code = byte >> 4 if group % 2 else byte & 15
        if at_fifth is not None:
            code |= (block[at_fifth + inner] >> group & 1) << 4
        of_scale, of_minimum = scale_and_minimum(block[4:16], group)
        out.append(scale * of_scale * code - minimum * of_minimum)
    return out


def q6_k(block: bytes) -> list[float]:
    low, high, scales, scale = block[:128], block[128:192], block[192:208], half(block, 208)
    out = []
    for j in range(256):
        part, inner = divmod(j, 128)
        quarter, at = divmod(inner, 32)
        byte = low[64 * part + 32 * (quarter % 2) + at]
        code = (byte & 15 if quarter < 2 else byte >> 4) | (high[32 * part + at] >> 2 * quarter & 3) << 4
        out.append(scale * signed(scales[j // 16]) * (code - 32))
    return out


def iq4_nl(block: bytes) -> list[float]:
    return [half(block, 0) * NON_LINEAR[nibble(block[2:], j)] for j in range(32)]


def iq4_xs(block: bytes) -> list[float]:
    scale, high = half(block, 0), int.from_bytes(block[2:4], "little")
    out = []
    for j in range(256):
        group, inner = divmod(j, 32)
        low = block[4 + group // 2] >> 4 * (group % 2) & 15
        of_group = (low | (high >> 2 * group & 3) << 4) - 32
        out.append(scale * of_group * NON_LINEAR[nibble(block[8 + 16 * group : 24 + 16 * group], inner)])
    return out


DECODE: dict[str, Callable[[bytes], list[float]]] = {
    "q4_0": lambda block: small(block, None, None, 2, 8),
    "q4_1": lambda block: small(block, 2, None, 4, 0),
    "q5_0": lambda block: small(block, None, 2, 6, 16),
    "q5_1": lambda block: small(block, 2, 4, 8, 0),
    "q8_0": q8_0,
    "q2_k": q2_k,
    "q3_k": q3_k,
    "q4_k": lambda block: q45_k(block, None, 16),
    "q5_k": lambda block: q45_k(block, 16, 48),
    "q6_k": q6_k,
    "iq4_nl": iq4_nl,
    "iq4_xs": iq4_xs,
}
SCALES = {
    "q4_1": (0, 2),
    "q5_1": (0, 2),
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
}
"""Bytes of a block's fp16 scales; elsewhere byte 0"""
