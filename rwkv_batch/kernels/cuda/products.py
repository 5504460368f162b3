"""Products with weights in small codes, each by the kernel for so many rows.

Few rows: kernels that stream the codes (few_rows.py). More, on Hopper: codes as they are by rows in two parts (of fp8
csrc/wide_parts.cu, of int8 wide_int8.cuh), or codes made halves on its tensor cores (csrc/wide_codes.cuh). More still:
fp8 weights times fp8 activations (a scale per row) on the GPU's fp8 units, or the codes made halves for cuBLAS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rwkv_batch.kernels.activation import Activation
from rwkv_batch.kernels.cuda.coded_launch import num_shares
from rwkv_batch.kernels.cuda.coded_weights import CodedWeights
from rwkv_batch.kernels.cuda.cublas_fp8 import scaled_product
from rwkv_batch.kernels.cuda.few_rows import QuantMap, multiply_few
from rwkv_batch.kernels.cuda.library import cuda_pointer, library
from rwkv_batch.kernels.cuda.row_codes import RowCodes, Shares, quantise_rows
from rwkv_batch.kernels.cuda.wide import HalfMap, prepare_wide
from rwkv_batch.kernels.cuda.wide_codes import launch_codes
from rwkv_batch.kernels.cuda.wide_fp8 import Fp8Map, fits_wide_fp8, floats_by_wide_fp8, launch_wide_fp8
from rwkv_batch.kernels.cuda.wide_int8 import BYTES, Int8Map, launch_wide_int8


@dataclass(slots=True)
class CodeMap:
    """One map over rows that are fp8 codes already: y = activation((codes * scales) @ W.T), or in parts (RowCodes)."""

    linear: CodedWeights
    codes: Tensor
    scales: Tensor | None
    y: Tensor
    activation: Activation = Activation.NONE
    y_scales: Tensor | None = None
    """of results in bytes"""


def multiply_into(maps: Sequence[QuantMap]) -> None:
    """Up to 8 maps of one format over the same number of rows each."""
    rows, first = maps[0].x.shape[0], maps[0].linear
    if first.is_few(rows):
        multiply_few(maps)
    elif first.takes_parts(rows) and maps[0].y.dtype == torch.float16:
        multiply_codes([CodeMap(m.linear, *m.linear.row_parts(m.x), m.y, m.activation) for m in maps])
    elif maps[0].y.dtype == torch.float32 and all(m.linear.gives_floats(rows) for m in maps):
        for m in maps:  # a share that is the whole product
            multiply_codes([CodeMap(m.linear, *m.linear.row_parts(m.x), m.y.unsqueeze(0))])
    elif first.packed.fits_codes(rows):
        launch_codes([m.linear.packed.codes_map(m.x, m.y, m.activation) for m in maps])
    elif first.takes_codes(rows):
        multiply_codes([CodeMap(m.linear, *quantise_rows(m.x), m.y, m.activation) for m in maps])
    else:
        for m in maps:
            meant = m.linear.packed.dequantised()
            torch.mm(m.x, meant if m.linear.packed.transposed else meant.T, out_dtype=m.y.dtype, out=m.y)
            apply_activation(m.y, m.activation)


def multiply_rows(linear: CodedWeights, x: RowCodes) -> Tensor:
    """Rows [T, in] as codes or in two parts -> [T, out] fp16."""
    y = torch.empty(len(x.codes), linear.packed.outputs, dtype=torch.float16, device=x.codes.device)
    multiply_codes([CodeMap(linear, *x, y)])
    return y


def multiply_to_shares(linear: CodedWeights, x: RowCodes) -> Tensor | Shares:
    """Rows [T, 2, in] in two parts -> [T, out] fp16, as shares where blocks share a product's k."""
    rows, packed = len(x.codes), linear.packed
    device = x.codes.device
    count = num_shares(rows, packed.outputs, packed.inputs, len(prepare_wide(device).partial))
    if count == 1:
        return multiply_rows(linear, x)
    shares = torch.empty(count, rows, packed.outputs, dtype=torch.float32, device=device)
    multiply_codes([CodeMap(linear, *x, shares)])
    return Shares(shares)


def multiply_codes(maps: Sequence[CodeMap], halves: Sequence[HalfMap] = (), late: Sequence[HalfMap] = ()) -> None:
    """Up to 8 maps of fp8 weights over rows of fp8 codes: our own kernel where `fits_wide_fp8` says so, else cuBLAS.

    Rows in parts are our own kernels', of fp8 or of int8, and so are results in parts.

    `halves`, `late`: maps of halves for our own kernel, see `launch_wide_fp8`.
    """
    first = maps[0]
    if first.codes.dtype == BYTES:
        launch_wide_int8([_int8_map(m) for m in maps], halves, late)
        return
    if first.scales is None or _fits_wide(first):
        launch_wide_fp8([_fp8_map(m) for m in maps], halves, late)
        return
    for m in maps:
        assert m.scales is not None, "parts are multiplied above"
        scaled_product(m.linear.packed, m.codes, m.scales, m.y)
        apply_activation(m.y, m.activation)


def _fits_wide(m: CodeMap) -> bool:
    """Whether our own kernel multiplies such rows of fp8 codes."""
    packed = m.linear.packed
    rows, n, k, device = len(m.codes), packed.outputs, packed.inputs, m.y.device
    if m.y.dtype == torch.float16:
        return fits_wide_fp8(rows, n, k, device, packed.transposed)
    return not packed.transposed and floats_by_wide_fp8(rows, n, k, device)


def _fp8_map(m: CodeMap) -> Fp8Map:
    packed = m.linear.packed
    return Fp8Map(packed.codes, packed.scales, m.codes, m.scales, m.y, m.activation, packed.transposed)


def _int8_map(m: CodeMap) -> Int8Map:
    assert m.scales is not None, "bytes have scales"
    packed = m.linear.packed
    return Int8Map(packed.codes, packed.scales, m.codes, m.scales, m.y, m.y_scales, m.activation, packed.transposed)


def apply_activation(y: Tensor, activation: Activation) -> None:
    """In place on y [T, out] fp16, of those that follow a matrix in small codes. Raises ValueError for others."""
    if activation is Activation.RELU_SQUARED:
        library().call("rwkv_relu_square", cuda_pointer(y), y.numel())
    elif activation is Activation.SIGNED_SQUARE:
        y.mul_(y.abs())
    elif activation is not Activation.NONE:
        raise ValueError(f"no product of small codes is followed by {activation.name}")
