"""Encodes numbers into GGUF's blocks by rounding to the nearest code. Independent of the project's own encoder.

llama.cpp also searches better scales, so its files are closer to the source than these.
"""

from __future__ import annotations

import torch
from torch import Tensor

from test.gguf_blocks import NON_LINEAR

TABLE = torch.tensor(NON_LINEAR, dtype=torch.float32)


def encode(kind: str, numbers: Tensor) -> Tensor:
    """Return blocks [N, bytes] uint8 of numbers [N, 32 or 256] fp32."""
    if kind in ("q4_0", "q5_0"):
        return _signed_small(numbers, 4 if kind == "q4_0" else 5)
    if kind in ("q4_1", "q5_1"):
        return _small_with_minimum(numbers, 4 if kind == "q4_1" else 5)
    if kind == "iq4_nl":
        scale = _half(_extreme(numbers) / -127)
        return _bytes(scale, _halves(_nearest(numbers / _safe(scale.float()))))
    if kind in ("q4_k", "q5_k"):
        return _k_with_minimum(numbers, 4 if kind == "q4_k" else 5)
    return {"q8_0": _q8_0, "q2_k": _q2_k, "q3_k": _q3_k, "q6_k": _q6_k, "iq4_xs": _iq4_xs}[kind](numbers)


def _q8_0(numbers: Tensor) -> Tensor:
    scale = _half(numbers.abs().amax(1, keepdim=True) / 127)
    return _bytes(scale, _codes(numbers, scale, -127, 127))


def _signed_small(numbers: Tensor, bits: int) -> Tensor:
    half = 1 << (bits - 1)
    scale = _half(_extreme(numbers) / -half)
    codes = _codes(numbers, scale, -half, half - 1) + half
    return _bytes(scale, *_fifth(codes, bits), _halves(codes & 15))


def _small_with_minimum(numbers: Tensor, bits: int) -> Tensor:
    low = numbers.amin(1, keepdim=True)
    scale = _half((numbers.amax(1, keepdim=True) - low) / ((1 << bits) - 1))
    minimum = _half(low)
    codes = _codes(numbers - minimum.float(), scale, 0, (1 << bits) - 1)
    return _bytes(scale, minimum, *_fifth(codes, bits), _halves(codes & 15))


def _k_with_minimum(numbers: Tensor, bits: int) -> Tensor:
    """Q4_K and Q5_K: eight groups of 32, each with six bits of scale and of minimum."""
    scale, minimum, of_scale, of_minimum, codes = _group_with_minimum(numbers.view(-1, 8, 32), bits, 63)
    packed = torch.zeros(len(numbers), 12, dtype=torch.int64)
    packed[:, :4] = of_scale[:, :4] | of_scale[:, 4:] >> 4 << 6
    packed[:, 4:8] = of_minimum[:, :4] | of_minimum[:, 4:] >> 4 << 6
    packed[:, 8:] = of_scale[:, 4:] & 15 | (of_minimum[:, 4:] & 15) << 4
    pairs = codes.view(-1, 4, 2, 32)
    low = ((pairs[:, :, 0] & 15) | (pairs[:, :, 1] & 15) << 4).flatten(1)
    high = (codes.view(-1, 8, 32) >> 4 << torch.arange(8).view(1, 8, 1)).sum(1)
    return _bytes(scale, minimum, packed, *([high] if bits == 5 else []), low)


def _q2_k(numbers: Tensor) -> Tensor:
    scale, minimum, of_scale, of_minimum, codes = _group_with_minimum(numbers.view(-1, 16, 16), 2, 15)
    return _bytes(of_scale | of_minimum << 4, _quarters(codes), scale, minimum)


def _q3_k(numbers: Tensor) -> Tensor:
    scale, of_group, codes = _group_signed(numbers.view(-1, 16, 16), 4, 32)
    codes = codes.flatten(1) + 4
    unsigned = of_group + 32
    low = (unsigned & 15)[:, :8] | (unsigned & 15)[:, 8:] << 4
    high = ((unsigned >> 4).view(-1, 4, 4) << 2 * torch.arange(4).view(1, 4, 1)).sum(1)
    masks = ((codes >> 2).view(-1, 8, 32) << torch.arange(8).view(1, 8, 1)).sum(1)
    return _bytes(masks, _quarters(codes & 3), low, high, scale)


