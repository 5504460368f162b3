"""What kernels around products of small codes pass on: rows as codes or in parts, and what a half layer adds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rwkv_batch.kernels.cuda.hopper_gemm_int8 import INT8_DTYPE
from rwkv_batch.kernels.cuda.library import NormMixArgs, cuda_pointer, hopper_library, library

SCALE_ALIGNMENT = 4
"""Scales of rows begin at 16 bytes in a product."""


class QuantisedRows(NamedTuple):
    """Rows as fp8 codes: x = codes * scale; or in two parts: x = codes[:, 0] + codes[:, 1] / 8.

    For weights of int8 these are bytes: x = (256 * codes[:, 0] + codes[:, 1]) * scale (csrc/row_bytes.cuh).
    """

    codes: Tensor
    """[T, K] e4m3; or [T, 2, K] e5m2 or int8"""
    scales: Tensor | None
    """[T] fp32: a row's largest becomes 448; None: parts of e5m2; of bytes as `Int8Gemm.x_scales`"""

    @property
    def is_two_part(self) -> bool:
        """Whether these are two parts, or bytes."""
        return self.codes.dim() == 3


@dataclass(slots=True)
class QuantisedMix:
    """Mixed inputs of a half layer, the first of which are there as codes."""

    codes: Tensor
    """[3 or 1, T, C] e4m3; or parts [3 or 1, T, 2, C] e5m2 or int8"""
    scales: Tensor | None
    """[3 or 1, T] fp32; None: parts of e5m2; of bytes [3 or 1, C / 128, pitch, 2] fp32"""
    halves: Tensor
    """[4 or 0, T, C] fp16: v, w, a, g"""

    @property
    def is_two_part(self) -> bool:
        """Whether these are two parts, or bytes."""
        return self.codes.dim() == 4

    @property
    def in_bytes(self) -> bool:
        """Whether codes are those of int8 weights' rows (RowCodes)."""
        return self.codes.dtype == INT8_DTYPE

    @property
    def scale_pitch(self) -> int:
        """How far apart the scales of two mixes lie, or in bytes of two groups; 0: there are none."""
        if self.scales is None:
            return 0
        return self.scales.shape[2] if self.in_bytes else self.scales.stride(0)

    def __getitem__(self, i: int) -> QuantisedRows:
        """Of those in codes."""
        return QuantisedRows(self.codes[i], None if self.scales is None else self.scales[i])


@dataclass(slots=True)
class DeferredMix:
    """The mixed inputs of a half layer of one row, which the launch that multiplies them makes."""

    mix: Tensor
    """[6 or 1, 1, C] fp16: the weights of the mixes, in the place of the mixed inputs"""
    args: NormMixArgs
    held: tuple[Tensor, ...]
    """what that launch reads and writes: no other tensor may be in its place before"""

    def __getitem__(self, i: int) -> DeferredMix:
        """The only one of a channel mix. Raises IndexError for others."""
        if i or len(self.mix) > 1:
            raise IndexError(f"mixed input {i} of {len(self.mix)} is made with the others")
        return self


class SingleRowInput(NamedTuple):
    """The mixed input of a channel mix of one row, whose value's product is in the launch of its key's."""

    x: Tensor
    """[1, C] fp16"""
    added: Tensor
    """[8, C / 8] int64: zeros, to which that launch adds"""


class PartialSums(NamedTuple):
    """What a half layer adds to the residual stream, its sums not added up: shift_mix does."""

    shares: Tensor
    """[S, T, C] fp32: their sum over S is meant, in that order and rounded to fp16"""


class RowSums(NamedTuple):
    """What a channel mix adds to the residual stream of one row, as blocks have added it up (csrc/row_sums.cuh)."""

    sums: Tensor
    """[8, C / 8] int64: units of 2^-32, of 8 neighbouring channels each in another line"""


def quantise_rows(x: Tensor, relu_square: bool = False) -> QuantisedRows:
    """x [T, K] fp16, or max(x, 0)^2, as codes."""
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
    """x [T, C] fp16, or zeros, and what is added to it -> [T, C] fp16."""
    count, rows, width = delta.shares.shape
    out = torch.empty(rows, width, dtype=torch.float16, device=delta.shares.device)
    places = cuda_pointer(x), cuda_pointer(delta.shares, torch.float32), cuda_pointer(out)
    library().call("rwkv_add_shares", *places, count, out.numel())
    return out


def add_sums(x: Tensor, delta: RowSums) -> Tensor:
    """x [1, C] fp16 and what is added to it -> [1, C] fp16."""
    out = torch.empty_like(x)
    places = cuda_pointer(x), cuda_pointer(delta.sums, torch.int64), cuda_pointer(out)
    hopper_library().call("rwkv_add_sums", *places, x.shape[1])
    return out


def sum_partials(delta: Tensor | PartialSums) -> Tensor:
    """[T, C] fp16."""
    return add_partial_sums(None, delta) if isinstance(delta, PartialSums) else delta
