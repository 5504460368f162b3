"""Products of rows in two bytes with int8 weights on Hopper's tensor cores (csrc/wide_int8.cuh)."""

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
from rwkv_batch.kernels.cuda.library import WideInt8Args, WideInt8Map, cuda_pointer

INT8_DTYPE = torch.int8
INT8_GROUP = 128
"""Inputs of a row that share a scale; of what the WKV makes a head's."""
GROUPS = (1, 2)
"""Scales of a row for as many inputs as share one of the weights."""


class Int8Gemm(NamedTuple):
    """One map of a launch."""

    weight: Tensor
    """[n, k] uint8, 128 added; or [k, n]"""
    weight_scales: Tensor
    """[k / 128, n] fp16"""
    x: Tensor
    """[rows, 2, k] int8: 256 times the first and the second are a whole number, which is multiplied by its scale"""
    x_scales: Tensor
    """[k / 128 or 64, pitch, 2] fp32: a scale, and -128 times it times the numbers' sum; pitch: `pitch_of` the rows"""
    y: Tensor
    """[rows, n] fp16, or as x, or of a map alone [`num_splits`, rows, n] fp32: their sum, of shares of k, is meant"""
    y_scales: Tensor | None
    """[n / 128, pitch, 2] as x_scales, of results as x; None: others"""
    activation: int
    turned: bool = False
    """whether the weight is [k, n]: of a map alone, x with a scale for 128 inputs, y not as x"""


def pitch_of(rows: int) -> int:
    """Places for scales of so many rows beside each other, in pairs: a copy moves 16 bytes."""
    return rows + rows % 2


def launch_hopper_int8(
    maps: Sequence[Int8Gemm], halves: Sequence[Fp16Gemm] = (), late: Sequence[Fp16Gemm] = ()
) -> None:
    """Up to 12 maps over the same rows, where `fits_two_part_gemm` says that it can be done.

    `halves`: maps of as many rows of fp16 that `fits_fp16_gemms` lets into the launch; `late`: maps of fp16 whose
    inputs are the results of these. Raises ValueError for more maps or rows, or shapes that do not fit each other.
    """
    first = maps[0]
    rows, turned, to_shares = len(first.x), first.turned, first.y.dtype == torch.float32
    count = len(maps) + len(halves) + len(late)
    check_counts(count, rows, MAX_TWO_PART_ROWS, to_shares)
    work = prepare_hopper_gemm(first.x.device)
    groups = len(first.x_scales) * INT8_GROUP // first.weight.shape[not turned]
    args = WideInt8Args(count=count, late=len(late), rows=rows, pitch=pitch_of(rows), groups=groups, turned=turned)
    args.to_shares = to_shares
    placed = zip(args.maps, maps, strict=False)
    shapes = tuple(_fill_gemm(slot, m, args, len(work.partial)) for slot, m in placed)
    plan = plan_two_part(rows, shapes, len(work.partial))
    launch_quantised("rwkv_wide_int8_turned" if turned else "rwkv_wide_int8", args, shapes, halves, late, plan, work)


def _fill_gemm(slot: WideInt8Map, m: Int8Gemm, args: WideInt8Args, num_sms: int) -> GemmShape:
    """A map into its place in a launch. Raises ValueError for tensors that do not fit each other, or its other maps."""
    n, k = reversed(m.weight.shape) if m.turned else m.weight.shape
    rows, pitch, in_bytes = args.rows, args.pitch, m.y_scales is not None
    made: tuple[int, ...] = (rows, 2, n) if in_bytes else (rows, n)
    if args.to_shares:
        made = (num_splits(rows, n, k, num_sms), rows, n)
    fits = m.x.shape == (rows, 2, k) and m.y.shape == made and args.groups in GROUPS
    scaled = m.weight_scales.shape == (k // 128, n) and m.x_scales.shape == (k // INT8_GROUP * args.groups, pitch, 2)
    if args.turned:
        fits = fits and args.count == 1 and args.groups == 1 and not in_bytes
    if m.y_scales is not None:
        scaled = scaled and n % INT8_GROUP == 0 and m.y_scales.shape == (n // INT8_GROUP, pitch, 2)
    if not fits or not scaled:
        raise ValueError(
            f"shapes {tuple(m.weight.shape)}, {tuple(m.x.shape)}, {tuple(m.y.shape)} or their scales do not fit"
        )
    slot.weight, slot.x = cuda_pointer(m.weight, torch.uint8), cuda_pointer(m.x, INT8_DTYPE)
    slot.y = cuda_pointer(m.y, INT8_DTYPE if in_bytes else torch.float32 if args.to_shares else torch.float16)
    slot.weight_scales = cuda_pointer(m.weight_scales)
    slot.input_scales = cuda_pointer(m.x_scales, torch.float32)
    slot.y_scales = cuda_pointer(m.y_scales, torch.float32)
    slot.n, slot.k, slot.activation = n, k, m.activation
    return GemmShape(n, k)
