"""8- and 4-bit weights times fp16 rows on Hopper's tensor cores.

At most 256 rows. The kernel is csrc/weight_only/weight_only.cuh.
"""

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
from rwkv_batch.kernels.cuda.library import MAX_GEMMS, WeightOnlyLaunchArgs, cuda_pointer
from rwkv_batch.model.quant.formats import Format

TILE_K = 128
TILE_ROWS = (32, 64, 128, 256)
"""Compiled tile sizes; one tile holds all rows of a launch."""
MAX_WEIGHT_ONLY_ROWS = TILE_ROWS[-1]


@dataclass(slots=True)
class WeightOnlyGemm:
    """One GEMM of a launch: y = activation(x @ W.T); x [rows, k] fp16, y [rows, n] fp16 or fp32."""

    format: Format | None
    """None: fp16 [n, k]"""
    transposed: bool
    n: int
    k: int
    codes: Tensor
    """quantised W [n, k], or [k, n] if transposed"""
    scales: Tensor | None
    x: Tensor
    y: Tensor
    activation: Activation = Activation.NONE


def fp16_gemm(weight: Tensor, x: Tensor, y: Tensor, activation: Activation = Activation.NONE) -> WeightOnlyGemm:
    """Returns an fp16 GEMM for a launch with quantised ones. weight: [n, k]"""
    return WeightOnlyGemm(None, False, weight.shape[0], weight.shape[1], weight, None, x, y, activation)


def fits_weight_only(rows: int, n: int, k: int, device: torch.device) -> bool:
    """Whether the kernel takes so many rows times [n, k]."""
    return rows <= MAX_WEIGHT_ONLY_ROWS and k % TILE_K == 0 and n % 32 == 0 and has_hopper_gemm(device)


def launch_weight_only(gemms: Sequence[WeightOnlyGemm]) -> None:
    """Runs up to 8 GEMMs over the same rows: fp16, and one format and order (`fits_weight_only`).

    Raises ValueError for too many GEMMs or rows, or for shapes that do not match.
    """
    first = next(m for m in gemms if m.format is not None)
    rows, device = first.x.shape[0], first.x.device
    if len(gemms) > MAX_GEMMS or rows > MAX_WEIGHT_ONLY_ROWS:
        raise ValueError(f"a launch takes {MAX_GEMMS} GEMMs of {MAX_WEIGHT_ONLY_ROWS} rows, not {len(gemms)} of {rows}")
    work = prepare_hopper_gemm(device)
    args = WeightOnlyLaunchArgs(count=len(gemms), rows=rows, transposed=first.transposed)
    for slot, m in zip(args.gemms, gemms, strict=False):
        same = m.format is None or (m.format, m.transposed) == (first.format, first.transposed)
        if not same or m.x.shape != (rows, m.k) or m.y.shape != (rows, m.n):
            raise ValueError(f"{m.format} [{m.n}, {m.k}], {tuple(m.x.shape)}, {tuple(m.y.shape)} do not fit together")
        slot.qweight, slot.scales = m.codes.data_ptr(), None if m.scales is None else m.scales.data_ptr()
        slot.x, slot.y = cuda_pointer(m.x), cuda_pointer(m.y, m.y.dtype)
        slot.n, slot.k, slot.activation, slot.out_fp32 = m.n, m.k, m.activation, m.y.dtype == torch.float32
    shapes = tuple(GemmShape(m.n, m.k) for m in gemms)
    plan = plan_hopper_gemm(rows, shapes, work.num_sms, not is_mps_active(), TILE_K, TILE_ROWS)
    launch_hopper_kernel(f"rwkv_weight_only_{first.format}", args, plan, work)
