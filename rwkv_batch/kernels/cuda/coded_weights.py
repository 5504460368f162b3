"""Weights in small codes on a GPU, and which kernel multiplies how many rows by them."""

from __future__ import annotations

import torch
from torch import Tensor

from rwkv_batch.kernels.cuda.coded_launch import fits_wide_parts, num_shares
from rwkv_batch.kernels.cuda.cublas_fp8 import is_multiplied_by_codes
from rwkv_batch.kernels.cuda.library import cuda_pointer, library
from rwkv_batch.kernels.cuda.packed_codes import Packed
from rwkv_batch.kernels.cuda.row_codes import RowCodes
from rwkv_batch.kernels.cuda.wide import prepare_wide
from rwkv_batch.kernels.cuda.wide_fp8 import PARTS
from rwkv_batch.kernels.cuda.wide_int8 import BYTES, pitch_of
from rwkv_batch.model.quant.formats import Format

FEW_ROWS = {Format.FP8: 15, Format.INT8: 16, Format.INT4: 8}
"""Most rows that the streaming kernel takes, and for fp8 is asked for."""
FEW_ROWS_ON_HOPPER = {Format.FP8: 4, Format.INT8: 4, Format.INT4: 8}
"""The same beside Hopper's kernels of more rows."""


class CodedWeights:
    """Codes [out, in], or [in, out] if transposed."""

    def __init__(self, packed: Packed, group: int) -> None:
        """group: inputs that share a scale where they are bytes."""
        self.packed, self.group = packed, group

    @property
    def num_bytes(self) -> int:
        """Bytes of codes and scales."""
        return self.packed.num_bytes

    @property
    def format(self) -> Format:
        """How it is stored."""
        return self.packed.format

    def is_few(self, rows: int) -> bool:
        """Whether so many rows are the streaming kernel's, which takes what is not transposed."""
        if self.packed.transposed:
            return False
        most = FEW_ROWS_ON_HOPPER if self.packed.fits_codes(rows) else FEW_ROWS
        return rows <= most[self.format]

    def takes_halves(self, rows: int) -> bool:
        """Whether a kernel of our own multiplies so many rows as they are."""
        return self.is_few(rows) or self.packed.fits_codes(rows)

    def takes_codes(self, rows: int) -> bool:
        """Whether so many rows are multiplied as fp8 codes."""
        return not self.takes_halves(rows) and is_multiplied_by_codes(self.format, self.packed.codes.device)

    def takes_parts(self, rows: int) -> bool:
        """Whether so many rows are multiplied in two parts, unless results are fp32 (`gives_floats`)."""
        p = self.packed
        return (
            self.format in (Format.FP8, Format.INT8)
            and not self.is_few(rows)
            and fits_wide_parts(rows, p.outputs, p.inputs, p.codes.device)
        )

    def gives_floats(self, rows: int) -> bool:
        """Whether rows in bytes give results in fp32: those of int8, where no blocks share a product's k."""
        p = self.packed
        if self.format is not Format.INT8 or not self.takes_parts(rows):
            return False
        return num_shares(rows, p.outputs, p.inputs, len(prepare_wide(p.codes.device).partial)) == 1

    def empty_parts(self, rows: int, width: int, *count: int) -> RowCodes:
        """Room for rows [width] in two parts as its format has them; `count` times, with that many before its sizes."""
        device = self.packed.codes.device
        if self.format is Format.FP8:
            return RowCodes(torch.empty(*count, rows, 2, width, dtype=PARTS, device=device), None)
        groups = *count, width // self.group, pitch_of(rows), 2
        scales = torch.empty(groups, dtype=torch.float32, device=device)
        return RowCodes(torch.empty(*count, rows, 2, width, dtype=BYTES, device=device), scales)

    def row_parts(self, x: Tensor) -> RowCodes:
        """x [T, K] fp16 in two parts as its format has them."""
        rows, k = x.shape
        parts = self.empty_parts(rows, k)
        if parts.scales is None:
            library().call("rwkv_row_parts", cuda_pointer(x), cuda_pointer(parts.codes, PARTS), rows, k)
        else:
            places = cuda_pointer(parts.codes, BYTES), cuda_pointer(parts.scales, torch.float32)
            library().call("rwkv_row_bytes", cuda_pointer(x), *places, rows, k, pitch_of(rows), self.group)
        return parts
