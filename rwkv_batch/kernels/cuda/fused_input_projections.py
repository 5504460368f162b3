"""The entrance of a time mix in halves as one launch (csrc/wide_entrance.cu): its plan and the launch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rwkv_batch.kernels.cuda.hopper_gemm import (
    FP16_SPLITS,
    MAX_HOPPER_ROWS,
    TILE_K,
    TILE_N,
    TILE_ROWS,
    Fp16Gemm,
    GemmShape,
    Plan,
    fill_fp16_gemms,
    fits_hopper_gemm,
    has_hopper_gemm,
    is_mps_active,
    launch_hopper_kernel,
    plan_hopper_gemm,
    prepare_hopper_gemm,
)
from rwkv_batch.kernels.cuda.library import MAX_HOPPER_GEMMS, WideEntranceArgs

MIN_ROWS = 65
"""With 1, 8 and 32 rows it took 0.9, 0.9 and 0.3 % longer than two launches (docs/notebook.md)."""


def fits_fused_projections(
    rows: int, whole: Sequence[Tensor], shared: Sequence[Tensor], late: Sequence[Tensor]
) -> bool:
    """Whether weights [n, k] of r, k, v, of the low ranks' entrances and of their exits go into one launch.

    r, k, v must leave so many processors idle that every block of the entrances has one: the exits wait for them.
    """
    if not MIN_ROWS <= rows <= MAX_HOPPER_ROWS or not has_hopper_gemm(whole[0].device) or is_mps_active():
        return False
    num_sms = len(prepare_hopper_gemm(whole[0].device).partial)
    shapes = [[GemmShape(*weight.shape) for weight in weights] for weights in (whole, shared, late)]
    tiles = [sum(-(-shape.n // TILE_N) for shape in part) for part in shapes]
    return (
        tiles[0] + FP16_SPLITS * tiles[1] <= num_sms
        and plan_hopper_gemm(rows, tuple(shapes[0]), num_sms).splits == 1
        and all(fits_hopper_gemm(shape, transposed=False) for part in shapes for shape in part)
        and all(shape.k % (TILE_K * FP16_SPLITS) == 0 for shape in shapes[1])
    )


def launch_fused_projections(whole: Sequence[Fp16Gemm], shared: Sequence[Fp16Gemm], late: Sequence[Fp16Gemm]) -> None:
    """Maps over the same rows, where `fits_fused_projections` says so. The late ones' inputs are results of the shared ones.

    Raises ValueError for more maps or rows than a launch takes, or shapes that do not fit each other.
    """
    maps = [*whole, *shared, *late]
    rows, device = maps[0][1].shape[0], maps[0][1].device
    if len(maps) > MAX_HOPPER_GEMMS or rows > MAX_HOPPER_ROWS:
        raise ValueError(
            f"a launch takes {MAX_HOPPER_GEMMS} maps of {MAX_HOPPER_ROWS} rows at most, not {len(maps)} of {rows}"
        )
    args = WideEntranceArgs(count=len(maps), whole=len(whole), late=len(late), rows=rows)
    fill_fp16_gemms(args.maps[: len(maps)], maps, rows)
    tile_rows = next(size for size in TILE_ROWS if size >= max(rows, MIN_ROWS))
    launch_hopper_kernel("rwkv_wide_entrance", args, Plan(tile_rows, FP16_SPLITS), prepare_hopper_gemm(device))
