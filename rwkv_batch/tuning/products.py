"""Matrix products of training. In autocast, their factors are bf16 and their results fp32.

Weights may stay int8 or fp8 while a state or a LoRA is tuned: each product dequantises its matrix again.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from typing import Any

import torch
from torch import Tensor

from rwkv_batch.model.loader import LargestInputs, LayerLoader, Precision
from rwkv_batch.model.quant.formats import ROWS_AT_ONCE, Format, Quantised, dequantise, is_quantised
from rwkv_batch.model.quant_linear import QuantLinear
from rwkv_batch.model.state import ModelShape, StateFormat
from rwkv_batch.model.weights import Weights, expected_shapes


def is_compact(name: str) -> bool:
    """Return whether the tensor of this name stays quantised. The head keeps its dtype: its equal rows are shared."""
    return is_quantised(name) and not name.startswith("head.")


def compact_matrices(
    weights: Weights, format_: Format, device: torch.device, largest_inputs: LargestInputs | None
) -> dict[str, Quantised]:
    """Return the matrices [out, in] by name, as serving has them: from the disk, or quantised and saved.

    largest_inputs: for int8
    """
    precision = Precision(device, torch.float32, torch.float32, StateFormat.FP32, format_)
    loader = LayerLoader(
        weights, precision, make_quantised=lambda _, stored: QuantLinear(stored), largest_inputs=largest_inputs
    )
    found = {name: loader.linear(name) for name in weights.tensors if is_compact(name)}
    return {name: linear.stored for name, linear in found.items() if isinstance(linear, QuantLinear)}


def matrix_bytes(shape: ModelShape, format_: Format | None, itemsize: int) -> int:
    """Return the bytes of all weights, and of the copies of a matrix that one product needs.

    itemsize: of a number that is not quantised
    """
    total, largest = 0, 0
    for name, size in expected_shapes(shape).items():
        if format_ is None or not is_compact(name):
            total += math.prod(size) * itemsize
            continue
        out, inner = size
        total += out * inner + (8 * (out + inner) if format_ is Format.W8A8 else 4 * out)
        largest = max(largest, 2 * out * inner * itemsize + 3 * 4 * min(out, ROWS_AT_ONCE) * inner)
    return total + largest


def product(x: Tensor, matrix: Tensor) -> Tensor:
    """Return x @ matrix [in, out]. In autocast, factors are bf16, but sums stay fp32, also in the backward."""
    if not torch.is_autocast_enabled(x.device.type):
        return x @ matrix
    product: Tensor = _WideProduct.apply(x, matrix)
    return product


class _WideProduct(torch.autograd.Function):
    """The product of bf16 factors, with fp32 results."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor) -> Tensor:
        flat, narrow = x.flatten(0, -2).bfloat16(), matrix.bfloat16()
        ctx.save_for_backward(flat if matrix.requires_grad else None, narrow)
        ctx.shape, ctx.dtypes = x.shape, (x.dtype, matrix.dtype)
        return _wide_product(flat, narrow).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flat, narrow = ctx.saved_tensors
        grad = grads[0].flatten(0, -2).bfloat16()
        dx = _wide_product(grad, narrow.t()).view(ctx.shape).to(ctx.dtypes[0]) if ctx.needs_input_grad[0] else None
        return dx, _wide_product(flat.t(), grad).to(ctx.dtypes[1]) if ctx.needs_input_grad[1] else None


def _wide_product(x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return torch.mm(x, y, out_dtype=torch.float32) if x.is_cuda else x.float() @ y.float()


class CompactProduct(torch.autograd.Function):
    """Computes x @ W.T in the dtype of x. Keeps W's codes only, and has no gradient for them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stored: Quantised) -> Tensor:
        """x: [..., in]. stored: W [out, in]"""
        ctx.stored, ctx.is_wide = stored, torch.is_autocast_enabled(x.device.type)
        return _multiplied(x, dequantised(stored, torch.bfloat16 if ctx.is_wide else x.dtype).t(), ctx.is_wide)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """grads: one of [..., out]"""
        weight = dequantised(ctx.stored, torch.bfloat16 if ctx.is_wide else grads[0].dtype)
        return _multiplied(grads[0], weight, ctx.is_wide), None


def _multiplied(x: Tensor, matrix: Tensor, is_wide: bool) -> Tensor:
    """Return x @ matrix [in, out]; if `is_wide`, of bf16 factors in fp32."""
    if not is_wide:
        return x @ matrix
    return _wide_product(x.flatten(0, -2).bfloat16(), matrix).view(*x.shape[:-1], -1)


@functools.cache
def has_triton() -> bool:
    """Return whether Triton compiles for this machine's GPUs."""
    return importlib.util.find_spec("triton") is not None and torch.version.hip is None


def dequantised(stored: Quantised, dtype: torch.dtype) -> Tensor:
    """Return the matrix [out, in]. On a GPU by one kernel."""
    if not (stored.codes.is_cuda and has_triton()):
        return dequantise(stored, dtype)
    from rwkv_batch.tuning.gpu.dequantise import dequantised_on_gpu  # needs Triton

    return dequantised_on_gpu(stored, dtype)
