"""Products of fp8 codes with fp8 weights, and of rows in two parts, on Hopper's tensor cores (csrc/wide_fp8.cuh).

Weights [n, k] take up to 640 rows, [k, n] up to 4,096; rows in two parts are 64 at most.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rwkv_batch.kernels.cuda.hopper_gemm import (
    LARGEST_TILE,
    TILE_N,
    Fp16Gemm,
    GemmShape,
    Plan,
    has_hopper_gemm,
    is_mps_active,
    plan_hopper_gemm,
    prepare_hopper_gemm,
)
from rwkv_batch.kernels.cuda.hopper_quantised_launch import (
    MAX_TWO_PART_ROWS,
    QUANTISED_TILE_K,
    check_counts,
    launch_quantised,
    num_splits,
    plan_two_part,
)
from rwkv_batch.kernels.cuda.library import WideFp8Args, WideFp8Map, cuda_pointer

FP8_DTYPE = torch.float8_e4m3fn
TWO_PART_DTYPE = torch.float8_e5m2
FP8_TILE_ROWS = (32, 64, 96, 128, 160, 192, 224, 256, LARGEST_TILE)
FP32_TILE_ROWS = (96, 128, 160, 192, LARGEST_TILE)
"""The same where results are fp32; from 193 to 256 rows, which fill two of cuBLAS's tiles, that is faster."""
CUBLAS_ROWS = range(321, 513)
MAX_FP8_ROWS = 640
"""Of weights [n, k]: up to 320 rows are a tile, more are two; where these are not full, cuBLAS is faster."""
MAX_COLUMNS = 256
"""Of a product: a tile of more rows is two products of half of them."""
TRANSPOSED_TILE_ROWS = (96, 128, 160, 192, 224, 240, 256, LARGEST_TILE)
"""Of weights [k, n]."""
MAX_TRANSPOSED_ROWS = 4096
"""Of weights [k, n]: for more, cuBLAS is given them turned."""
CYCLES_PER_ROW = 4
"""In which a processor multiplies 128 inputs of a row by 128 outputs in fp8."""
BYTES_PER_CYCLE = 50
"""That a processor brings in where all do, out of L2: what times of tiles of 128 to 320 rows amount to."""
HALVED_ROWS = 256
"""Of more, blocks that would share a tile's k by four have half its rows, by two (`plan_fp8`)."""


class Fp8Gemm(NamedTuple):
    """One map of a launch over fp8 codes."""

    weight: Tensor
    """[n, k] e4m3"""
    weight_scales: Tensor
    """[n] fp32"""
    x: Tensor
    """[rows, k] e4m3, or in two parts [rows, 2, k] e5m2: their sum, the second an eighth"""
    x_scales: Tensor | None
    """[rows] fp32; None: of parts"""
    y: Tensor
    """[rows, n] fp16, or fp32 of all maps of a launch; of inputs in parts also [rows, 2, n] e5m2, or of a map alone
    [`num_splits`, rows, n] fp32: their sum, of shares of k, is meant"""
    activation: int
    turned: bool = False
    """whether the weight is [k, n]"""


def fits_hopper_fp8(rows: int, n: int, k: int, device: torch.device, turned: bool = False) -> bool:
    """Whether the kernel of fp8 codes multiplies so many rows by [n, k]; `turned`: stored as [k, n]."""
    cublas_rows = () if turned else CUBLAS_ROWS
    worth_it = rows <= (MAX_TRANSPOSED_ROWS if turned else MAX_FP8_ROWS) and rows not in cublas_rows
    return worth_it and k % QUANTISED_TILE_K == 0 and n % 16 == 0 and has_hopper_gemm(device)


def hopper_fp8_returns_fp32(rows: int, n: int, k: int, device: torch.device) -> bool:
    """Whether it does so with results in fp32: of as many tiles as leave no processor idle, on which k is not split."""
    if rows > FP32_TILE_ROWS[-1] or not fits_hopper_fp8(rows, n, k, device):
        return False
    tile_rows = next(size for size in FP32_TILE_ROWS if size >= rows)
    return tile_rows - rows < 64 and n // TILE_N >= len(prepare_hopper_gemm(device).partial)


