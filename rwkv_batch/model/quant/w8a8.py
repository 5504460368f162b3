"""The definition of W8A8: int8 weights times int8 inputs, with exact sums, in two segments of the inputs.

The 128 input channels with the largest calibrated values are segment 1 and come first. The rest is segment 0.

    x'[t, c] = x[t, c] * factors[c]         factors: 1 / s; smoothing of SmoothQuant
    W'[n, c] = W[n, c] * s[c]
    qx, sx, rx = x' in 8 bits               a step is sx[t] in segment 0 and sx[t] * rx[t] / 16 in segment 1
    qw, sw, rw = W' in 8 bits               likewise, a scale and a ratio per output
    S[t, n]  = floor(rx[t] * rw[n] * (sum over segment 1 of qx * qw) / 256) + (sum over segment 0 of qx * qw)
    y[t, n]  = float(S) * (sx[t] * sw[n])

Inputs are s8; those of ffn.value are squares, so they are u8. S fits 32 bits and is exact. So y has the same bits for
any batch, order of sums and device that has the same codes. Every fp32 operation rounds on its own. Plain torch.

Inputs in 16 bits (`--activation-bits 16`) are qx = high + low / 256, two bytes with sums of their own:

    y[t, n]  = (float(S of high) + float(S of low) / 256) * (sx[t] * sw[n])
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LARGE_CHANNELS = 128
MAX_WEIGHT_RATIO, MAX_RATIO, MAX_UNSIGNED_RATIO = 256, 511, 255
"""In 16ths. S stays below 2^31: 32 * 16 * 128 * 127 * 127 and 16 * 16 * 128 * 255 * 127 are below 2^30."""
MIN_VALUE = 1e-5
"""Smallest channel maximum that a smoothing factor assumes."""
ALPHA, SQUARES_ALPHA = 0.5, 0.25
"""SmoothQuant's alpha: the share of an input's range that moves to the weights. Squares are those of ffn.value: few are
large, and a larger share would make the weights' steps too coarse."""
ROWS_AT_ONCE = 2048
"""outputs per fp32 temporary"""


class Codes(NamedTuple):
    """Quantised rows, of inputs or of a weight."""

    codes: Tensor
    """[R, K] s8 or u8, permuted; inputs in 16 bits are two rows each, high bytes first"""
    scales: Tensor
    """[R] fp32"""
    ratios: Tensor
    """[R] int32: segment 1's step is so many 16ths of segment 0's"""


class InputTransform(NamedTuple):
    """Scaling and order of a matrix's inputs before they are rounded."""

    factors: Tensor
    """[K] fp32 by channel"""
    positions: Tensor
    """[K] int32: where channel c's code is stored"""


def input_transform(x_max: Tensor, weight: Tensor, squares: bool = False) -> tuple[InputTransform, Tensor]:
    """Return the transform of a weight's inputs, and s [K].

    weight is [n, K]. x_max [K]: the largest calibrated inputs. squares: the inputs are those of ffn.value
    """
    alpha = SQUARES_ALPHA if squares else ALPHA
    weight_max = weight.abs().amax(0).float()
    s = x_max.float().clamp(min=MIN_VALUE).pow(alpha) / weight_max.clamp(min=MIN_VALUE).pow(1 - alpha)
    s = s.clamp(min=MIN_VALUE)
    return InputTransform(1 / s, permutation(x_max)), s


def permutation(x_max: Tensor) -> Tensor:
    """Return positions [K] int32. The 128 channels with the largest x_max come first; ties go to the lower channel."""
    k = x_max.numel()
    large = torch.zeros(k, dtype=torch.bool, device=x_max.device)
    large[torch.sort(x_max, descending=True, stable=True).indices[:LARGE_CHANNELS]] = True
    order = torch.cat([large.nonzero().flatten(), (~large).nonzero().flatten()])
    positions = torch.empty(k, dtype=torch.int32, device=x_max.device)
    positions[order] = torch.arange(k, dtype=torch.int32, device=x_max.device)
    return positions


