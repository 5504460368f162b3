"""Products of few rows on Hopper's tensor cores (csrc/wide.cuh): devices, plans, and launches of weights of halves.

Weights [k, n] take up to 256 rows, [n, k] up to 1,024 where that is faster than cuBLAS. Of codes: hopper_gemm_fp8.py,
hopper_gemm_int8.py, hopper_gemm_weight_only.py.
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
    MAX_MAPS,
    WideArgs,
    WideFp8Map,
    WideInt8Map,
    WideMap,
    cuda_pointer,
    hopper_library,
)

logger = logging.getLogger(__name__)

MPS_PIPE_DIRECTORY = "/tmp/nvidia-mps"  # noqa: S108  where MPS listens unless it is told otherwise
TILE_N = 128
TILE_K = 64
TILE_ROWS = (16, 32, 64, 80, 96, 112, 128, 160, 192, 224, 240, 256)
"""Tiles of rows there are kernels for; of weights [k, n], one tile holds all rows of a launch. 80 and 240 are groups of
four GPUs with 320 and 960 rows."""
MAX_HOPPER_ROWS = TILE_ROWS[-1]
LARGEST_TILE = 320
"""Rows of the largest tile that any of these kernels has: what its blocks exchange finds room in the work space."""
MAX_MULTI_TILE_ROWS = 1024
"""Of halves [n, k] where more rows than a tile's take several; cuBLAS is faster for all but small maps."""
SPLITS = (1, 2, 4)
FP16_SPLITS = 4
"""Blocks that share a tile's k of maps of halves beside others; a tile then takes half as long as one of codes."""
Fp16Gemm = tuple[Tensor, Tensor, Tensor, Activation]
"""weight [n, k], x [rows, k], y [rows, n], all fp16; what follows"""


class GemmShape(NamedTuple):
    """Outputs and inputs of one map."""

    n: int
    k: int


class Plan(NamedTuple):
    """How a launch is cut up."""

    tile_rows: int
    splits: int
    """blocks that share a tile's k"""


@dataclass(slots=True)
class HopperWorkspace:
    """Where the blocks that share a tile's k exchange their sums, on one device."""

    partial: Tensor
    """[processors, OUTPUTS * LARGEST_TILE] fp32"""
    counters: Tensor
    """[processors, 2] int32, zero between launches"""


@functools.cache
def hopper_gemm_unavailable_reason(device: torch.device) -> str | None:
    """Why these kernels do not serve a device; None if they do. Builds them: one build serves all GPUs here."""
    archs = machine.gpu_archs()
    if device.type != "cuda" or archs != ("sm_90",):
        return f"products of few rows have a kernel for sm_90 only; here is {', '.join(archs) or device.type}"
    try:
        hopper_library()
    except (build.BuildError, OSError) as error:
        logger.warning("products of few rows are left to cuBLAS: %s", error)
        return str(error)
    return None


def has_hopper_gemm(device: torch.device) -> bool:
    """Whether these kernels serve a device."""
    return hopper_gemm_unavailable_reason(device) is None


@functools.cache
def is_mps_active() -> bool:
    """Whether other processes may hold processors at the same time (NVIDIA's MPS): blocks must not wait for others."""
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", MPS_PIPE_DIRECTORY), "control").exists()


@functools.cache
def prepare_hopper_gemm(device: torch.device) -> HopperWorkspace:
    """Build the kernels and take their work space; called once per device, at load."""
    hopper_library()
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return HopperWorkspace(
        torch.empty(num_sms, TILE_N * LARGEST_TILE, dtype=torch.float32, device=device),
        torch.zeros(num_sms, 2, dtype=torch.int32, device=device),
    )


def fits_hopper_gemm(shape: GemmShape, transposed: bool) -> bool:
    """Whether the kernels take a map of this shape."""
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
    """The smallest tile that holds the rows; k shared by as many blocks as run at once and find work.

    Without `co_resident`, blocks that share a tile are not certain to run at once: each then has a tile of its own.
    """
    splits = max_splits(shapes, num_sms, co_resident, depth)
    return Plan(next(size for size in sizes if size >= rows), splits)


