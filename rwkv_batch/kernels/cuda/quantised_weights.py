"""Quantised weights on a GPU. The row count determines the kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from rwkv_batch.kernels.cuda.hopper_gemm_fp8 import TWO_PART_DTYPE
from rwkv_batch.kernels.cuda.hopper_quantised_launch import fits_two_part_gemm
from rwkv_batch.kernels.cuda.library import cuda_pointer, library
from rwkv_batch.kernels.cuda.packed_weights import Packed, has_fp8_gemm
from rwkv_batch.kernels.cuda.quantised_rows import QuantisedRows
from rwkv_batch.model.quant.formats import Format

SKINNY_ROWS = {Format.FP8: 15, Format.INT4: 8}
"""Maximum rows of the skinny kernel; for fp8 the rows for which it is used."""
SKINNY_ROWS_ON_HOPPER = {Format.FP8: 4, Format.INT4: 8}
"""The same on Hopper, whose kernels take over earlier."""


class QuantisedWeights:
    """Quantised [out, in], or [in, out] if transposed."""

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
