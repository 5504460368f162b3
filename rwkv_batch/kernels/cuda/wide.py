"""Products of few rows on Hopper's tensor cores (csrc/wide.cuh): plans and launches.

Weights [k, n] take up to 256 rows, [n, k] up to 1,024 where that is faster than cuBLAS, fp8 codes up to 640 ([k, n] up
to 4,096), those of rows in two parts up to 64.
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
    MAX_WIDE_MAPS,
    WideArgs,
    WideFp8Args,
    WideFp8Map,
    WideInt8Map,
    cuda_pointer,
    hopper_library,
)

logger = logging.getLogger(__name__)

MPS_PIPES = "/tmp/nvidia-mps"  # noqa: S108  where MPS listens unless it is told otherwise
OUTPUTS = 128
DEPTH = 64
FP8_DEPTH = 128
TILE_ROWS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 240, 256)
"""Tiles of rows there are kernels for; of weights [k, n], one tile holds all rows of a launch. 80 and 240 are groups of
four GPUs with 320 and 960 rows."""
MAX_WIDE_ROWS = TILE_ROWS[-1]
FP8_TILE_ROWS = (32, 64, 96, 128, 160, 192, 224, 256, 320)
FLOAT_TILE_ROWS = (96, 128, 160, 192, 320)
"""The same where results are fp32; from 193 to 256 rows, which fill two of cuBLAS's tiles, that is faster."""
MAX_TALL_ROWS = 1024
"""Of halves [n, k] where more rows than a tile's take several; cuBLAS is faster for all but small maps."""
PARTS_TILE_ROWS = (32, 64)
"""Of rows in two parts: twice as many columns of a product."""
MAX_PARTS_ROWS = PARTS_TILE_ROWS[-1]
FP8_ROWS_OF_CUBLAS = range(321, 513)
MAX_FP8_ROWS = 640
"""Of fp8 codes: up to 320 rows are a tile, more are two; where these are not full, cuBLAS is faster."""
MAX_COLUMNS = 256
"""Of a product: a tile of more rows is two products of half of them."""
TURNED_TILE_ROWS = (96, 128, 160, 192, 224, 240, 256, 320)
"""Of a tile of fp8 codes [k, n]."""
CYCLES_OF_ROW = 4
"""In which a processor multiplies 128 inputs of a row by 128 outputs in fp8."""
BYTES_OF_CYCLE = 50
"""That a processor brings in where all do, out of L2: what times of tiles of 128 to 320 rows amount to."""
MAX_TURNED_ROWS = 4096
"""Of fp8 codes [k, n]: for more, cuBLAS is given them turned."""
HALVED_ROWS = 256
"""Of fp8 codes: of more, blocks that would share a tile's k by four have half its rows, by two (`plan_fp8`)."""
SPLITS = (1, 2, 4)
HALF_SPLITS = 4
"""Blocks that share a tile's k of maps of halves beside codes: a tile then takes half as long as one of codes."""
CODES = torch.float8_e4m3fn
PARTS = torch.float8_e5m2
HalfMap = tuple[Tensor, Tensor, Tensor, Activation]
"""weight [n, k], x [rows, k], y [rows, n], all fp16; what follows"""


class WideShape(NamedTuple):
    """Outputs and inputs of one map."""

    n: int
    k: int


class Plan(NamedTuple):
    """How a launch is cut up."""

    tile_rows: int
    splits: int
    """blocks that share a tile's k"""


@dataclass(slots=True)
class Workspace:
    """Where the blocks that share a tile's k exchange their sums, on one device."""

    partial: Tensor
    """[processors, OUTPUTS * 320] fp32: of the largest tile"""
    counters: Tensor
    """[processors, 2] int32, zero between launches"""


@functools.cache
def why_no_wide(device: torch.device) -> str | None:
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


def has_wide(device: torch.device) -> bool:
    """Whether these kernels serve a device."""
    return why_no_wide(device) is None


@functools.cache
def shares_processors() -> bool:
    """Whether other processes may hold processors at the same time (NVIDIA's MPS): blocks must not wait for others."""
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", MPS_PIPES), "control").exists()


@functools.cache
def prepare_wide(device: torch.device) -> Workspace:
    """Build the kernels and take their work space; called once per device, at load."""
    hopper_library()
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return Workspace(
        torch.empty(processors, OUTPUTS * FP8_TILE_ROWS[-1], dtype=torch.float32, device=device),
        torch.zeros(processors, 2, dtype=torch.int32, device=device),
    )