def quantise(v: Tensor, max_ratio: int, unsigned: bool = False, bits: int = 8) -> Codes:
    """Quantise permuted rows [R, K] fp32 in 8 or 16 bits. A row with NaN or infinity gets a NaN scale."""
    largest, lowest = (255.0, 0.0) if unsigned else (127.0, -128.0)
    per_step = 2.0 ** (bits - 8)
    low_half = 0 if unsigned or bits == 8 else 128
    large, rest = v[:, :LARGE_CHANNELS], v[:, LARGE_CHANNELS:]
    zeros = torch.zeros(len(v), device=v.device)
    of_large = large.abs().amax(1)
    of_rest = rest.abs().amax(1) if rest.shape[1] else zeros
    is_finite = (of_large + of_rest).isfinite()
    unit = torch.maximum(of_rest, of_large * torch.tensor(16.0 / max_ratio, dtype=torch.float32, device=v.device))
    ratio = torch.where(unit > 0, ((of_large / unit) * 16).ceil().nan_to_num(16.0).clamp(16, max_ratio), zeros + 16)
    codes = []
    for part, step in ((large, unit * (ratio / 16)), (rest, unit)):
        inverse = torch.where(unit > 0, (zeros + largest) / step, zeros).clamp(max=3e38)
        steps = (part * inverse[:, None]).nan_to_num(0.0) * per_step
        codes.append(steps.round().clamp(lowest * per_step, largest * per_step))
    scales = unit * torch.tensor(1.0 / largest, dtype=torch.float32, device=v.device)
    scales = torch.where(is_finite, scales, torch.full_like(scales, torch.nan))
    joined, ratio = torch.cat(codes, 1).to(torch.int32), ratio.to(torch.int32)
    if bits == 16:
        joined = joined + low_half
        joined = torch.stack([joined >> 8, (joined & 255) - low_half], 1).flatten(0, 1)
        scales, ratio = scales.repeat_interleave(2), ratio.repeat_interleave(2)
    return Codes(joined.to(torch.uint8 if unsigned else torch.int8), scales, ratio)


def quantise_weight(weight: Tensor, s: Tensor, positions: Tensor) -> Codes:
    """Quantise W [n, K] of any float dtype; the columns of the codes are permuted. Raises ValueError for NaN."""
    parts = []
    for start in range(0, len(weight), ROWS_AT_ONCE):
        rows = weight[start : start + ROWS_AT_ONCE].float() * s
        parts.append(quantise(_permuted(rows, positions), MAX_WEIGHT_RATIO))
    codes = Codes(*(torch.cat(values) for values in zip(*parts, strict=True)))
    if not bool(codes.scales.isfinite().all()):
        raise ValueError("NaN or infinite weights cannot be quantised; use --dtype fp16")
    return codes


def quantise_rows(x: Tensor, transform: InputTransform, unsigned: bool = False, bits: int = 8) -> Codes:
    """Quantise inputs [T, K] of any float dtype. unsigned: they are never negative (ffn.value)."""
    v = _permuted(x.float() * transform.factors, transform.positions)
    return quantise(v, MAX_UNSIGNED_RATIO if unsigned else MAX_RATIO, unsigned, bits)


def product(x: Codes, w: Codes, bits: int = 8) -> Tensor:
    """Multiply codes [T, K] and [n, K] -> y [T, n] fp32.

    bits: of the first codes. Sums are whole numbers in fp64, below 2^53.
    """
    a, b = x.codes.double(), w.codes.double()
    large, rest = a[:, :LARGE_CHANNELS] @ b[:, :LARGE_CHANNELS].T, a[:, LARGE_CHANNELS:] @ b[:, LARGE_CHANNELS:].T
    sums = (large * (x.ratios.double()[:, None] * w.ratios.double()) / 256).floor() + rest
    y, scales = sums.float(), x.scales
    if bits == 16:
        y, scales = y[::2] + y[1::2] / 256, scales[::2]
    return y * (scales[:, None] * w.scales)


def _permuted(rows: Tensor, positions: Tensor) -> Tensor:
    permuted = torch.empty_like(rows)
    permuted[:, positions.long()] = rows
    return permuted
