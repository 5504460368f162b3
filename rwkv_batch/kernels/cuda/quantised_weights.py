"""Quantised weights on a GPU. The row count determines the kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from rwkv_batch.kernels.cuda.hopper_gemm import prepare_hopper_gemm
from rwkv_batch.kernels.cuda.hopper_gemm_fp8 import TWO_PART_DTYPE
from rwkv_batch.kernels.cuda.hopper_gemm_int8 import INT8_DTYPE, pitch_of
from rwkv_batch.kernels.cuda.hopper_quantised_launch import fits_two_part_gemm, num_splits
from rwkv_batch.kernels.cuda.library import cuda_pointer, library
from rwkv_batch.kernels.cuda.packed_weights import Packed, has_fp8_gemm
from rwkv_batch.kernels.cuda.quantised_rows import QuantisedRows
from rwkv_batch.model.quant.formats import Format

SKINNY_ROWS = {Format.FP8: 15, Format.INT8: 16, Format.INT4: 8}
"""Maximum rows of the skinny kernel; for fp8 the rows for which it is used."""
SKINNY_ROWS_ON_HOPPER = {Format.FP8: 4, Format.INT8: 4, Format.INT4: 8}
"""The same on Hopper, whose kernels take over earlier."""


class QuantisedWeights:
    """Quantised [out, in], or [in, out] if transposed."""

    def __init__(self, packed: Packed, group: int) -> None:
        """group: inputs of two-byte rows that share a scale."""
        self.packed, self.group = packed, group

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
        """Whether so many rows become two-part rows first.

        For an fp32 result, see `returns_fp32`.
        """
        p = self.packed
        return (
            self.format in (Format.FP8, Format.INT8)
            and not self.uses_skinny_kernel(rows)
            and fits_two_part_gemm(rows, p.outputs, p.inputs, p.qweight.device)
        )

    def returns_fp32(self, rows: int) -> bool:
        """Whether two-byte rows give fp32 results: int8 without split-K."""
        p = self.packed
        if self.format is not Format.INT8 or not self.takes_two_part_rows(rows):
            return False
        return num_splits(rows, p.outputs, p.inputs, prepare_hopper_gemm(p.qweight.device).num_sms) == 1

    def empty_two_part_rows(self, rows: int, width: int, *count: int) -> QuantisedRows:
        """Returns empty two-part rows [*count, rows, 2, width] in this format's type."""
        device = self.packed.qweight.device
        if self.format is Format.FP8:
            return QuantisedRows(torch.empty(*count, rows, 2, width, dtype=TWO_PART_DTYPE, device=device), None)
        groups = *count, width // self.group, pitch_of(rows), 2
        scales = torch.empty(groups, dtype=torch.float32, device=device)
        return QuantisedRows(torch.empty(*count, rows, 2, width, dtype=INT8_DTYPE, device=device), scales)

    def to_two_part_rows(self, x: Tensor) -> QuantisedRows:
        """x [T, K] fp16 -> two-part rows in this format's type."""
        rows, k = x.shape
        parts = self.empty_two_part_rows(rows, k)
        if parts.scales is None:
            library().call("rwkv_two_part_rows", cuda_pointer(x), cuda_pointer(parts.codes, TWO_PART_DTYPE), rows, k)
        else:
            places = cuda_pointer(parts.codes, INT8_DTYPE), cuda_pointer(parts.scales, torch.float32)
            library().call("rwkv_two_byte_rows", cuda_pointer(x), *places, rows, k, pitch_of(rows), self.group)
        return parts
