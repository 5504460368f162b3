"""Quantised linear maps in plain torch, for backends without kernels for them."""

from __future__ import annotations

import torch
from torch import Tensor

from rwkv_batch.model.layer import Linear
from rwkv_batch.model.quant import w8a8
from rwkv_batch.model.quant.formats import NOT_ROUNDED, Format, Quantised, dequantise, has_squared_inputs


class QuantLinear(Linear):
    """Computes y = x @ W.T for a quantised W [out, in]. W is dequantised for every call in the dtype of x."""

    def __init__(self, stored: Quantised) -> None:
        self.stored = stored
        self.weight = stored.codes

    @property
    def num_bytes(self) -> int:
        return self.stored.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, in] to [T, out]."""
        return torch.nn.functional.linear(x, dequantise(self.stored, x.dtype))


class W8A8Linear(QuantLinear):
    """Computes y = x @ W.T with integer inputs and weights: the definition in quant/w8a8.py."""

    def __init__(self, stored: Quantised, unsigned: bool = False) -> None:
        """unsigned: inputs are never negative"""
        super().__init__(stored)
        self.unsigned = unsigned

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, in] to [T, out], rounded to the dtype of x."""
        return self.to_fp32(x).to(x.dtype)

    def to_fp32(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See Linear.to_fp32."""
        assert self.stored.transform is not None, "int8 has a transform of its inputs"
        bits = self.stored.activation_bits
        codes = w8a8.quantise_rows(x, self.stored.transform, self.unsigned, bits)
        y = w8a8.product(codes, self.stored.in_segments(), bits)
        return y if out is None else out.copy_(y)


def plain_quantised(name: str, stored: Quantised) -> Linear:
    """Return a map in plain torch. For backends without kernels for quantised weights."""
    if stored.format is Format.W8A8 and stored.activation_bits != NOT_ROUNDED:
        return W8A8Linear(stored, unsigned=has_squared_inputs(name))
    return QuantLinear(stored)