def fits_wide(shape: WideShape, transposed: bool) -> bool:
    """Whether the kernels take a map of this shape."""
    return shape.k % DEPTH == 0 and shape.n % (64 if transposed else 16) == 0


@functools.cache
def plan_wide(
    rows: int,
    shapes: tuple[WideShape, ...],
    processors: int,
    may_wait: bool = True,
    depth: int = DEPTH,
    sizes: tuple[int, ...] = TILE_ROWS,
) -> Plan:
    """The smallest tile that holds the rows; k shared by as many blocks as run at once and find work.

    Without `may_wait`, blocks that share a tile are not certain to run at once: each then has a tile of its own.
    """
    tiles = sum(-(-shape.n // OUTPUTS) for shape in shapes)
    choices = SPLITS if may_wait else SPLITS[:1]
    fitting = (s for s in choices if tiles * s <= processors and all(shape.k % (depth * s) == 0 for shape in shapes))
    return Plan(next(size for size in sizes if size >= rows), max(fitting, default=1))


def floats_by_wide(rows: int, shape: WideShape, device: torch.device) -> bool:
    """Whether the kernel gives results in fp32: of one tile of rows, of outputs enough to leave no processor idle."""
    if rows > MAX_WIDE_ROWS or not has_wide(device) or not fits_wide(shape, transposed=False):
        return False
    return shape.n // OUTPUTS >= len(prepare_wide(device).partial)


def launch_wide(maps: Sequence[HalfMap], transposed: bool) -> None:
    """Up to 8 maps (weight, x, y, activation) over the same rows; weights [n, k], or [k, n] if transposed.

    y of all is fp16, or of weights [n, k] fp32 where `floats_by_wide` says so.

    Raises ValueError for more maps or rows, or shapes that do not fit each other.
    """
    rows, device = maps[0][1].shape[0], maps[0][1].device
    most = MAX_WIDE_ROWS if transposed else MAX_TALL_ROWS
    if len(maps) > MAX_MAPS or rows > most:
        raise ValueError(f"a grouped launch takes {MAX_MAPS} maps of {most} rows, not {len(maps)} of {rows}")
    work = prepare_wide(device)
    dtype = maps[0][2].dtype
    args = WideArgs(count=len(maps), rows=rows, transposed=transposed, to_floats=dtype == torch.float32)
    shapes = []
    for slot, (weight, x, y, activation) in zip(args.maps, maps, strict=False):
        shape = WideShape(*(reversed(weight.shape) if transposed else weight.shape))
        if not fits_wide(shape, transposed) or x.shape != (rows, shape.k) or y.shape != (rows, shape.n):
            raise ValueError(f"shapes {tuple(weight.shape)}, {tuple(x.shape)}, {tuple(y.shape)} do not fit each other")
        slot.weight, slot.x, slot.y = cuda_pointer(weight), cuda_pointer(x), cuda_pointer(y, dtype)
        slot.n, slot.k, slot.activation = shape.n, shape.k, activation
        shapes.append(shape)
    blocks = -(-rows // MAX_WIDE_ROWS)  # of rows
    plan = plan_wide(-(-rows // blocks), tuple(shapes), len(work.partial) // blocks, not shares_processors())
    args.tile_rows, args.splits = plan
    args.partial, args.counters = work.partial.data_ptr(), work.counters.data_ptr()
    hopper_library().call("rwkv_wide", ctypes.byref(args))


class Fp8Map(NamedTuple):
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
    [`num_shares`, rows, n] fp32: their sum, of shares of k, is meant"""
    activation: int
    turned: bool = False
    """whether the weight is [k, n]"""


def fits_wide_fp8(rows: int, n: int, k: int, device: torch.device, turned: bool = False) -> bool:
    """Whether the kernel of fp8 codes multiplies so many rows by [n, k]; `turned`: stored as [k, n]."""
    of_cublas = () if turned else FP8_ROWS_OF_CUBLAS
    worth_it = rows <= (MAX_TURNED_ROWS if turned else MAX_FP8_ROWS) and rows not in of_cublas
    return worth_it and k % FP8_DEPTH == 0 and n % 16 == 0 and has_wide(device)


def fits_wide_parts(rows: int, n: int, k: int, device: torch.device) -> bool:
    """Whether the kernel of rows in two parts multiplies so many by [n, k]."""
    return rows <= MAX_PARTS_ROWS and k % FP8_DEPTH == 0 and n % 16 == 0 and has_wide(device)


def num_shares(rows: int, n: int, k: int, processors: int) -> int:
    """Into how many shares of k the kernel of rows in two parts cuts [n, k]."""
    return plan_wide(rows, (WideShape(n, k),), processors, not shares_processors(), FP8_DEPTH, PARTS_TILE_ROWS).splits


def fits_halves_beside(rows: int, coded: Sequence[WideShape], halves: Sequence[WideShape], processors: int) -> bool:
    """Whether maps of halves fit beside maps of fp8 codes in one launch: on the processors that these leave idle.

    Each tile of the halves is shared by several blocks, which wait for each other: all have to run at once.
    """
    if rows > FP8_TILE_ROWS[-1] or plan_wide(rows, tuple(coded), processors, True, FP8_DEPTH, FP8_TILE_ROWS).splits > 1:
        return False
    tiles = [sum(-(-shape.n // OUTPUTS) for shape in shapes) for shapes in (coded, halves)]
    is_shared = all(fits_wide(shape, False) and shape.k % (DEPTH * HALF_SPLITS) == 0 for shape in halves)
    return is_shared and tiles[0] + HALF_SPLITS * tiles[1] <= processors and not shares_processors()


def floats_by_wide_fp8(rows: int, n: int, k: int, device: torch.device) -> bool:
    """Whether it does so with results in fp32: of as many tiles as leave no processor idle, on which k is not split."""
    if rows > FLOAT_TILE_ROWS[-1] or not fits_wide_fp8(rows, n, k, device):
        return False
    tile_rows = next(size for size in FLOAT_TILE_ROWS if size >= rows)
    return tile_rows - rows < 64 and n // OUTPUTS >= len(prepare_wide(device).partial)


@functools.cache
def plan_fp8(rows: int, shapes: tuple[WideShape, ...], processors: int, may_wait: bool = True) -> Plan:
    """As `plan_wide`, of fp8 codes, whose rows may be several tiles.

    Four blocks that share a tile's k exchange three quarters of its sums; two tiles of half the rows, each shared by
    two blocks, exchange half of them, and read W twice. That is faster from 257 rows on only (docs/notebook.md).
    """
    blocks = -(-rows // FP8_TILE_ROWS[-1])
    plan = plan_wide(-(-rows // blocks), shapes, processors // blocks, may_wait, FP8_DEPTH, FP8_TILE_ROWS)
    if plan.splits == 4 and rows > HALVED_ROWS:
        plan = Plan(next(size for size in FP8_TILE_ROWS if 2 * size >= rows), 2)
    return plan


@functools.cache
def plan_turned(rows: int, shapes: tuple[WideShape, ...], processors: int, may_wait: bool = True) -> Plan:
    """As `plan_fp8` of codes [k, n]; beyond 320 rows the quickest by what a processor multiplies and brings in.

    Of equals the tallest tile. k of a tile is shared by blocks only where all run at once.
    """
    if rows <= FP8_TILE_ROWS[-1]:
        return plan_fp8(rows, shapes, processors, may_wait)
    tiles = sum(-(-shape.n // OUTPUTS) for shape in shapes)

    def cost(plan: Plan) -> tuple[float, int]:
        units = -(-rows // plan.tile_rows) * tiles * plan.splits
        of_step = max(plan.tile_rows * CYCLES_OF_ROW, (OUTPUTS + plan.tile_rows) * FP8_DEPTH / BYTES_OF_CYCLE)
        return -(-units // processors) * of_step / plan.splits, -plan.tile_rows

    # a tile of more columns than a product has is two products: one that begins behind the last row would be idle
    row_blocks = {
        size: -(-rows // size) for size in TURNED_TILE_ROWS if size <= MAX_COLUMNS or (rows - 1) % size >= size // 2
    }
    plans = (
        plan_wide(size, shapes, processors // blocks, may_wait, FP8_DEPTH, (size,))
        for size, blocks in row_blocks.items()
    )
    return min(plans, key=cost)


def place_halves(slots: Sequence[WideFp8Map] | Sequence[WideInt8Map], halves: Sequence[HalfMap], rows: int) -> None:
    """Maps of halves into their places beside codes. Raises ValueError for shapes that do not fit each other."""
    for slot, (weight, x, y, activation) in zip(slots, halves, strict=True):
        shape = WideShape(*weight.shape)
        if not fits_wide(shape, False) or x.shape != (rows, shape.k) or y.shape != (rows, shape.n):
            raise ValueError(f"shapes {shape}, {tuple(x.shape)}, {tuple(y.shape)} do not fit each other")
        slot.weight, slot.x, slot.y = cuda_pointer(weight), cuda_pointer(x), cuda_pointer(y)
        slot.n, slot.k, slot.activation = shape.n, shape.k, activation


def launch_wide_fp8(maps: Sequence[Fp8Map], halves: Sequence[HalfMap] = (), late: Sequence[HalfMap] = ()) -> None:
    """Up to 12 maps over the same number of rows of fp8 codes, where `fits_wide_fp8` says that it can be done.

    Or of rows in two parts, where `fits_wide_parts` does.

    `halves`: maps of as many rows of fp16 that `fits_halves_beside` lets into the launch; `late`: maps of fp16 whose
    inputs are the results of these. Raises ValueError for more maps or rows, or shapes that do not fit each other.
    """
    rows, device, dtype = maps[0].x.shape[0], maps[0].x.device, maps[0].y.dtype
    count, parts, turned = len(maps) + len(halves) + len(late), maps[0].x_scales is None, maps[0].turned
    to_shares = parts and dtype == torch.float32
    most = MAX_PARTS_ROWS if parts else MAX_TURNED_ROWS if turned else MAX_FP8_ROWS
    if count > MAX_WIDE_MAPS or rows > most:
        raise ValueError(f"a grouped launch takes {MAX_WIDE_MAPS} maps of {most} rows, not {count} of {rows}")
    if to_shares and count > 1:
        raise ValueError(f"a launch whose results are shares takes one map, not {count}")
    work = prepare_wide(device)
    args = WideFp8Args(count=count, late=len(late), rows=rows, to_floats=dtype == torch.float32, to_shares=to_shares)
    args.turned = turned
    shapes = []
    for slot, m in zip(args.maps, maps, strict=False):
        n, k = reversed(m.weight.shape) if m.turned else m.weight.shape
        given, made = (rows, 2, k) if parts else (rows, k), (rows, 2, n) if m.y.dtype == PARTS else (rows, n)
        if to_shares:
            made = (num_shares(rows, n, k, len(work.partial)), rows, n)
        scaled = m.x_scales is None if parts else m.x_scales is not None and m.x_scales.shape == (rows,)
        if m.x.shape != given or m.y.shape != made or not scaled or (m.y.dtype == PARTS and not parts):
            raise ValueError(
                f"shapes {tuple(m.weight.shape)}, {tuple(m.x.shape)}, {tuple(m.y.shape)} do not fit together"
            )
        slot.weight, slot.x = cuda_pointer(m.weight, CODES), cuda_pointer(m.x, PARTS if parts else CODES)
        slot.y, slot.in_parts = cuda_pointer(m.y, m.y.dtype if parts else dtype), m.y.dtype == PARTS
        slot.weight_scales = m.weight_scales.data_ptr()
        slot.input_scales = None if m.x_scales is None else m.x_scales.data_ptr()
        slot.n, slot.k, slot.activation = n, k, m.activation
        shapes.append(WideShape(n, k))
    beside = [WideShape(*weight.shape) for weight, _, _, _ in halves]
    if beside and not fits_halves_beside(rows, shapes, beside, len(work.partial)):
        raise ValueError(f"halves {beside} do not fit beside codes {shapes} of {rows} rows")
    place_halves(args.maps[len(maps) : count], (*halves, *late), rows)
    processors, may_wait = len(work.partial), not shares_processors()
    if parts:
        plan = plan_wide(rows, tuple(shapes), processors, may_wait, FP8_DEPTH, PARTS_TILE_ROWS)
    elif args.to_floats:
        plan = plan_wide(rows, tuple(shapes), processors, may_wait, FP8_DEPTH, FLOAT_TILE_ROWS)
    else:
        plan = (plan_turned if turned else plan_fp8)(rows, tuple(shapes), processors, may_wait)
    args.tile_rows, args.splits = plan.tile_rows, HALF_SPLITS if halves else plan.splits
    args.partial, args.counters = work.partial.data_ptr(), work.counters.data_ptr()
    name = "rwkv_wide_parts" if parts else "rwkv_wide_fp8_turned" if args.turned else "rwkv_wide_fp8"
    hopper_library().call(name, ctypes.byref(args))
