"""Quantised rows, the weights that they are multiplied with, and the forms of a half layer's result.

The result is the half layer's part of the residual stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rwkv_batch.kernels.cuda.hopper_gemm_fp8 import TWO_PART_DTYPE
from rwkv_batch.kernels.cuda.hopper_quantised_launch import fits_two_part_gemm
from rwkv_batch.kernels.cuda.library import NormMixArgs, cuda_pointer, hopper_library, library
from rwkv_batch.kernels.cuda.packed_weights import Packed, has_fp8_gemm
from rwkv_batch.kernels.cuda.w8a8.products import ExactSums, W8A8Mix
from rwkv_batch.model.quant.formats import Format

SCALE_ALIGNMENT = 4
"""Alignment of rows' scales in elements: 16 bytes."""
SKINNY_ROWS = {Format.FP8: 15, Format.INT4: 8}
"""Maximum rows of the skinny kernel; for fp8 the rows for which it is used."""
SKINNY_ROWS_ON_HOPPER = {Format.FP8: 1, Format.INT4: 8}
"""The same on Hopper, whose kernels take over earlier."""


class QuantisedRows(NamedTuple):
    """fp8 rows: x = codes * scale; or two-part rows: x = codes[:, 0] + codes[:, 1] / 8."""

    codes: Tensor
    """[T, K] e4m3; or [T, 2, K] e5m2"""
    scales: Tensor | None
    """[T] fp32, maximum 448; None: e5m2"""

    @property
    def is_two_part(self) -> bool:
        """Whether these are two-part rows."""
        return self.codes.dim() == 3


@dataclass(slots=True)
class QuantisedMix:
    """Mixed inputs of a half layer, the first of them quantised."""

    codes: Tensor
    """[3 or 1, T, C] e4m3; or two-part [3 or 1, T, 2, C] e5m2"""
    scales: Tensor | None
    """[3 or 1, T] fp32; None: e5m2"""
    fp16: Tensor
    """[4 or 0, T, C] fp16: v, w, a, g"""

    @property
    def is_two_part(self) -> bool:
        """Whether these are two-part rows."""
        return self.codes.dim() == 4

    @property
    def scale_pitch(self) -> int:
        """Distance of two mixes' scales; 0 without scales."""
        return 0 if self.scales is None else self.scales.stride(0)

    def __getitem__(self, i: int) -> QuantisedRows:
        """One of the quantised mixes."""
        return QuantisedRows(self.codes[i], None if self.scales is None else self.scales[i])


MixedInputs = Tensor | QuantisedMix | W8A8Mix
"""Mixed inputs [6 or 1, T, C] fp16, or the first of them quantised."""


@dataclass(slots=True)
class DeferredMix:
    """One row's mixed inputs, computed by the launch that multiplies them."""

    mix: Tensor
    """[6 or 1, 1, C] fp16: mix weights, in place of the mixed inputs"""
    args: NormMixArgs
    held: tuple[Tensor, ...]
    """tensors of that launch, kept alive until then"""

    def __getitem__(self, i: int) -> DeferredMix:
        """The only mix of a channel mix. Raises IndexError for others."""
        if i or len(self.mix) > 1:
            raise IndexError(f"mixed input {i} of {len(self.mix)} is made with the others")
        return self


class SingleRowInput(NamedTuple):
    """One row's mixed input of a channel mix. Its ffn.value runs in the launch of ffn.key."""

    x: Tensor
    """[1, C] fp16"""
    added: Tensor
    """[8, C / 8] int64: zeros, the launch adds to them"""


class PartialSums(NamedTuple):
    """A half layer's output as split-K partials; shift_mix reduces them."""

    partials: Tensor
    """[S, T, C] fp32: summed over S in order, then rounded to fp16"""


class RowSums(NamedTuple):
    """One row's channel mix output in fixed point (csrc/fixed_point_sums.cuh)."""

    sums: Tensor
    """[8, C / 8] int64, units of 2^-32"""


