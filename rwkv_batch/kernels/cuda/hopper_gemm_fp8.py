"""fp8 weights on Hopper's tensor cores: fp8 rows, or two-part rows (csrc/gemm/gemm_fp8.cuh).

Letters: y [rows, n] = x [rows, k] @ weight [n, k]^T.

A two-part row is two e5m2 values per input (`Fp8Gemm.x`), which keeps more bits than one fp8 value. Weights [n, k] take
up to 640 rows, weights [k, n] up to 4,096. Two-part rows: at most 64.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rwkv_batch.kernels.activation import Activation
from rwkv_batch.kernels.cuda.hopper_gemm import (
    LARGEST_TILE,
    TILE_N,
    Fp16Gemm,
    GemmShape,
    Plan,
    count_tiles,
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
from rwkv_batch.kernels.cuda.library import Fp8GemmArgs, Fp8LaunchArgs, cuda_pointer

FP8_DTYPE = torch.float8_e4m3fn
TWO_PART_DTYPE = torch.float8_e5m2
FP8_TILE_ROWS = (32, 64, 96, 128, 160, 192, 224, 256, LARGEST_TILE)
FP32_TILE_ROWS = (96, 128, 160, 192, LARGEST_TILE)
"""Tile sizes with fp32 output. 193 to 256 rows use the tile of 320, which is faster than cuBLAS's two."""
FASTER_ON_CUBLAS = range(321, 513)
MAX_FP8_ROWS = 640
"""With weights [n, k]: up to 320 rows are one tile, more are two. Up to 512 rows, cuBLAS is faster than two tiles."""
MAX_COLUMNS = 256
"""Maximum N of a wgmma (rows of x). A taller tile uses two wgmmas with half the rows each."""
TRANSPOSED_TILE_ROWS = (96, 128, 160, 192, 224, 240, 256, LARGEST_TILE)
"""Tile sizes with weights [k, n]."""
MAX_TRANSPOSED_ROWS = 4096
"""With weights [k, n]; for more rows cuBLAS gets a transposed copy."""
CYCLES_PER_ROW = 4
"""Cycles in which an SM multiplies a row's 128 inputs by 128 outputs."""
BYTES_PER_CYCLE = 50
"""Bytes per cycle and SM out of L2 when all SMs load, fitted to tiles of 128 to 320 rows."""
HALVED_ROWS = 256
"""Above it, split-K by 4 becomes two tiles of half the rows with split-K by 2 (`plan_fp8`)."""


class Fp8Gemm(NamedTuple):
    """One fp8 GEMM of a launch."""

    weight: Tensor
    """[n, k] e4m3"""
    weight_scales: Tensor
    """[n] fp32"""
    x: Tensor
    """[rows, k] e4m3, or two-part [rows, 2, k] e5m2: first + second / 8"""
    x_scales: Tensor | None
    """[rows] fp32; None: two-part rows"""
    y: Tensor
    """[rows, n] fp16, or fp32 in all GEMMs of a launch.

    With two-part rows it may also be two-part, [rows, 2, n] e5m2. A single GEMM with two-part rows may also write
    split-K partials, [`num_splits`, rows, n] fp32.
    """
    activation: Activation
    transposed: bool = False
    """whether the weight is stored as [k, n]; normally it is [n, k]"""


def fits_hopper_fp8(rows: int, n: int, k: int, device: torch.device, transposed: bool = False) -> bool:
    """Whether the kernel beats cuBLAS for so many fp8 rows.

    The weight is [n, k].
    transposed: the weight is stored as [k, n]
    """
    cublas_rows = () if transposed else FASTER_ON_CUBLAS
    is_faster = rows <= (MAX_TRANSPOSED_ROWS if transposed else MAX_FP8_ROWS) and rows not in cublas_rows
    return is_faster and k % QUANTISED_TILE_K == 0 and n % 16 == 0 and has_hopper_gemm(device)


def may_return_fp32(rows: int, n: int, k: int, device: torch.device) -> bool:
    """Whether the output can be fp32: only without split-K, so there must be a tile for every SM."""
    if rows > FP32_TILE_ROWS[-1] or not fits_hopper_fp8(rows, n, k, device):
        return False
    tile_rows = next(size for size in FP32_TILE_ROWS if size >= rows)
    return tile_rows - rows < 64 and n // TILE_N >= prepare_hopper_gemm(device).num_sms


