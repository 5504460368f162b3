"""GEMMs on Hopper's tensor cores (csrc/gemm/gemm.cuh): availability, plans, and fp16 launches.

fp16 weights: [k, n] up to 256 rows, [n, k] up to 1,024 where that is faster than cuBLAS. Quantised weights:
hopper_gemm_fp8.py, hopper_gemm_weight_only.py.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from native import build, machine
from rwkv_batch.kernels.activation import Activation
from rwkv_batch.kernels.cuda.library import (
    MAX_GEMMS,
    Fp8GemmArgs,
    Fp16GemmArgs,
    Fp16LaunchArgs,
    cuda_pointer,
    hopper_library,
)
from rwkv_batch.kernels.cuda.w8a8.arguments import MixedGemmArgs

logger = logging.getLogger(__name__)

MPS_PIPE_DIRECTORY = "/tmp/nvidia-mps"  # noqa: S108  the default of MPS
TILE_N = 128
TILE_K = 64
TILE_ROWS = (16, 32, 64, 80, 96, 112, 128, 160, 192, 224, 240, 256)
"""Compiled tile sizes. With weights [k, n] one tile holds all rows of a launch.

80 and 240 fit the micro-batches of four GPUs with 320 and 960 rows.
"""
MAX_HOPPER_ROWS = TILE_ROWS[-1]
LARGEST_TILE = 320
"""Rows of the largest tile of any of these kernels (fp8). The split-K workspace has this size."""
MAX_MULTI_TILE_ROWS = 1024
"""Maximum fp16 rows with weights [n, k] over several tiles; cuBLAS is faster for all but small weights."""
MAX_ROW_BLOCKS = MAX_MULTI_TILE_ROWS // MAX_HOPPER_ROWS
SPLITS = (1, 2, 4)
FP16_SPLITS = 4
"""Split-K of the low ranks down, in a launch with 8-bit GEMMs and elsewhere: the bits do not depend on the rows."""
Fp16Gemm = tuple[Tensor, Tensor, Tensor, Activation]
"""weight [n, k], x [rows, k], y [rows, n], all fp16; activation"""


class GemmShape(NamedTuple):
    """Outputs and inputs of a GEMM."""

    n: int
    k: int


class Plan(NamedTuple):
    """Tiling of a launch."""

    tile_rows: int
    splits: int
    """CTAs that share a tile's k"""


@dataclass(slots=True)
class HopperWorkspace:
    """Split-K workspace of one device."""

    partials: Tensor
    """[num_sms, TILE_N * LARGEST_TILE] fp32"""
    counters: Tensor
    """[num_sms, 2] int32, zero between launches"""

    @property
    def num_sms(self) -> int:
        return len(self.partials)


@functools.cache
def hopper_gemm_unavailable_reason(device: torch.device) -> str | None:
    """Returns why a device cannot use these kernels; None if it can. Builds them."""
    archs = machine.gpu_archs()
    if device.type != "cuda" or archs != ("sm_90",):
        return f"the Hopper GEMM kernels require sm_90 on every GPU; found {', '.join(archs) or device.type}"
    try:
        hopper_library()
    except (build.BuildError, OSError) as error:
        logger.warning("the Hopper GEMM kernels cannot be built, cuBLAS is used instead: %s", error)
        return str(error)
    return None


def has_hopper_gemm(device: torch.device) -> bool:
    return hopper_gemm_unavailable_reason(device) is None


@functools.cache
def is_mps_active() -> bool:
    """Whether NVIDIA MPS runs. Other processes may then hold SMs, so CTAs must not wait for each other."""
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", MPS_PIPE_DIRECTORY), "control").exists()


@functools.cache
def prepare_hopper_gemm(device: torch.device) -> HopperWorkspace:
    """Builds the kernels and allocates their workspace. Called once per device, at load."""
    hopper_library()
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return HopperWorkspace(
        torch.empty(num_sms, TILE_N * LARGEST_TILE, dtype=torch.float32, device=device),
        torch.zeros(num_sms, 2, dtype=torch.int32, device=device),
    )