def _q6_k(numbers: Tensor) -> Tensor:
    scale, of_group, codes = _group_signed(numbers.view(-1, 16, 16), 32, 128)
    parts = (codes.flatten(1) + 32).view(-1, 2, 4, 32)
    low = ((parts & 15)[:, :, :2] | (parts & 15)[:, :, 2:] << 4).flatten(1)
    high = (parts >> 4 << 2 * torch.arange(4).view(1, 1, 4, 1)).sum(2).flatten(1)
    return _bytes(low, high, of_group & 255, scale)


def _iq4_xs(numbers: Tensor) -> Tensor:
    groups = numbers.view(-1, 8, 32)
    wanted = _extreme(groups) / -127
    scale = _half(_extreme(wanted.flatten(1)) / -32)
    of_group = _codes(wanted.flatten(1), scale, -32, 31)
    exact = (scale.float() * of_group).unsqueeze(2)
    codes = _nearest(groups / _safe(exact))
    unsigned = of_group + 32
    high = ((unsigned >> 4) << 2 * torch.arange(8)).sum(1, keepdim=True)
    low = (unsigned & 15)[:, ::2] | (unsigned & 15)[:, 1::2] << 4
    return _bytes(scale, high & 255, high >> 8, low, _halves(codes.view(-1, 32)).view(len(numbers), -1))


def _group_with_minimum(groups: Tensor, bits: int, most: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return both scales [N, 1] fp16, their multiples [N, G] and codes [N, G, n]."""
    lowest = groups.amin(2).clamp(max=0)
    wanted = (groups.amax(2) - lowest).clamp(min=0) / ((1 << bits) - 1)
    scale = _half(wanted.amax(1, keepdim=True) / most)
    minimum = _half(-lowest.amin(1, keepdim=True) / most)
    of_scale, of_minimum = _codes(wanted, scale, 0, most), _codes(-lowest, minimum, 0, most)
    exact, offset = (scale.float() * of_scale).unsqueeze(2), (minimum.float() * of_minimum).unsqueeze(2)
    return scale, minimum, of_scale, of_minimum, _codes(groups + offset, exact, 0, (1 << bits) - 1)


def _group_signed(groups: Tensor, half: int, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scale [N, 1] fp16, its multiples [N, G] and codes [N, G, n] from -half to half - 1."""
    wanted = (_extreme(groups) / -half).squeeze(2)
    scale = _half(_extreme(wanted) / -most)
    of_group = _codes(wanted, scale, -most, most - 1)
    return scale, of_group, _codes(groups, (scale.float() * of_group).unsqueeze(2), -half, half - 1)


def _extreme(numbers: Tensor) -> Tensor:
    """Return the number with the largest size of the last axis, with its sign."""
    return numbers.gather(-1, numbers.abs().argmax(-1, keepdim=True))


def _half(numbers: Tensor) -> Tensor:
    return numbers.to(torch.float16)


def _safe(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def _codes(numbers: Tensor, scale: Tensor, low: int, high: int) -> Tensor:
    return (numbers / _safe(scale.float())).round().clamp(low, high).long()


def _nearest(numbers: Tensor) -> Tensor:
    """Return the index of the nearest number of IQ4's table."""
    middles = (TABLE[1:] + TABLE[:-1]) / 2
    return torch.bucketize(numbers, middles)


def _halves(codes: Tensor) -> Tensor:
    """Return 16 bytes of 32 codes: the lower halves come first."""
    return codes[:, :16] | codes[:, 16:] << 4


def _fifth(codes: Tensor, bits: int) -> list[Tensor]:
    """Return the fifth bits of 32 codes as four bytes."""
    if bits == 4:
        return []
    return [((codes >> 4).view(-1, 4, 8) << torch.arange(8)).sum(2)]


def _quarters(codes: Tensor) -> Tensor:
    """Return 64 bytes of 256 codes of two bits."""
    parts = codes.reshape(-1, 2, 4, 32)
    return (parts << 2 * torch.arange(4).view(1, 1, 4, 1)).sum(2).flatten(1)


def _bytes(*parts: Tensor) -> Tensor:
    return torch.cat(
        [part.view(torch.uint8) if part.dtype == torch.float16 else (part & 255).to(torch.uint8) for part in parts], 1
    )
