"""Linear maps without bias, plain or quantised."""

from __future__ import annotations

import torch
from torch import Tensor

from rwkv_batch.model.quant.formats import Quantised, dequantise


class Linear:
    """Computes y = x @ weight.T for x [T, in], weight [out, in] of any float dtype. y has the dtype of x.

    On a CPU, products of 16-bit weights are accumulated in fp32 and rounded to 16 bits once.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.contiguous()

    @property
    def num_bytes(self) -> int:
        return self.weight.numel() * self.weight.element_size()

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, in] to [T, out]."""
        weight = self.weight
        rows = x.to(weight.dtype)
        if rows.shape[0] == 1:
            # A matrix-vector product runs at memory speed; a bf16 GEMM on a CPU does not.
            return torch.mv(weight, rows[0]).unsqueeze(0).to(x.dtype)
        return torch.nn.functional.linear(rows, weight).to(x.dtype)

    def to_fp32(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Map [T, in] to [T, out] fp32, without rounding to a narrower dtype if possible.

        out: receives the result.
        """
        y = self(x).float()
        return y if out is None else out.copy_(y)


class QuantLinear(Linear):
    """Computes y = x @ W.T for a quantised W [out, in], dequantised for every call in the dtype of x."""

    def __init__(self, stored: Quantised) -> None:
        self.stored = stored
        self.weight = stored.codes

    @property
    def num_bytes(self) -> int:
        """Bytes of quantised weights and scales."""
        return self.stored.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, in] to [T, out]."""
        return torch.nn.functional.linear(x, dequantise(self.stored, x.dtype))
