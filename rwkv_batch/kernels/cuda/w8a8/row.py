"""W8A8 GEMMs of one row, which the launch quantises; fp16 GEMMs in the same launch (csrc/skinny/hopper_row.cu)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rwkv_batch.kernels.cuda.hopper_gemm import has_hopper_gemm
from rwkv_batch.kernels.cuda.library import (
    MAX_GEMMS,
    NormMixArgs,
    QuantGemmArgs,
    QuantLaunchArgs,
    cuda_pointer,
    hopper_library,
)
from rwkv_batch.kernels.cuda.linear import Gemm
from rwkv_batch.kernels.cuda.skinny_quant import MAX_ROW_INPUTS, fill_fp16_gemm
from rwkv_batch.kernels.cuda.w8a8.products import W8A8Weights

FORMAT_NUMBER = 4
"""W8A8 in csrc/quant.cuh."""


class RowGemm(NamedTuple):
    """One GEMM of a launch: y = x @ W^T."""

    weights: W8A8Weights
    x: Tensor
    """[1, K] fp16; with `norm` the mix weight of the input"""
    y: Tensor
    """[1, n] fp16, or fp32 with the same values"""


def fits_row(weights: W8A8Weights) -> bool:
    """Whether `multiply_row` takes a matrix."""
    return has_hopper_gemm(weights.codes.device) and weights.shape[1] <= MAX_ROW_INPUTS


def multiply_row(gemms: Sequence[RowGemm], fp16_gemms: Sequence[Gemm] = (), norm: NormMixArgs | None = None) -> None:
    """Run up to 8 GEMMs of one row.

    norm: what the row is computed from. Raises ValueError for more GEMMs, or for shapes that do not match.
    """
    count = len(gemms) + len(fp16_gemms)
    if count > MAX_GEMMS:
        raise ValueError(f"a launch takes {MAX_GEMMS} GEMMs, not {count}")
    args = QuantLaunchArgs(count=count, rows=1, format=FORMAT_NUMBER)
    if norm is not None:
        args.norm = norm
    # Halves first: they are twice the bytes of an output, and would be what a launch waits for at its end.
    for slot, half in zip(args.gemms[: len(fp16_gemms)], fp16_gemms, strict=True):
        fill_fp16_gemm(slot, half, rows=1)
    for slot, m in zip(args.gemms[len(fp16_gemms) : count], gemms, strict=True):
        _fill(slot, m)
    hopper_library().call("rwkv_hopper_row", ctypes.byref(args))


def _fill(slot: QuantGemmArgs, m: RowGemm) -> None:
    """Fill one GEMM. Raises ValueError for tensors that do not match."""
    n, k = m.weights.shape
    if m.x.shape != (1, k) or m.y.shape != (1, n):
        raise ValueError(f"[{n}, {k}], {tuple(m.x.shape)}, {tuple(m.y.shape)} do not fit each other")
    slot.qweight, slot.scales = cuda_pointer(m.weights.codes, torch.int8), cuda_pointer(m.weights.scales, torch.float32)
    slot.x, slot.y = cuda_pointer(m.x), cuda_pointer(m.y, m.y.dtype)
    slot.n, slot.k, slot.ld_y, slot.out_fp32 = n, k, n, m.y.dtype == torch.float32
    slot.weight_ratios = cuda_pointer(m.weights.ratios, torch.int32)
    slot.factors = cuda_pointer(m.weights.factors, torch.float32)
    slot.order = cuda_pointer(m.weights.order, torch.int16)
