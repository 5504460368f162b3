"""The plain linear map of small weights, on any device: the definition of what kernels compute."""

from __future__ import annotations

import torch
from torch import Tensor

from rwkv_batch.model.linear import Linear
from rwkv_batch.model.quant.formats import Quantised, dequantise


class QuantLinear(Linear):
    """y = x @ W.T for W [out, in] in small codes: W is made anew for every product, in the type of x."""

    def __init__(self, stored: Quantised) -> None:
        self.stored = stored
        self.weight = stored.codes

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        return torch.nn.functional.linear(x, dequantise(self.stored, x.dtype))
