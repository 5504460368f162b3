"""Two-part rows, and fp16 GEMMs on SMs that 8-bit tiles leave idle. For hopper_gemm_fp8.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rwkv_batch.kernels.cuda.hopper_gemm import (
    FP16_SPLITS,
    LARGEST_TILE,
    TILE_K,
    Fp16Gemm,
    GemmShape,
    HopperWorkspace,
    Plan,
    count_tiles,
    fill_fp16_gemms,
    fits_hopper_gemm,
    has_hopper_gemm,
    is_mps_active,
    launch_hopper_kernel,
    max_splits,
    plan_hopper_gemm,
)
from rwkv_batch.kernels.cuda.library import MAX_HOPPER_GEMMS, Fp8LaunchArgs

QUANTISED_TILE_K = 128
"""Inputs per main loop step of 8-bit weights."""
TWO_PART_TILE_ROWS = (16, 32, 64)
"""Tile sizes of two-part rows; a tile has twice as many wgmma columns."""
MAX_TWO_PART_ROWS = TWO_PART_TILE_ROWS[-1]


def fits_two_part_gemm(rows: int, n: int, k: int, device: torch.device) -> bool:
    """Whether the kernel takes so many two-part rows times [n, k]."""
    return rows <= MAX_TWO_PART_ROWS and k % QUANTISED_TILE_K == 0 and n % 16 == 0 and has_hopper_gemm(device)


def plan_two_part(rows: int, shapes: tuple[GemmShape, ...], num_sms: int) -> Plan:
    """As `plan_hopper_gemm`, for two-part rows."""
    return plan_hopper_gemm(rows, shapes, num_sms, not is_mps_active(), QUANTISED_TILE_K, TWO_PART_TILE_ROWS)


def num_splits(rows: int, n: int, k: int, num_sms: int) -> int:
    """Returns the split-K of two-part rows times [n, k]."""
    return plan_two_part(rows, (GemmShape(n, k),), num_sms).splits


def fits_fp16_gemms(rows: int, quantised: Sequence[GemmShape], fp16_gemms: Sequence[GemmShape], num_sms: int) -> bool:
    """Whether fp16 GEMMs fit on the SMs that 8-bit GEMMs leave idle.

    Each fp16 tile is shared by several CTAs that wait for each other, so all must run at once.
    """
    if rows > LARGEST_TILE or max_splits(tuple(quantised), num_sms, True, QUANTISED_TILE_K) > 1:
        return False
    num_ctas = count_tiles(quantised) + FP16_SPLITS * count_tiles(fp16_gemms)
    is_shared = all(fits_hopper_gemm(shape, False) and shape.k % (TILE_K * FP16_SPLITS) == 0 for shape in fp16_gemms)
    return is_shared and num_ctas <= num_sms and not is_mps_active()


def check_counts(count: int, rows: int, most_rows: int, to_partials: bool) -> None:
    """Checks a launch's numbers of GEMMs and rows.

    Raises ValueError for more than a launch takes; with partials it takes one GEMM.
    """
    if count > MAX_HOPPER_GEMMS or rows > most_rows:
        raise ValueError(f"a launch takes {MAX_HOPPER_GEMMS} GEMMs of {most_rows} rows, not {count} of {rows}")
    if to_partials and count > 1:
        raise ValueError(f"a launch with split-K partials takes one GEMM, not {count}")


def launch_quantised(
    name: str,
    args: Fp8LaunchArgs,
    shapes: Sequence[GemmShape],
    fp16_gemms: Sequence[Fp16Gemm],
    dependent: Sequence[Fp16Gemm],
    plan: Plan,
    work: HopperWorkspace,
) -> None:
    """Launches 8-bit GEMMs that are filled in, followed by fp16 GEMMs.

    shapes: of the 8-bit GEMMs; fp16_gemms, dependent: see `launch_hopper_fp8`. Raises ValueError for fp16 GEMMs that do
    not fit.
    """
    fp16_shapes = [GemmShape(*weight.shape) for weight, _, _, _ in fp16_gemms]
    if fp16_shapes and not fits_fp16_gemms(args.rows, shapes, fp16_shapes, work.num_sms):
        raise ValueError(
            f"fp16_gemms {fp16_shapes} do not fit next to quantised weights {list(shapes)} of {args.rows} rows"
        )
    fill_fp16_gemms(args.gemms[len(shapes) : args.count], (*fp16_gemms, *dependent), args.rows)
    launch_hopper_kernel(name, args, Plan(plan.tile_rows, FP16_SPLITS) if fp16_gemms else plan, work)