@functools.cache
def max_splits(shapes: tuple[GemmShape, ...], num_sms: int, co_resident: bool, depth: int) -> int:
    """By how many blocks k of each tile is shared: the most that all run at once, on whole steps of `depth` inputs.

    1 unless blocks `co_resident` for each other.
    """
    tiles = sum(-(-shape.n // TILE_N) for shape in shapes)
    choices = SPLITS if co_resident else SPLITS[:1]
    fitting = (s for s in choices if tiles * s <= num_sms and all(shape.k % (depth * s) == 0 for shape in shapes))
    return max(fitting, default=1)


def hopper_returns_fp32(rows: int, shape: GemmShape, device: torch.device) -> bool:
    """Whether the kernel gives results in fp32: of one tile of rows, of outputs enough to leave no processor idle."""
    if rows > MAX_HOPPER_ROWS or not has_hopper_gemm(device) or not fits_hopper_gemm(shape, transposed=False):
        return False
    return shape.n // TILE_N >= len(prepare_hopper_gemm(device).partial)


def launch_hopper_gemm(maps: Sequence[Fp16Gemm], transposed: bool) -> None:
    """Up to 8 maps (weight, x, y, activation) over the same rows; weights [n, k], or [k, n] if transposed.

    y of all is fp16, or of weights [n, k] fp32 where `hopper_returns_fp32` says so.

    Raises ValueError for more maps or rows, or shapes that do not fit each other.
    """
    rows, device = maps[0][1].shape[0], maps[0][1].device
    most = MAX_HOPPER_ROWS if transposed else MAX_MULTI_TILE_ROWS
    if len(maps) > MAX_MAPS or rows > most:
        raise ValueError(f"a grouped launch takes {MAX_MAPS} maps of {most} rows, not {len(maps)} of {rows}")
    work = prepare_hopper_gemm(device)
    dtype = maps[0][2].dtype
    args = WideArgs(count=len(maps), rows=rows, transposed=transposed, to_floats=dtype == torch.float32)
    shapes = fill_fp16_gemms(args.maps[: len(maps)], maps, rows, transposed, dtype)
    blocks = -(-rows // MAX_HOPPER_ROWS)  # of rows
    plan = plan_hopper_gemm(-(-rows // blocks), shapes, len(work.partial) // blocks, not is_mps_active())
    launch_hopper_kernel("rwkv_wide", args, plan, work)


def fill_fp16_gemms(
    slots: Sequence[WideMap] | Sequence[WideFp8Map] | Sequence[WideInt8Map],
    maps: Sequence[Fp16Gemm],
    rows: int,
    transposed: bool = False,
    dtype: torch.dtype = torch.float16,
) -> tuple[GemmShape, ...]:
    """Maps of halves into their places in a launch, y of `dtype` -> their shapes.

    Raises ValueError for tensors that do not fit each other.
    """
    shapes = []
    for slot, (weight, x, y, activation) in zip(slots, maps, strict=True):
        shape = GemmShape(*(reversed(weight.shape) if transposed else weight.shape))
        if not fits_hopper_gemm(shape, transposed) or x.shape != (rows, shape.k) or y.shape != (rows, shape.n):
            raise ValueError(f"shapes {tuple(weight.shape)}, {tuple(x.shape)}, {tuple(y.shape)} do not fit each other")
        slot.weight, slot.x, slot.y = cuda_pointer(weight), cuda_pointer(x), cuda_pointer(y, dtype)
        slot.n, slot.k, slot.activation = shape.n, shape.k, activation
        shapes.append(shape)
    return tuple(shapes)


def launch_hopper_kernel(name: str, args: ctypes.Structure, plan: Plan, work: HopperWorkspace) -> None:
    """Run a kernel of these over maps that are in their places. Raises CudaError if it cannot be launched."""
    args.tile_rows, args.splits = plan
    args.partial, args.counters = work.partial.data_ptr(), work.counters.data_ptr()
    hopper_library().call(name, ctypes.byref(args))
