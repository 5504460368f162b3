"""Products of few rows of halves with weights in small codes, which are streamed (csrc/skinny_quant.cu).

On Hopper those of one row, of fp8 up to 4, multiply codes as they are by the parts of their inputs (csrc/wide_row.cu,
wide_few.cu).
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
    MAX_MAPS,
    NormMixArgs,
    QuantArgs,
    QuantMapArgs,
    RowValueArgs,
    cuda_pointer,
    hopper_library,
    library,
)
from rwkv_batch.kernels.cuda.linear import Gemm, fits_skinny
from rwkv_batch.kernels.cuda.packed_weights import INPUT_STEP, NUMBERS
from rwkv_batch.kernels.cuda.quantised_weights import SKINNY_ROWS, QuantisedWeights
from rwkv_batch.model.quant.formats import Format

GROUP_INPUTS = 128
"""That have a scale in common, of int8 and int4."""
MAX_MIXED_GEMM_ROWS = 8
"""Most rows for a launch of the streaming kernel that has maps of halves beside those in codes."""
HOPPER_FEW_ROWS = range(2, 5)
"""Of fp8 that Hopper's kernel for some rows is asked for; it takes 8."""
MAX_ROW_INPUTS = 4096
"""Of one row that Hopper's kernel for it takes."""


@dataclass(slots=True)
class QuantGemm:
    """One map of a grouped launch: y = activation(x @ W.T)."""

    linear: QuantisedWeights
    x: Tensor
    y: Tensor
    activation: Activation = Activation.NONE


def multiply_few(
    maps: Sequence[QuantGemm],
    halves: Sequence[Gemm] = (),
    norm: NormMixArgs | None = None,
    value: RowValueArgs | None = None,
) -> None:
    """Up to 8 maps over the same few rows in one launch: of one format, and up to 8 rows of halves beside them.

    `norm`: of what the launch makes its one row; a map reads its mix for x. `value`: what the only map's one row is
    multiplied by, where it `fits_row_value`; its y is not written. Raises ValueError for others.
    """
    rows, format_ = maps[0].x.shape[0], maps[0].linear.format
    count, most = (
        len(maps) + len(halves),
        min(SKINNY_ROWS[format_], MAX_MIXED_GEMM_ROWS if halves else SKINNY_ROWS[format_]),
    )
    if count > MAX_MAPS or rows > most:
        raise ValueError(f"a launch takes {MAX_MAPS} maps of {most} rows, not {count} of {rows}")
    args = QuantArgs(count=count, rows=rows, format=NUMBERS[format_])
    if norm is not None:
        args.norm = norm
    if value is not None:
        args.value = value
    # Halves first: they are twice the bytes of an output, and would be what a launch waits for at its end.
    for slot, half in zip(args.maps[: len(halves)], halves, strict=True):
        _fill_fp16_gemm(slot, half, rows)
    for slot, m in zip(args.maps[len(halves) : count], maps, strict=True):
        _fill_gemm(slot, m, format_, rows)
    inputs = [slot.k for slot in args.maps[:count]]
    if rows == 1 and fits_hopper_row(maps[0].linear, inputs):
        hopper_library().call("rwkv_wide_row", ctypes.byref(args))
    elif fits_hopper_few(maps[0].linear, inputs, rows):
        hopper_library().call("rwkv_wide_few", ctypes.byref(args))
    else:
        library().call("rwkv_skinny_quant", ctypes.byref(args))


def _fill_fp16_gemm(slot: QuantMapArgs, half: Gemm, rows: int) -> None:
    """A map of halves into its place in a launch. Raises ValueError for tensors that do not fit each other."""
    n, k = half.weight.shape
    if not fits_skinny(half.weight) or half.x.shape != (rows, k) or half.y.shape != (rows, n):
        raise ValueError(f"[{n}, {k}], {tuple(half.x.shape)}, {tuple(half.y.shape)} do not fit each other")
    slot.codes, slot.x, slot.y = cuda_pointer(half.weight), cuda_pointer(half.x), cuda_pointer(half.y)
    slot.n, slot.k, slot.ld_y, slot.activation, slot.warps_k = n, k, n, half.activation, 8


def _fill_gemm(slot: QuantMapArgs, m: QuantGemm, format_: Format, rows: int) -> None:
    """A map of codes likewise; those of a launch have one format."""
    packed = m.linear.packed
    n, k = packed.rows, packed.columns
    if packed.format is not format_ or m.x.shape != (rows, k) or m.y.shape != (rows, n):
        raise ValueError(f"{packed.format} [{n}, {k}], {tuple(m.x.shape)}, {tuple(m.y.shape)} do not fit each other")
    slot.codes, slot.scales = packed.codes.data_ptr(), packed.scales.data_ptr()
    slot.x, slot.y = cuda_pointer(m.x), cuda_pointer(m.y, m.y.dtype)
    slot.n, slot.k, slot.ld_y = n, k, n
    slot.activation, slot.float_out = m.activation, m.y.dtype == torch.float32
    chunks = k // INPUT_STEP[format_]
    slot.warps_k = 8 if chunks >= 8 else 4 if chunks >= 4 else 2 if chunks >= 2 else 1


def fits_hopper_few(linear: QuantisedWeights, inputs: Sequence[int], rows: int) -> bool:
    """Whether Hopper's kernel for some rows of fp8 (csrc/wide_few.cu) takes maps of so many inputs."""
    is_known = rows in HOPPER_FEW_ROWS and linear.format is Format.FP8 and all(k % 64 == 0 for k in inputs)
    return is_known and has_hopper_gemm(linear.packed.codes.device)


def fits_hopper_row(linear: QuantisedWeights, inputs: Sequence[int]) -> bool:
    """Whether Hopper's kernel for one row (csrc/wide_row.cu) takes maps of so many inputs in a launch with `linear`."""
    return has_hopper_gemm(linear.packed.codes.device) and all(k <= MAX_ROW_INPUTS and k % 64 == 0 for k in inputs)


def fits_row_value(key: QuantisedWeights, num_sms: int) -> bool:
    """Whether the launch of one row of `key` (csrc/wide_row.cu) takes ffn.value as well, each block a group at most.

    Not of fp8: that was slower (docs/notebook.md).
    """
    packed = key.packed
    is_known = packed.format is not Format.FP8 and packed.rows % GROUP_INPUTS == 0
    return is_known and packed.rows <= GROUP_INPUTS * num_sms and fits_hopper_row(key, [packed.columns])