@functools.cache
def plan_fp8(rows: int, shapes: tuple[GemmShape, ...], num_sms: int, co_resident: bool = True) -> Plan:
    """As `plan_hopper_gemm`, of fp8 codes, whose rows may be several tiles.

    Four blocks that share a tile's k exchange three quarters of its sums; two tiles of half the rows, each shared by
    two blocks, exchange half of them, and read W twice. That is faster from 257 rows on only (docs/notebook.md).
    """
    blocks = -(-rows // FP8_TILE_ROWS[-1])
    plan = plan_hopper_gemm(-(-rows // blocks), shapes, num_sms // blocks, co_resident, QUANTISED_TILE_K, FP8_TILE_ROWS)
    if plan.splits == 4 and rows > HALVED_ROWS:
        plan = Plan(next(size for size in FP8_TILE_ROWS if 2 * size >= rows), 2)
    return plan


@functools.cache
def plan_transposed(rows: int, shapes: tuple[GemmShape, ...], num_sms: int, co_resident: bool = True) -> Plan:
    """As `plan_fp8` of codes [k, n]; beyond 320 rows the quickest by what a processor multiplies and brings in.

    Of equals the tallest tile. k of a tile is shared by blocks only where all run at once.
    """
    if rows <= FP8_TILE_ROWS[-1]:
        return plan_fp8(rows, shapes, num_sms, co_resident)
    tiles = sum(-(-shape.n // TILE_N) for shape in shapes)

    def cost(plan: Plan) -> tuple[float, int]:
        units = -(-rows // plan.tile_rows) * tiles * plan.splits
        step_cycles = max(
            plan.tile_rows * CYCLES_PER_ROW, (TILE_N + plan.tile_rows) * QUANTISED_TILE_K / BYTES_PER_CYCLE
        )
        return -(-units // num_sms) * step_cycles / plan.splits, -plan.tile_rows

    # a tile of more columns than a product has is two products: one that begins behind the last row would be idle
    row_blocks = {
        size: -(-rows // size) for size in TRANSPOSED_TILE_ROWS if size <= MAX_COLUMNS or (rows - 1) % size >= size // 2
    }
    plans = (
        plan_hopper_gemm(size, shapes, num_sms // blocks, co_resident, QUANTISED_TILE_K, (size,))
        for size, blocks in row_blocks.items()
    )
    return min(plans, key=cost)


def launch_hopper_fp8(maps: Sequence[Fp8Gemm], halves: Sequence[Fp16Gemm] = (), late: Sequence[Fp16Gemm] = ()) -> None:
    """Up to 12 maps over the same number of rows of fp8 codes, where `fits_hopper_fp8` says that it can be done.

    Or of rows in two parts, where `fits_two_part_gemm` does.

    `halves`: maps of as many rows of fp16 that `fits_fp16_gemms` lets into the launch; `late`: maps of fp16 whose
    inputs are the results of these. Raises ValueError for more maps or rows, or shapes that do not fit each other.
    """
    first = maps[0]
    rows, parts, to_floats = len(first.x), first.x_scales is None, first.y.dtype == torch.float32
    count = len(maps) + len(halves) + len(late)
    most_rows = MAX_TRANSPOSED_ROWS if first.turned else MAX_FP8_ROWS
    if parts or to_floats:
        most_rows = MAX_TWO_PART_ROWS if parts else FP32_TILE_ROWS[-1]
    check_counts(count, rows, most_rows, to_shares=parts and to_floats)
    work = prepare_hopper_gemm(first.x.device)
    args = WideFp8Args(count=count, late=len(late), rows=rows, turned=first.turned, to_floats=to_floats)
    args.to_shares = parts and to_floats
    placed = zip(args.maps, maps, strict=False)
    shapes = tuple(_fill_gemm(slot, m, first, len(work.partial)) for slot, m in placed)
    plan = _plan(first, shapes, len(work.partial))
    name = "rwkv_wide_parts" if parts else "rwkv_wide_fp8_turned" if first.turned else "rwkv_wide_fp8"
    launch_quantised(name, args, shapes, halves, late, plan, work)


def _fill_gemm(slot: WideFp8Map, m: Fp8Gemm, first: Fp8Gemm, num_sms: int) -> GemmShape:
    """A map into its place in a launch with `first`. Raises ValueError for tensors that do not fit each other."""
    n, k = reversed(m.weight.shape) if m.turned else m.weight.shape
    rows, parts, dtype = len(first.x), first.x_scales is None, first.y.dtype
    made: tuple[int, ...] = (rows, n)
    if parts and dtype == torch.float32:
        made = (num_splits(rows, n, k, num_sms), rows, n)
    elif m.y.dtype == TWO_PART_DTYPE:
        made = (rows, 2, n)
    given = (rows, 2, k) if parts else (rows, k)
    scaled = m.x_scales is None if parts else m.x_scales is not None and m.x_scales.shape == (rows,)
    if m.x.shape != given or m.y.shape != made or not scaled or (m.y.dtype == TWO_PART_DTYPE and not parts):
        raise ValueError(f"shapes {tuple(m.weight.shape)}, {tuple(m.x.shape)}, {tuple(m.y.shape)} do not fit together")
    slot.weight, slot.x = cuda_pointer(m.weight, FP8_DTYPE), cuda_pointer(m.x, TWO_PART_DTYPE if parts else FP8_DTYPE)
    slot.y, slot.in_parts = cuda_pointer(m.y, m.y.dtype if parts else dtype), m.y.dtype == TWO_PART_DTYPE
    slot.weight_scales = m.weight_scales.data_ptr()
    slot.input_scales = None if m.x_scales is None else m.x_scales.data_ptr()
    slot.n, slot.k, slot.activation = n, k, m.activation
    return GemmShape(n, k)


def _plan(first: Fp8Gemm, shapes: tuple[GemmShape, ...], num_sms: int) -> Plan:
    """Of a launch of `first` and others like it."""
    rows, co_resident = len(first.x), not is_mps_active()
    if first.x_scales is None:
        return plan_two_part(rows, shapes, num_sms)
    if first.y.dtype == torch.float32:
        return plan_hopper_gemm(rows, shapes, num_sms, co_resident, QUANTISED_TILE_K, FP32_TILE_ROWS)
    return (plan_transposed if first.turned else plan_fp8)(rows, shapes, num_sms, co_resident)
