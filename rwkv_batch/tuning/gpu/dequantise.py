"""A Triton kernel that dequantises int8 and fp8 matrices."""

from __future__ import annotations

from typing import TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from rwkv_batch.model.quant.formats import Format, Quantised
from rwkv_batch.model.quant.w8a8 import LARGE_CHANNELS

Arg: TypeAlias = tl.tensor
_BLOCK = 2048
_LARGE = tl.constexpr(LARGE_CHANNELS)


@triton.jit
def _dequantise_kernel(
    codes: Arg, scales: Arg, ratios: Arg, positions: Arg, factors: Arg, output: Arg, inner: Arg,
    is_int8: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    """Write a part of a row. The arguments are the fields of `Quantised`; output: [out, in]."""
    row = tl.program_id(0)
    start = row.to(tl.int64) * inner
    column = tl.program_id(1) * block + tl.arange(0, block)
    mask = column < inner
    step = tl.load(scales + row)
    if is_int8:
        position = tl.load(positions + column, mask, 0)
        large = step * (tl.load(ratios + row).to(tl.float32) / 16)
        value = tl.load(codes + start + position, mask).to(tl.float32) * tl.where(position < _LARGE, large, step)
        value = value * tl.load(factors + column, mask)
    else:
        value = tl.load(codes + start + column, mask).to(tl.float32) * step
    tl.store(output + start + column, value.to(output.dtype.element_ty), mask)


def dequantised_on_gpu(stored: Quantised, dtype: torch.dtype) -> Tensor:
    """Return the matrix [out, in], as `model.quant.formats.dequantise` does."""
    out, inner = stored.codes.shape
    output = torch.empty(out, inner, dtype=dtype, device=stored.codes.device)
    transform = stored.transform
    positions, factors = (stored.scales, stored.scales) if transform is None else transform[::-1]
    grid = (out, triton.cdiv(inner, _BLOCK))
    _dequantise_kernel[grid](
        stored.codes, stored.scales, stored.scales if stored.ratios is None else stored.ratios, positions, factors,
        output, inner, stored.format is Format.W8A8, _BLOCK, num_warps=8,
    )  # fmt: skip
    return output
