"""Products of rows in two bytes with int8 weights on Hopper's tensor cores (csrc/wide_int8.cuh)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rwkv_batch.kernels.cuda.library import MAX_WIDE_MAPS, WideInt8Args, cuda_pointer, hopper_library
from rwkv_batch.kernels.cuda.wide import (
    FP8_DEPTH,
    HALF_SPLITS,
    MAX_PARTS_ROWS,
    PARTS_TILE_ROWS,
    HalfMap,
    WideShape,
    fits_halves_beside,
    num_shares,
    place_halves,
    plan_wide,
    prepare_wide,
    shares_processors,
)

BYTES = torch.int8
BYTES_GROUP = 128
"""Inputs of a row that share a scale; of what the WKV makes a head's."""
GROUPS = (1, 2)
"""Scales of a row for as many inputs as share one of the weights."""


class Int8Map(NamedTuple):
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
    """[rows, n] fp16, or as x, or of a map alone [`num_shares`, rows, n] fp32: their sum, of shares of k, is meant"""
    y_scales: Tensor | None
    """[n / 128, pitch, 2] as x_scales, of results as x; None: others"""
    activation: int
    turned: bool = False
    """whether the weight is [k, n]: of a map alone, x with a scale for 128 inputs, y not as x"""


def pitch_of(rows: int) -> int:
    """Places for scales of so many rows beside each other, in pairs: a copy moves 16 bytes."""
    return rows + rows % 2


def launch_wide_int8(maps: Sequence[Int8Map], halves: Sequence[HalfMap] = (), late: Sequence[HalfMap] = ()) -> None:
    """Up to 12 maps over the same rows, where `fits_wide_parts` says that it can be done.

    `halves`: maps of as many rows of fp16 that `fits_halves_beside` lets into the launch; `late`: maps of fp16 whose
    inputs are the results of these. Raises ValueError for more maps or rows, or shapes that do not fit each other.
    """
    rows, device = len(maps[0].x), maps[0].x.device
    count = len(maps) + len(halves) + len(late)
    if count > MAX_WIDE_MAPS or rows > MAX_PARTS_ROWS:
        raise ValueError(f"a launch takes {MAX_WIDE_MAPS} maps of {MAX_PARTS_ROWS} rows, not {count} of {rows}")
    work, pitch, to_shares = prepare_wide(device), pitch_of(rows), maps[0].y.dtype == torch.float32
    if to_shares and count > 1:
        raise ValueError(f"a launch whose results are shares takes one map, not {count}")
    turned = maps[0].turned
    groups = len(maps[0].x_scales) * BYTES_GROUP // maps[0].weight.shape[not turned]
    args = WideInt8Args(count=count, late=len(late), rows=rows, pitch=pitch, groups=groups, to_shares=to_shares)
    args.turned = turned
    shapes = []
    for slot, m in zip(args.maps, maps, strict=False):
        n, k = reversed(m.weight.shape) if m.turned else m.weight.shape
        in_bytes = m.y_scales is not None
        made = (rows, 2, n) if in_bytes else (rows, n)
        if to_shares:
            made = (num_shares(rows, n, k, len(work.partial)), rows, n)
        fits = m.x.shape == (rows, 2, k) and m.y.shape == made and groups in GROUPS
        scaled = m.weight_scales.shape == (k // 128, n) and m.x_scales.shape == (k // BYTES_GROUP * groups, pitch, 2)
        if turned:
            fits = fits and count == 1 and groups == 1 and not in_bytes
        if m.y_scales is not None:
            scaled = scaled and n % BYTES_GROUP == 0 and m.y_scales.shape == (n // BYTES_GROUP, pitch, 2)
        if not fits or not scaled:
            raise ValueError(
                f"shapes {tuple(m.weight.shape)}, {tuple(m.x.shape)}, {tuple(m.y.shape)} or their scales do not fit"
            )
        slot.weight, slot.x = cuda_pointer(m.weight, torch.uint8), cuda_pointer(m.x, BYTES)
        slot.y = cuda_pointer(m.y, BYTES if in_bytes else torch.float32 if to_shares else torch.float16)
        slot.weight_scales = cuda_pointer(m.weight_scales)
        slot.input_scales = cuda_pointer(m.x_scales, torch.float32)
        slot.y_scales = cuda_pointer(m.y_scales, torch.float32)
        slot.n, slot.k, slot.activation = n, k, m.activation
        shapes.append(WideShape(n, k))
    beside = [WideShape(*weight.shape) for weight, _, _, _ in halves]
    if beside and not fits_halves_beside(rows, shapes, beside, len(work.partial)):
        raise ValueError(f"halves {beside} do not fit beside codes {shapes} of {rows} rows")
    place_halves(args.maps[len(maps) : count], (*halves, *late), rows)
    plan = plan_wide(rows, tuple(shapes), len(work.partial), not shares_processors(), FP8_DEPTH, PARTS_TILE_ROWS)
    args.tile_rows, args.splits = plan.tile_rows, HALF_SPLITS if halves else plan.splits
    args.partial, args.counters = work.partial.data_ptr(), work.counters.data_ptr()
    hopper_library().call("rwkv_wide_int8_turned" if turned else "rwkv_wide_int8", ctypes.byref(args))
