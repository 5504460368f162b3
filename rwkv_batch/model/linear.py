"""A linear map without bias. Its storage is its own business: precision and quantisation live here."""

from __future__ import annotations

import torch
from torch import Tensor

from rwkv_batch.model.quant.formats import Quantised, dequantise


class Linear:
    """y = x @ weight.T for x [T, in]; weight [out, in] in any float type, y in the type of x.

    With 16-bit weights on a CPU the products are accumulated in fp32 and rounded to 16 bits once.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.contiguous()

    @property
    def num_bytes(self) -> int:
        """Bytes that the matrix takes."""
        return self.weight.numel() * self.weight.element_size()

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        weight = self.weight
        rows = x.to(weight.dtype)
        if rows.shape[0] == 1:
            # A matrix-vector product reads the weights once at memory speed; the GEMM path does not (bf16, CPU).
            return torch.mv(weight, rows[0]).unsqueeze(0).to(x.dtype)
        return torch.nn.functional.linear(rows, weight).to(x.dtype)

    def to_fp32(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[T, in] -> [T, out] fp32: as a call, but not rounded to a narrower type where that can be helped.

        `out`: where they are to be put.
        """
        y = self(x).float()
        return y if out is None else out.copy_(y)


class QuantLinear(Linear):
    """y = x @ W.T for W [out, in] in small codes: W is made anew for every product, in the type of x."""

    def __init__(self, stored: Quantised) -> None:
        self.stored = stored
        self.weight = stored.codes

    @property
    def num_bytes(self) -> int:
        """Bytes of codes and scales."""
        return self.stored.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        return torch.nn.functional.linear(x, dequantise(self.stored, x.dtype))