def fits_hopper_gemm(shape: GemmShape, transposed: bool) -> bool:
    """Whether the fp16 kernels take a weight of this shape."""
    return shape.k % TILE_K == 0 and shape.n % (64 if transposed else 16) == 0


@functools.cache
def plan_hopper_gemm(
    rows: int,
    shapes: tuple[GemmShape, ...],
    num_sms: int,
    co_resident: bool = True,
    depth: int = TILE_K,
    sizes: tuple[int, ...] = TILE_ROWS,
) -> Plan:
    """Returns the tile and the split-K of a launch.

    They are the smallest tile that holds the rows, and the largest split-K that fits.
    co_resident: whether all CTAs of a launch run at once. Split-K requires it: the CTAs of a tile wait for each other.
    depth: inputs (k) of one pipeline stage of the kernel; `sizes`: its compiled tile sizes
    """
    splits = max_splits(shapes, num_sms, co_resident, depth)
    return Plan(next(size for size in sizes if size >= rows), splits)


@functools.cache
def max_splits(shapes: tuple[GemmShape, ...], num_sms: int, co_resident: bool, depth: int) -> int:
    """Returns the largest split-K whose CTAs all run at once. Each CTA gets whole steps of `depth` inputs."""
    tiles = count_tiles(shapes)
    choices = SPLITS if co_resident else SPLITS[:1]
    fitting = (s for s in choices if tiles * s <= num_sms and all(shape.k % (depth * s) == 0 for shape in shapes))
    return max(fitting, default=1)