def quantise_rows(x: Tensor, relu_square: bool = False) -> QuantisedRows:
    """Quantises x [T, K] fp16, or max(x, 0)^2, to fp8."""
    rows, k = x.shape
    codes = torch.empty(rows, k, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    library().call(
        "rwkv_quantise_rows",
        cuda_pointer(x),
        codes.data_ptr(),
        cuda_pointer(scales, torch.float32),
        rows,
        k,
        relu_square,
    )
    return QuantisedRows(codes, scales)


def add_partial_sums(x: Tensor | None, delta: PartialSums) -> Tensor:
    """Returns x [T, C] fp16, or zeros, plus delta: [T, C] fp16."""
    count, rows, width = delta.partials.shape
    out = torch.empty(rows, width, dtype=torch.float16, device=delta.partials.device)
    places = cuda_pointer(x), cuda_pointer(delta.partials, torch.float32), cuda_pointer(out)
    library().call("rwkv_add_partials", *places, count, out.numel())
    return out


def add_sums(x: Tensor, delta: RowSums) -> Tensor:
    """Returns x [1, C] fp16 plus delta: [1, C] fp16."""
    out = torch.empty_like(x)
    places = cuda_pointer(x), cuda_pointer(delta.sums, torch.int64), cuda_pointer(out)
    hopper_library().call("rwkv_add_fixed_point", *places, x.shape[1])
    return out


def add_exact_sums(x: Tensor, delta: ExactSums) -> Tensor:
    """Returns x [T, C] fp16 plus delta: [T, C] fp16."""
    out, (sums, rows, outputs) = torch.empty_like(x), delta
    scales = cuda_pointer(rows, torch.float32), cuda_pointer(outputs, torch.float32)
    places = cuda_pointer(x), cuda_pointer(sums, torch.int32), *scales, cuda_pointer(out)
    library().call("rwkv_add_exact_sums", *places, *x.shape)
    return out


def sum_partials(delta: Tensor | PartialSums) -> Tensor:
    """Returns [T, C] fp16."""
    return add_partial_sums(None, delta) if isinstance(delta, PartialSums) else delta


class QuantisedWeights:
    """Quantised [out, in], or [in, out] if transposed. The row count determines the kernel."""

    def __init__(self, packed: Packed) -> None:
        self.packed = packed

    @property
    def num_bytes(self) -> int:
        """Bytes of weights and scales."""
        return self.packed.num_bytes

    @property
    def format(self) -> Format:
        return self.packed.format

    def uses_skinny_kernel(self, rows: int) -> bool:
        """Whether the skinny kernel takes so many rows; it takes no transposed weights."""
        if self.packed.transposed:
            return False
        max_rows = SKINNY_ROWS_ON_HOPPER if self.packed.fits_weight_only(rows) else SKINNY_ROWS
        return rows <= max_rows[self.format]

    def takes_fp16_rows(self, rows: int) -> bool:
        """Whether an own kernel takes so many fp16 rows."""
        return self.uses_skinny_kernel(rows) or self.packed.fits_weight_only(rows)

    def takes_fp8_rows(self, rows: int) -> bool:
        """Whether so many rows are quantised to fp8 first."""
        return not self.takes_fp16_rows(rows) and has_fp8_gemm(self.format, self.packed.qweight.device)

    def takes_two_part_rows(self, rows: int) -> bool:
        """Whether so many rows become two-part rows first."""
        p = self.packed
        return (
            self.format is Format.FP8
            and not self.uses_skinny_kernel(rows)
            and fits_two_part_gemm(rows, p.outputs, p.inputs, p.qweight.device)
        )

    def empty_two_part_rows(self, rows: int, width: int, *count: int) -> QuantisedRows:
        """Returns empty two-part rows [*count, rows, 2, width]."""
        codes = torch.empty(*count, rows, 2, width, dtype=TWO_PART_DTYPE, device=self.packed.qweight.device)
        return QuantisedRows(codes, None)

    def to_two_part_rows(self, x: Tensor) -> QuantisedRows:
        """x [T, K] fp16 -> two-part rows."""
        rows, k = x.shape
        parts = self.empty_two_part_rows(rows, k)
        library().call("rwkv_two_part_rows", cuda_pointer(x), cuda_pointer(parts.codes, TWO_PART_DTYPE), rows, k)
        return parts
