"""A time mix's fp16 input projections in one launch (csrc/gemm/gemm_input_projections.cu)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rwkv_batch.kernels.cuda.hopper_gemm import (
    FP16_SPLITS,
    MAX_HOPPER_ROWS,
    TILE_K,
    TILE_ROWS,
    Fp16Gemm,
    GemmShape,
    Plan,
    count_tiles,
    fill_fp16_gemms,
    fits_hopper_gemm,
    has_hopper_gemm,
    is_mps_active,
    launch_hopper_kernel,
    plan_hopper_gemm,
    prepare_hopper_gemm,
)
from rwkv_batch.kernels.cuda.library import MAX_HOPPER_GEMMS, InputProjectionArgs

MIN_ROWS = 65
"""With 1, 8 and 32 rows one launch took 0.9, 0.9 and 0.3 % longer than two (docs/tries.md)."""


def fits_fused_projections(
    rows: int, full: Sequence[Tensor], split: Sequence[Tensor], dependent: Sequence[Tensor], min_rows: int = MIN_ROWS
) -> bool:
    """Whether the weights of all input projections fit one launch.

    The weights [n, k] are those of r, k, v (`full`), of the low ranks down (`split`) and up (`dependent`). r, k, v must
    leave an SM for every CTA of the low ranks down, because the low ranks up wait for these.
    """
    if not min_rows <= rows <= MAX_HOPPER_ROWS or not has_hopper_gemm(full[0].device) or is_mps_active():
        return False
    num_sms = prepare_hopper_gemm(full[0].device).num_sms
    shapes = [[GemmShape(*weight.shape) for weight in weights] for weights in (full, split, dependent)]
    return (
        count_tiles(shapes[0]) + FP16_SPLITS * count_tiles(shapes[1]) <= num_sms
        and plan_hopper_gemm(rows, tuple(shapes[0]), num_sms).splits == 1
        and all(fits_hopper_gemm(shape, transposed=False) for part in shapes for shape in part)
        and all(shape.k % (TILE_K * FP16_SPLITS) == 0 for shape in shapes[1])
    )


def launch_fused_projections(
    full: Sequence[Fp16Gemm], split: Sequence[Fp16Gemm], dependent: Sequence[Fp16Gemm]
) -> None:
    """Runs the launch, where `fits_fused_projections` allows it; `dependent` reads the outputs of `split`.

    Raises ValueError for too many GEMMs or rows, or for shapes that do not match.
    """
    gemms = [*full, *split, *dependent]
    rows, device = gemms[0][1].shape[0], gemms[0][1].device
    if len(gemms) > MAX_HOPPER_GEMMS or rows > MAX_HOPPER_ROWS:
        raise ValueError(
            f"a launch takes {MAX_HOPPER_GEMMS} GEMMs of {MAX_HOPPER_ROWS} rows at most, not {len(gemms)} of {rows}"
        )
    args = InputProjectionArgs(count=len(gemms), full=len(full), dependent=len(dependent), rows=rows)
    fill_fp16_gemms(args.gemms[: len(gemms)], gemms, rows)
    tile_rows = next(size for size in TILE_ROWS if size >= max(rows, MIN_ROWS))
    launch_hopper_kernel("rwkv_gemm_input_projections", args, Plan(tile_rows, FP16_SPLITS), prepare_hopper_gemm(device))
