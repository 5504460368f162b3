"""GEMMs with quantised weights: chooses the kernel by row count.

* few rows: skinny kernels (skinny_quant.py)
* more, Hopper: two-part rows (csrc/gemm/gemm_two_part.cu), or weights converted to fp16
(csrc/weight_only/)
* many: fp8 rows with a scale each times fp8 weights on the fp8 units, or dequantised weights and cuBLAS
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rwkv_batch.kernels.activation import Activation
from rwkv_batch.kernels.cuda.hopper_gemm import Fp16Gemm, prepare_hopper_gemm
from rwkv_batch.kernels.cuda.hopper_gemm_fp8 import Fp8Gemm, fits_hopper_fp8, launch_hopper_fp8, may_return_fp32
from rwkv_batch.kernels.cuda.hopper_gemm_weight_only import launch_weight_only
from rwkv_batch.kernels.cuda.hopper_quantised_launch import num_splits
from rwkv_batch.kernels.cuda.library import cuda_pointer, library
from rwkv_batch.kernels.cuda.packed_weights import scaled_mm
from rwkv_batch.kernels.cuda.quantised_rows import PartialSums, QuantisedRows, QuantisedWeights, quantise_rows
from rwkv_batch.kernels.cuda.skinny_quant import QuantGemm, multiply_few


@dataclass(slots=True)
class RowsGemm:
    """One GEMM over quantised rows: y = activation((codes * scales) @ W.T), or two-part rows (QuantisedRows)."""

    linear: QuantisedWeights
    codes: Tensor
    scales: Tensor | None
    y: Tensor
    activation: Activation = Activation.NONE


def multiply_into(gemms: Sequence[QuantGemm]) -> None:
    """Runs up to 8 GEMMs of one format and one row count."""
    rows, first = gemms[0].x.shape[0], gemms[0].linear
    if first.uses_skinny_kernel(rows):
        multiply_few(gemms)
    elif first.takes_two_part_rows(rows) and gemms[0].y.dtype == torch.float16:
        multiply_quantised_rows([RowsGemm(m.linear, *m.linear.to_two_part_rows(m.x), m.y, m.activation) for m in gemms])
    elif first.packed.fits_weight_only(rows):
        launch_weight_only([m.linear.packed.weight_only_gemm(m.x, m.y, m.activation) for m in gemms])
    elif first.takes_fp8_rows(rows):
        multiply_quantised_rows([RowsGemm(m.linear, *quantise_rows(m.x), m.y, m.activation) for m in gemms])
    else:
        for m in gemms:
            dequantised_weight = m.linear.packed.dequantised()
            torch.mm(
                m.x,
                dequantised_weight if m.linear.packed.transposed else dequantised_weight.T,
                out_dtype=m.y.dtype,
                out=m.y,
            )
            apply_activation(m.y, m.activation)


def multiply_rows(linear: QuantisedWeights, x: QuantisedRows) -> Tensor:
    """Quantised rows [T, in] -> [T, out] fp16."""
    y = torch.empty(len(x.codes), linear.packed.outputs, dtype=torch.float16, device=x.codes.device)
    multiply_quantised_rows([RowsGemm(linear, *x, y)])
    return y


def multiply_to_partials(linear: QuantisedWeights, x: QuantisedRows) -> Tensor | PartialSums:
    """Multiplies two-part rows [T, 2, in] -> [T, out] fp16. With split-K, returns the partials of it instead."""
    rows, packed = len(x.codes), linear.packed
    device = x.codes.device
    count = num_splits(rows, packed.outputs, packed.inputs, prepare_hopper_gemm(device).num_sms)
    if count == 1:
        return multiply_rows(linear, x)
    partials = torch.empty(count, rows, packed.outputs, dtype=torch.float32, device=device)
    multiply_quantised_rows([RowsGemm(linear, *x, partials)])
    return PartialSums(partials)


def multiply_quantised_rows(
    gemms: Sequence[RowsGemm], fp16_gemms: Sequence[Fp16Gemm] = (), dependent: Sequence[Fp16Gemm] = ()
) -> None:
    """Runs up to 8 GEMMs over quantised rows: the own kernel where `fits_hopper_fp8` allows it, else cuBLAS.

    Two-part rows and results need the own kernels. fp16_gemms, dependent: see `launch_hopper_fp8`.
    """
    first = gemms[0]
    if first.scales is None or _fits_hopper_gemm(first):
        launch_hopper_fp8([_fp8_gemm(m) for m in gemms], fp16_gemms, dependent)
        return
    for m in gemms:
        assert m.scales is not None, "parts are multiplied above"
        scaled_mm(m.linear.packed, m.codes, m.scales, m.y)
        apply_activation(m.y, m.activation)


def _fits_hopper_gemm(m: RowsGemm) -> bool:
    """Whether the own kernel takes these fp8 rows."""
    packed = m.linear.packed
    rows, n, k, device = len(m.codes), packed.outputs, packed.inputs, m.y.device
    if m.y.dtype == torch.float16:
        return fits_hopper_fp8(rows, n, k, device, packed.transposed)
    return not packed.transposed and may_return_fp32(rows, n, k, device)


def _fp8_gemm(m: RowsGemm) -> Fp8Gemm:
    packed = m.linear.packed
    return Fp8Gemm(packed.qweight, packed.scales, m.codes, m.scales, m.y, m.activation, packed.transposed)


def apply_activation(y: Tensor, activation: Activation) -> None:
    """Applies an activation in place to y [T, out] fp16.

    Raises ValueError for those that follow no quantised weight.
    """
    if activation is Activation.RELU_SQUARED:
        library().call("rwkv_relu_square", cuda_pointer(y), y.numel())
    elif activation is Activation.SIGNED_SQUARE:
        y.mul_(y.abs())
    elif activation is not Activation.NONE:
        raise ValueError(f"no product of small codes is followed by {activation.name}")
