"""W8A8 GEMMs of one tile of rows, with fp16 GEMMs in the same launch (csrc/gemm/gemm_w8a8.cu)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rwkv_batch.kernels.cuda.hopper_gemm import (
    FP16_SPLITS,
    Fp16Gemm,
    GemmShape,
    Plan,
    fill_fp16_gemms,
    has_hopper_gemm,
    launch_hopper_kernel,
    prepare_hopper_gemm,
)
from rwkv_batch.kernels.cuda.hopper_quantised_launch import fits_fp16_gemms
from rwkv_batch.kernels.cuda.library import cuda_pointer
from rwkv_batch.kernels.cuda.w8a8.arguments import MAX_MIXED_GEMMS, MAX_W8A8_GEMMS, MixedLaunchArgs
from rwkv_batch.kernels.cuda.w8a8.products import W8A8Gemm, pitch_of

TILE_ROWS = (32, 64, 128, 160, 256, 320)
"""Compiled tiles. One tile holds all rows of a launch."""


def fits_mixed_launch(
    rows: int, shapes: Sequence[GemmShape], fp16_shapes: Sequence[GemmShape], device: torch.device
) -> bool:
    """Whether a launch takes W8A8 GEMMs and fp16 GEMMs of so many rows.

    The fp16 GEMMs run on SMs that the W8A8 tiles leave idle.
    """
    return (
        0 < rows <= TILE_ROWS[-1]
        and len(shapes) <= MAX_W8A8_GEMMS
        and has_hopper_gemm(device)
        and fits_fp16_gemms(rows, shapes, fp16_shapes, prepare_hopper_gemm(device).num_sms)
    )


def launch_mixed(gemms: Sequence[W8A8Gemm], fp16_gemms: Sequence[Fp16Gemm], dependent: Sequence[Fp16Gemm] = ()) -> None:
    """Run up to 3 W8A8 GEMMs and fp16 GEMMs over the same rows, where `fits_mixed_launch` allows it.

    dependent: fp16 GEMMs that read the outputs of fp16_gemms
    Raises ValueError for too many GEMMs or rows, or for shapes that do not match.
    """
    (rows, k), device = gemms[0].x.codes.shape, gemms[0].y.device
    count = len(gemms) + len(fp16_gemms) + len(dependent)
    if len(gemms) > MAX_W8A8_GEMMS or count > MAX_MIXED_GEMMS or rows > TILE_ROWS[-1]:
        raise ValueError(
            f"a launch takes {MAX_W8A8_GEMMS} W8A8 GEMMs, {MAX_MIXED_GEMMS} in all, of {TILE_ROWS[-1]} rows, not "
            f"{len(gemms)} and {count} of {rows}"
        )
    args = MixedLaunchArgs(count=count, dependent=len(dependent), rows=rows)
    for slot, (x, w, y) in zip(args.gemms, gemms, strict=False):
        n = w.shape[0]
        if w.shape[1] != k or x.codes.shape != (rows, k) or len(x.scales) < pitch_of(rows) or y.shape != (rows, n):
            raise ValueError(f"shapes {tuple(w.shape)}, {tuple(x.codes.shape)}, {tuple(y.shape)} do not fit each other")
        slot.weight, slot.x, slot.y = (
            cuda_pointer(w.codes, torch.int8),
            cuda_pointer(x.codes, torch.int8),
            cuda_pointer(y),
        )
        slot.weight_scales = cuda_pointer(w.scales, torch.float32)
        slot.weight_ratios = cuda_pointer(w.ratios, torch.int32)
        slot.input_scales = cuda_pointer(x.scales, torch.float32)
        slot.input_ratios = cuda_pointer(x.ratios, torch.int32)
        slot.n, slot.k = n, k
    fill_fp16_gemms(args.gemms[len(gemms) : count], (*fp16_gemms, *dependent), rows)
    tile_rows = next(size for size in TILE_ROWS if size >= rows)
    launch_hopper_kernel("rwkv_gemm_w8a8", args, Plan(tile_rows, FP16_SPLITS), prepare_hopper_gemm(device))