@functools.cache
def plan_fp8(rows: int, shapes: tuple[GemmShape, ...], num_sms: int, co_resident: bool = True) -> Plan:
    """As `plan_hopper_gemm`, for fp8 rows, which may take several tiles.

    With split-K by 4, CTAs exchange 3/4 of a tile's sums. Two tiles of half the rows with split-K by 2 exchange half of
    them, but read the weight twice. That is faster only from 257 rows on (docs/tries.md).
    """
    blocks = -(-rows // FP8_TILE_ROWS[-1])
    plan = plan_hopper_gemm(-(-rows // blocks), shapes, num_sms // blocks, co_resident, QUANTISED_TILE_K, FP8_TILE_ROWS)
    if plan.splits == 4 and rows > HALVED_ROWS:
        plan = Plan(next(size for size in FP8_TILE_ROWS if 2 * size >= rows), 2)
    return plan


@functools.cache
def plan_transposed(rows: int, shapes: tuple[GemmShape, ...], num_sms: int, co_resident: bool = True) -> Plan:
    """As `plan_fp8`, for weights [k, n].

    Beyond 320 rows it returns the fastest plan by a model of an SM's cycles per 128 inputs (one pipeline stage); among
    equals the tallest tile.
    Split-K only where all CTAs run at once.
    """
    if rows <= FP8_TILE_ROWS[-1]:
        return plan_fp8(rows, shapes, num_sms, co_resident)
    tiles = count_tiles(shapes)

    def cost(plan: Plan) -> tuple[float, int]:
        units = -(-rows // plan.tile_rows) * tiles * plan.splits
        stage_cycles = max(
            plan.tile_rows * CYCLES_PER_ROW, (TILE_N + plan.tile_rows) * QUANTISED_TILE_K / BYTES_PER_CYCLE
        )
        return -(-units // num_sms) * stage_cycles / plan.splits, -plan.tile_rows

    # a tile above MAX_COLUMNS is two wgmmas; leave out sizes whose second wgmma would have no rows in the last tile
    row_blocks = {
        size: -(-rows // size) for size in TRANSPOSED_TILE_ROWS if size <= MAX_COLUMNS or (rows - 1) % size >= size // 2
    }
    plans = (
        plan_hopper_gemm(size, shapes, num_sms // blocks, co_resident, QUANTISED_TILE_K, (size,))
        for size, blocks in row_blocks.items()
    )
    return min(plans, key=cost)


def launch_hopper_fp8(
    gemms: Sequence[Fp8Gemm], fp16_gemms: Sequence[Fp16Gemm] = (), dependent: Sequence[Fp16Gemm] = ()
) -> None:
    """Runs up to 12 GEMMs over the same rows.

    The rows are fp8 rows (`fits_hopper_fp8`) or two-part rows (`fits_two_part_gemm`).
    fp16_gemms: fp16 GEMMs that `fits_fp16_gemms` allows in the launch
    dependent: fp16 GEMMs that read the outputs of fp16_gemms, as the second matrices of low-rank pairs do
    Raises ValueError for too many GEMMs or rows, or for shapes that do not match.
    """
    first = gemms[0]
    rows, has_two_part_rows, to_fp32 = len(first.x), first.x_scales is None, first.y.dtype == torch.float32
    count = len(gemms) + len(fp16_gemms) + len(dependent)
    max_rows = MAX_TRANSPOSED_ROWS if first.transposed else MAX_FP8_ROWS
    if has_two_part_rows or to_fp32:
        max_rows = MAX_TWO_PART_ROWS if has_two_part_rows else FP32_TILE_ROWS[-1]
    check_counts(count, rows, max_rows, to_partials=has_two_part_rows and to_fp32)
    work = prepare_hopper_gemm(first.x.device)
    args = Fp8LaunchArgs(count=count, dependent=len(dependent), rows=rows, transposed=first.transposed, to_fp32=to_fp32)
    args.to_partials = has_two_part_rows and to_fp32
    pairs = zip(args.gemms, gemms, strict=False)
    shapes = tuple(_fill_gemm(gemm_args, gemm, first, work.num_sms) for gemm_args, gemm in pairs)
    plan = _plan(first, shapes, work.num_sms)
    name = "rwkv_gemm_fp8_transposed" if first.transposed else "rwkv_gemm_fp8"
    if has_two_part_rows:
        name = "rwkv_gemm_two_part"
    launch_quantised(name, args, shapes, fp16_gemms, dependent, plan, work)


def _fill_gemm(args: Fp8GemmArgs, gemm: Fp8Gemm, first: Fp8Gemm, num_sms: int) -> GemmShape:
    """Fills one GEMM into a launch whose first GEMM is `first`. Raises ValueError for tensors that do not match."""
    weight, x, y, x_scales = gemm.weight, gemm.x, gemm.y, gemm.x_scales
    n, k = reversed(weight.shape) if gemm.transposed else weight.shape
    rows, has_two_part_rows, dtype = len(first.x), first.x_scales is None, first.y.dtype
    writes_two_parts = y.dtype == TWO_PART_DTYPE
    x_shape = (rows, 2, k) if has_two_part_rows else (rows, k)
    y_shape: tuple[int, ...] = (rows, n)
    if has_two_part_rows and dtype == torch.float32:
        y_shape = (num_splits(rows, n, k, num_sms), rows, n)
    elif writes_two_parts:
        y_shape = (rows, 2, n)
    scales_match = x_scales is None if has_two_part_rows else x_scales is not None and x_scales.shape == (rows,)
    if x.shape != x_shape or y.shape != y_shape or not scales_match or (writes_two_parts and not has_two_part_rows):
        raise ValueError(f"shapes {tuple(weight.shape)}, {tuple(x.shape)}, {tuple(y.shape)} do not fit together")
    args.weight = cuda_pointer(weight, FP8_DTYPE)
    args.x = cuda_pointer(x, TWO_PART_DTYPE if has_two_part_rows else FP8_DTYPE)
    args.y, args.is_two_part = cuda_pointer(y, y.dtype if has_two_part_rows else dtype), writes_two_parts
    args.weight_scales = gemm.weight_scales.data_ptr()
    args.input_scales = None if x_scales is None else x_scales.data_ptr()
    args.n, args.k, args.activation = n, k, gemm.activation
    return GemmShape(n, k)


def _plan(first: Fp8Gemm, shapes: tuple[GemmShape, ...], num_sms: int) -> Plan:
    """Returns the plan of a launch of `first` and others like it."""
    rows, co_resident = len(first.x), not is_mps_active()
    if first.x_scales is None:
        return plan_two_part(rows, shapes, num_sms)
    if first.y.dtype == torch.float32:
        return plan_hopper_gemm(rows, shapes, num_sms, co_resident, QUANTISED_TILE_K, FP32_TILE_ROWS)
    return (plan_transposed if first.transposed else plan_fp8)(rows, shapes, num_sms, co_resident)
