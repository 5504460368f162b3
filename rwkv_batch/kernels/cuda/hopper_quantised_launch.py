"""What launches of Hopper's tensor cores over fp8 codes (hopper_gemm_fp8.py) and int8 codes (hopper_gemm_int8.py) have in common.

Rows in two parts, and maps of halves on the processors that those of codes leave idle.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rwkv_batch.kernels.cuda.hopper_gemm import (
    FP16_SPLITS,
    LARGEST_TILE,
    TILE_K,
    TILE_N,
    Fp16Gemm,
    GemmShape,
    HopperWorkspace,
    Plan,
    fill_fp16_gemms,
    fits_hopper_gemm,
    has_hopper_gemm,
    is_mps_active,
    launch_hopper_kernel,
    max_splits,
    plan_hopper_gemm,
)
from rwkv_batch.kernels.cuda.library import MAX_HOPPER_GEMMS, WideFp8Args, WideInt8Args

QUANTISED_TILE_K = 128
"""Inputs of a step of a product of codes."""
TWO_PART_TILE_ROWS = (16, 32, 64)
"""Of rows in two parts: twice as many columns of a product."""
MAX_TWO_PART_ROWS = TWO_PART_TILE_ROWS[-1]


def fits_two_part_gemm(rows: int, n: int, k: int, device: torch.device) -> bool:
    """Whether the kernel of rows in two parts multiplies so many by [n, k]."""
    return rows <= MAX_TWO_PART_ROWS and k % QUANTISED_TILE_K == 0 and n % 16 == 0 and has_hopper_gemm(device)


def plan_two_part(rows: int, shapes: tuple[GemmShape, ...], num_sms: int) -> Plan:
    """As `plan_hopper_gemm`, of rows in two parts."""
    return plan_hopper_gemm(rows, shapes, num_sms, not is_mps_active(), QUANTISED_TILE_K, TWO_PART_TILE_ROWS)


def num_splits(rows: int, n: int, k: int, num_sms: int) -> int:
    """Into how many shares of k the kernel of rows in two parts cuts [n, k]."""
    return plan_two_part(rows, (GemmShape(n, k),), num_sms).splits


def fits_fp16_gemms(rows: int, quantised: Sequence[GemmShape], halves: Sequence[GemmShape], num_sms: int) -> bool:
    """Whether maps of halves fit beside maps of codes in one launch: on the processors that these leave idle.

    Each tile of the halves is shared by several blocks, which wait for each other: all have to run at once.
    """
    if rows > LARGEST_TILE or max_splits(tuple(quantised), num_sms, True, QUANTISED_TILE_K) > 1:
        return False
    tiles = [sum(-(-shape.n // TILE_N) for shape in shapes) for shapes in (quantised, halves)]
    is_shared = all(fits_hopper_gemm(shape, False) and shape.k % (TILE_K * FP16_SPLITS) == 0 for shape in halves)
    return is_shared and tiles[0] + FP16_SPLITS * tiles[1] <= num_sms and not is_mps_active()


def check_counts(count: int, rows: int, most_rows: int, to_shares: bool) -> None:
    """Raises ValueError for more maps, or rows, than a launch takes; one whose results are shares takes one map."""
    if count > MAX_HOPPER_GEMMS or rows > most_rows:
        raise ValueError(f"a launch takes {MAX_HOPPER_GEMMS} maps of {most_rows} rows, not {count} of {rows}")
    if to_shares and count > 1:
        raise ValueError(f"a launch whose results are shares takes one map, not {count}")


def launch_quantised(
    name: str,
    args: WideFp8Args | WideInt8Args,
    shapes: Sequence[GemmShape],
    halves: Sequence[Fp16Gemm],
    late: Sequence[Fp16Gemm],
    plan: Plan,
    work: HopperWorkspace,
) -> None:
    """Run a kernel over maps of codes that are in their places, and over maps of halves, which come behind them.

    shapes: of the maps of codes; halves, late: as `launch_hopper_fp8` has them. Raises ValueError for halves that do not
    fit beside those.
    """
    fp16_shapes = [GemmShape(*weight.shape) for weight, _, _, _ in halves]
    if fp16_shapes and not fits_fp16_gemms(args.rows, shapes, fp16_shapes, len(work.partial)):
        raise ValueError(f"halves {fp16_shapes} do not fit beside codes {list(shapes)} of {args.rows} rows")
    fill_fp16_gemms(args.maps[len(shapes) : args.count], (*halves, *late), args.rows)
    launch_hopper_kernel(name, args, Plan(plan.tile_rows, FP16_SPLITS) if halves else plan, work)
