"""Products of up to 256 rows of halves with weights of 8 or 4 bits on Hopper's tensor cores (csrc/wide_codes.cuh)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rwkv_batch.kernels.activation import Activation
from rwkv_batch.kernels.cuda.hopper_gemm import (
    GemmShape,
    has_hopper_gemm,
    is_mps_active,
    launch_hopper_kernel,
    plan_hopper_gemm,
    prepare_hopper_gemm,
)
from rwkv_batch.kernels.cuda.library import MAX_MAPS, WideCodesArgs, cuda_pointer
from rwkv_batch.model.quant.formats import Format

TILE_K = 128
TILE_ROWS = (32, 64, 128, 256)
"""Tiles of rows there are kernels for; one tile holds all rows of a launch."""
MAX_WEIGHT_ONLY_ROWS = TILE_ROWS[-1]


@dataclass(slots=True)
class WeightOnlyGemm:
    """One map of a launch: y = activation(x @ W.T); x [rows, k] fp16, y [rows, n] fp16 or fp32."""

    format: Format | None
    """None: halves, [n, k]"""
    transposed: bool
    n: int
    k: int
    codes: Tensor
    """of W [n, k], or [k, n] if transposed"""
    scales: Tensor | None
    x: Tensor
    y: Tensor
    activation: Activation = Activation.NONE


def fp16_gemm(weight: Tensor, x: Tensor, y: Tensor, activation: Activation = Activation.NONE) -> WeightOnlyGemm:
    """A weight [n, k] of fp16 beside those in codes."""
    return WeightOnlyGemm(None, False, weight.shape[0], weight.shape[1], weight, None, x, y, activation)


def fits_weight_only(rows: int, n: int, k: int, device: torch.device) -> bool:
    """Whether the kernel multiplies so many rows by [n, k]."""
    return rows <= MAX_WEIGHT_ONLY_ROWS and k % TILE_K == 0 and n % 32 == 0 and has_hopper_gemm(device)


def launch_weight_only(maps: Sequence[WeightOnlyGemm]) -> None:
    """Up to 8 maps over the same rows, where `fits_weight_only` lets them: of halves, and of one format and order.

    Raises ValueError for more maps or rows, or shapes that do not fit each other.
    """
    first = next(m for m in maps if m.format is not None)
    rows, device = first.x.shape[0], first.x.device
    if len(maps) > MAX_MAPS or rows > MAX_WEIGHT_ONLY_ROWS:
        raise ValueError(f"a launch takes {MAX_MAPS} maps of {MAX_WEIGHT_ONLY_ROWS} rows, not {len(maps)} of {rows}")
    work = prepare_hopper_gemm(device)
    args = WideCodesArgs(count=len(maps), rows=rows, transposed=first.transposed)
    for slot, m in zip(args.maps, maps, strict=False):
        same = m.format is None or (m.format, m.transposed) == (first.format, first.transposed)
        if not same or m.x.shape != (rows, m.k) or m.y.shape != (rows, m.n):
            raise ValueError(f"{m.format} [{m.n}, {m.k}], {tuple(m.x.shape)}, {tuple(m.y.shape)} do not fit together")
        slot.codes, slot.scales = m.codes.data_ptr(), None if m.scales is None else m.scales.data_ptr()
        slot.x, slot.y = cuda_pointer(m.x), cuda_pointer(m.y, m.y.dtype)
        slot.n, slot.k, slot.activation, slot.float_out = m.n, m.k, m.activation, m.y.dtype == torch.float32
    shapes = tuple(GemmShape(m.n, m.k) for m in maps)
    plan = plan_hopper_gemm(rows, shapes, len(work.partial), not is_mps_active(), TILE_K, TILE_ROWS)
    launch_hopper_kernel(f"rwkv_wide_codes_{first.format}", args, plan, work)