def count_tiles(shapes: Sequence[GemmShape]) -> int:
    """Returns the tiles of outputs of a launch."""
    return sum(-(-shape.n // TILE_N) for shape in shapes)


def plan_row_blocks(rows: int, tiles: int, splits: int, num_sms: int) -> Plan:
    """Returns the plan of a launch with `tiles` tiles of outputs, over one or several blocks of rows.

    Several blocks with split-K: as many as run at once. Otherwise as few as hold the rows.
    """
    blocks = -(-rows // MAX_HOPPER_ROWS)
    if blocks > 1 and splits > 1:
        blocks = max(blocks, min(MAX_ROW_BLOCKS, num_sms // (tiles * splits)))
    return Plan(next(size for size in TILE_ROWS if size >= -(-rows // blocks)), splits)


def may_return_fp32(rows: int, shape: GemmShape, device: torch.device) -> bool:
    """Whether the output can be fp32: one tile of rows, and a tile of outputs for every SM, so without split-K."""
    if rows > MAX_HOPPER_ROWS or not has_hopper_gemm(device) or not fits_hopper_gemm(shape, transposed=False):
        return False
    return shape.n // TILE_N >= prepare_hopper_gemm(device).num_sms


def launch_hopper_gemm(gemms: Sequence[Fp16Gemm], transposed: bool) -> None:
    """Runs up to 8 GEMMs over the same rows; weights [n, k], or [k, n] if transposed.

    y is fp16, or fp32 where `may_return_fp32` allows it.
    Raises ValueError for too many GEMMs or rows, or for shapes that do not match.
    """
    rows, device = gemms[0][1].shape[0], gemms[0][1].device
    max_rows = MAX_HOPPER_ROWS if transposed else MAX_MULTI_TILE_ROWS
    if len(gemms) > MAX_GEMMS or rows > max_rows:
        raise ValueError(f"a grouped launch takes {MAX_GEMMS} GEMMs of {max_rows} rows, not {len(gemms)} of {rows}")
    work = prepare_hopper_gemm(device)
    dtype = gemms[0][2].dtype
    args = Fp16LaunchArgs(count=len(gemms), rows=rows, transposed=transposed, to_fp32=dtype == torch.float32)
    shapes = fill_fp16_gemms(args.gemms[: len(gemms)], gemms, rows, transposed, dtype)
    splits = max_splits(shapes, work.num_sms // -(-rows // MAX_HOPPER_ROWS), not is_mps_active(), TILE_K)
    plan = plan_row_blocks(rows, count_tiles(shapes), splits, work.num_sms)
    launch_hopper_kernel("rwkv_gemm_fp16", args, plan, work)


def fixed_splits(shapes: Sequence[GemmShape], device: torch.device) -> int:
    """Returns the split-K of `launch_in_order` for a launch of these matrices; it does not depend on the rows."""
    return max_splits(tuple(shapes), prepare_hopper_gemm(device).num_sms, not is_mps_active(), TILE_K)


def launch_in_order(gemms: Sequence[Fp16Gemm], splits: int, transposed: bool = False) -> None:
    """As `launch_hopper_gemm`, for any number of rows: all add a row's products in the same order.

    That order depends on `splits` only. Raises ValueError if k does not allow it.
    """
    (rows, k), device = gemms[0][1].shape, gemms[0][1].device
    if k % (TILE_K * splits):
        raise ValueError(f"{splits} splits take inputs that are a multiple of {TILE_K * splits}, not {k}")
    work = prepare_hopper_gemm(device)
    tiles = count_tiles([GemmShape(y.shape[1], k) for _, _, y, _ in gemms])
    max_blocks = 1 if transposed else MAX_ROW_BLOCKS
    blocks = max_blocks if splits == 1 else max(1, min(max_blocks, work.num_sms // (tiles * splits)))
    step = blocks * MAX_HOPPER_ROWS
    for start in range(0, rows, step):
        part = [(weight, x[start : start + step], y[start : start + step], act) for weight, x, y, act in gemms]
        count, dtype = len(part[0][1]), part[0][2].dtype
        args = Fp16LaunchArgs(count=len(part), rows=count, transposed=transposed, to_fp32=dtype == torch.float32)
        fill_fp16_gemms(args.gemms[: len(part)], part, count, transposed, dtype)
        plan = plan_row_blocks(count, tiles, splits, work.num_sms)
        launch_hopper_kernel("rwkv_gemm_fp16", args, plan, work)


def fill_fp16_gemms(
    gemm_args: Sequence[Fp16GemmArgs] | Sequence[Fp8GemmArgs] | Sequence[MixedGemmArgs],
    gemms: Sequence[Fp16Gemm],
    rows: int,
    transposed: bool = False,
    dtype: torch.dtype = torch.float16,
) -> tuple[GemmShape, ...]:
    """Fills fp16 GEMMs into a launch's `gemm_args`, y of `dtype`; returns their shapes.

    Raises ValueError for shapes that do not match.
    """
    shapes = []
    for args, (weight, x, y, activation) in zip(gemm_args, gemms, strict=True):
        shape = GemmShape(*(reversed(weight.shape) if transposed else weight.shape))
        if not fits_hopper_gemm(shape, transposed) or x.shape != (rows, shape.k) or y.shape != (rows, shape.n):
            raise ValueError(f"shapes {tuple(weight.shape)}, {tuple(x.shape)}, {tuple(y.shape)} do not fit each other")
        args.weight, args.x, args.y = cuda_pointer(weight), cuda_pointer(x), cuda_pointer(y, dtype)
        args.n, args.k, args.activation = shape.n, shape.k, activation
        shapes.append(shape)
    return tuple(shapes)


def launch_hopper_kernel(name: str, args: ctypes.Structure, plan: Plan, work: HopperWorkspace) -> None:
    """Launches a kernel whose GEMMs are filled in. Raises CudaError if the driver refuses it."""
    args.tile_rows, args.splits = plan
    args.partials, args.counters = work.partials.data_ptr(), work.counters.data_ptr()
    hopper_library().call(name, ctypes.byref(args))
