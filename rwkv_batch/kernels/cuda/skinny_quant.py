"""Quantised weights times few fp16 rows (csrc/skinny/skinny_quant.cu).

On Hopper one row uses the tensor cores (csrc/skinny/hopper_row.cu).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rwkv_batch.kernels.activation import Activation
from rwkv_batch.kernels.cuda.hopper_gemm import has_hopper_gemm
from rwkv_batch.kernels.cuda.library import (
    MAX_GEMMS,
    NormMixArgs,
    QuantGemmArgs,
    QuantLaunchArgs,
    RowValueArgs,
    cuda_pointer,
    hopper_library,
    library,
)
from rwkv_batch.kernels.cuda.linear import Gemm, fits_skinny
from rwkv_batch.kernels.cuda.packed_weights import INPUT_STEP, NUMBERS
from rwkv_batch.kernels.cuda.quantised_rows import SKINNY_ROWS, QuantisedWeights
from rwkv_batch.model.quant.formats import Format

GROUP_INPUTS = 128
"""Inputs that share a scale in int8 and int4."""
MAX_MIXED_GEMM_ROWS = 8
"""Maximum rows of a skinny launch with fp16 GEMMs."""
MAX_ROW_INPUTS = 4096
"""Maximum inputs of hopper_row.cu."""


@dataclass(slots=True)
class QuantGemm:
    """One GEMM of a launch: y = activation(x @ W.T)."""

    linear: QuantisedWeights
    x: Tensor
    y: Tensor
    activation: Activation = Activation.NONE


def multiply_few(
    gemms: Sequence[QuantGemm],
    fp16_gemms: Sequence[Gemm] = (),
    norm: NormMixArgs | None = None,
    value: RowValueArgs | None = None,
) -> None:
    """Runs up to 8 GEMMs over the same few rows: one format, and fp16 with up to 8 rows.

    norm: what the one row is computed from; x of a GEMM is then its mix weight.
    value: ffn.value, multiplied by the output of the only GEMM where `fits_row_value` allows it; y is then not written.
    Raises ValueError for others.
    """
    rows, format_ = gemms[0].x.shape[0], gemms[0].linear.format
    count, max_rows = (
        len(gemms) + len(fp16_gemms),
        min(SKINNY_ROWS[format_], MAX_MIXED_GEMM_ROWS if fp16_gemms else SKINNY_ROWS[format_]),
    )
    if count > MAX_GEMMS or rows > max_rows:
        raise ValueError(f"a launch takes {MAX_GEMMS} GEMMs of {max_rows} rows, not {count} of {rows}")
    args = QuantLaunchArgs(count=count, rows=rows, format=NUMBERS[format_])
    if norm is not None:
        args.norm = norm
    if value is not None:
        args.value = value
    # Halves first: they are twice the bytes of an output, and would be what a launch waits for at its end.
    for slot, half in zip(args.gemms[: len(fp16_gemms)], fp16_gemms, strict=True):
        fill_fp16_gemm(slot, half, rows)
    for slot, m in zip(args.gemms[len(fp16_gemms) : count], gemms, strict=True):
        _fill_gemm(slot, m, format_, rows)
    inputs = [slot.k for slot in args.gemms[:count]]
    if rows == 1 and fits_hopper_row(gemms[0].linear, inputs):
        hopper_library().call("rwkv_hopper_row", ctypes.byref(args))
    else:
        library().call("rwkv_skinny_quant", ctypes.byref(args))


def fill_fp16_gemm(slot: QuantGemmArgs, half: Gemm, rows: int) -> None:
    """Fills one fp16 GEMM of a launch. Raises ValueError for tensors that do not match."""
    n, k = half.weight.shape
    if not fits_skinny(half.weight) or half.x.shape != (rows, k) or half.y.shape != (rows, n):
        raise ValueError(f"[{n}, {k}], {tuple(half.x.shape)}, {tuple(half.y.shape)} do not fit each other")
    slot.qweight, slot.x, slot.y = cuda_pointer(half.weight), cuda_pointer(half.x), cuda_pointer(half.y)
    slot.n, slot.k, slot.ld_y, slot.activation, slot.warps_k = n, k, n, half.activation, 8


def _fill_gemm(slot: QuantGemmArgs, m: QuantGemm, format_: Format, rows: int) -> None:
    """Fills one quantised GEMM; a launch has one format. Raises ValueError for tensors that do not match."""
    packed = m.linear.packed
    n, k = packed.rows, packed.columns
    if packed.format is not format_ or m.x.shape != (rows, k) or m.y.shape != (rows, n):
        raise ValueError(f"{packed.format} [{n}, {k}], {tuple(m.x.shape)}, {tuple(m.y.shape)} do not fit each other")
    slot.qweight, slot.scales = packed.qweight.data_ptr(), packed.scales.data_ptr()
    slot.x, slot.y = cuda_pointer(m.x), cuda_pointer(m.y, m.y.dtype)
    slot.n, slot.k, slot.ld_y = n, k, n
    slot.activation, slot.out_fp32 = m.activation, m.y.dtype == torch.float32
    chunks = k // INPUT_STEP[format_]
    slot.warps_k = 8 if chunks >= 8 else 4 if chunks >= 4 else 2 if chunks >= 2 else 1


def fits_hopper_row(linear: QuantisedWeights, inputs: Sequence[int]) -> bool:
    """Whether csrc/skinny/hopper_row.cu takes GEMMs in a launch with `linear`.

    inputs: the number of inputs of each GEMM
    """
    return has_hopper_gemm(linear.packed.qweight.device) and all(k <= MAX_ROW_INPUTS and k % 64 == 0 for k in inputs)


def fits_row_value(key: QuantisedWeights, num_sms: int) -> bool:
    """Whether csrc/skinny/hopper_row.cu also multiplies ffn.value: at most 128 rows of it per CTA.

    Not for fp8, where that was slower (docs/tries.md).
    """
    packed = key.packed
    is_known = packed.format is not Format.FP8 and packed.rows % GROUP_INPUTS == 0
    return is_known and packed.rows <= GROUP_INPUTS * num_sms and fits_hopper_row(key, [packed.columns])
