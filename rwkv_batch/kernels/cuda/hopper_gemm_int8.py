"""int8 weights times two-byte rows on Hopper's tensor cores (csrc/gemm/gemm_int8.cuh)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rwkv_batch.kernels.cuda.hopper_gemm import Fp16Gemm, GemmShape, prepare_hopper_gemm
from rwkv_batch.kernels.cuda.hopper_quantised_launch import (
    MAX_TWO_PART_ROWS,
    check_counts,
    launch_quantised,
    num_splits,
    plan_two_part,
)
from rwkv_batch.kernels.cuda.library import Int8GemmArgs, Int8LaunchArgs, cuda_pointer

INT8_DTYPE = torch.int8
INT8_GROUP = 128
"""Inputs of a row that share a scale; for the output of the WKV a head's."""
GROUPS = (1, 2)
"""Scales of a row per scale of the weights."""


class Int8Gemm(NamedTuple):
    """One int8 GEMM of a launch."""

    weight: Tensor
    """[n, k] uint8, offset by 128; or [k, n]"""
    weight_scales: Tensor
    """[k / 128, n] fp16"""
    x: Tensor
    """[rows, 2, k] int8: x = scale * (256 * x[:, 0] + x[:, 1])"""
    x_scales: Tensor
    """[k / 128 or 64, pitch, 2] fp32: scale, and -128 * scale * sum of the integers; pitch: `pitch_of` the rows"""
    y: Tensor
    """[rows, n] fp16, or as x; for a single GEMM also [`num_splits`, rows, n] fp32 split-K partials"""
    y_scales: Tensor | None
    """[n / 128, pitch, 2] as x_scales, if y is as x; else None"""
    activation: int
    transposed: bool = False
    """whether the weight is [k, n]: a single GEMM, x with a scale per 128 inputs, y not as x"""


def pitch_of(rows: int) -> int:
    """Returns the row pitch of scales: rows, rounded up to even, because a copy moves 16 bytes."""
    return rows + rows % 2


def launch_hopper_int8(
    gemms: Sequence[Int8Gemm], fp16_gemms: Sequence[Fp16Gemm] = (), dependent: Sequence[Fp16Gemm] = ()
) -> None:
    """Runs up to 12 GEMMs over the same two-byte rows.

    `fits_two_part_gemm` must allow them.
    fp16_gemms: fp16 GEMMs that `fits_fp16_gemms` allows in the launch; dependent: fp16 GEMMs that read their outputs.
    Raises ValueError for too many GEMMs or rows, or for shapes that do not match.
    """
    first = gemms[0]
    rows, transposed, to_partials = len(first.x), first.transposed, first.y.dtype == torch.float32
    count = len(gemms) + len(fp16_gemms) + len(dependent)
    check_counts(count, rows, MAX_TWO_PART_ROWS, to_partials)
    work = prepare_hopper_gemm(first.x.device)
    groups = len(first.x_scales) * INT8_GROUP // first.weight.shape[not transposed]
    args = Int8LaunchArgs(
        count=count, dependent=len(dependent), rows=rows, pitch=pitch_of(rows), groups=groups, transposed=transposed
    )
    args.to_partials = to_partials
    placed = zip(args.gemms, gemms, strict=False)
    shapes = tuple(_fill_gemm(slot, m, args, work.num_sms) for slot, m in placed)
    plan = plan_two_part(rows, shapes, work.num_sms)
    launch_quantised(
        "rwkv_gemm_int8_transposed" if transposed else "rwkv_gemm_int8", args, shapes, fp16_gemms, dependent, plan, work
    )


def _fill_gemm(slot: Int8GemmArgs, m: Int8Gemm, args: Int8LaunchArgs, num_sms: int) -> GemmShape:
    """Fills one GEMM of a launch. Raises ValueError for tensors that do not match."""
    n, k = reversed(m.weight.shape) if m.transposed else m.weight.shape
    rows, pitch, in_bytes = args.rows, args.pitch, m.y_scales is not None
    made: tuple[int, ...] = (rows, 2, n) if in_bytes else (rows, n)
    if args.to_partials:
        made = (num_splits(rows, n, k, num_sms), rows, n)
    fits = m.x.shape == (rows, 2, k) and m.y.shape == made and args.groups in GROUPS
    scaled = m.weight_scales.shape == (k // 128, n) and m.x_scales.shape == (k // INT8_GROUP * args.groups, pitch, 2)
    if args.transposed:
        fits = fits and args.count == 1 and args.groups == 1 and not in_bytes
    if m.y_scales is not None:
        scaled = scaled and n % INT8_GROUP == 0 and m.y_scales.shape == (n // INT8_GROUP, pitch, 2)
    if not fits or not scaled:
        raise ValueError(
            f"shapes {tuple(m.weight.shape)}, {tuple(m.x.shape)}, {tuple(m.y.shape)} or their scales do not fit"
        )
    slot.weight, slot.x = cuda_pointer(m.weight, torch.uint8), cuda_pointer(m.x, INT8_DTYPE)
    slot.y = cuda_pointer(m.y, INT8_DTYPE if in_bytes else torch.float32 if args.to_partials else torch.float16)
    slot.weight_scales = cuda_pointer(m.weight_scales)
    slot.input_scales = cuda_pointer(m.x_scales, torch.float32)
    slot.y_scales = cuda_pointer(m.y_scales, torch.float32)
    slot.n, slot.k, slot.activation = n, k, m.activation
    return GemmShape(n, k)
