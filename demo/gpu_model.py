"""The demo's training model with the Triton kernels of tuning."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rwkv_batch.tuning.gpu.wkv import TimeCore
from rwkv_batch.tuning.model import TrainingModel, shifted

_PROJECTIONS = (("r", "receptance"), ("k", "key"), ("v", "value"))


class GpuDemoModel(TrainingModel):
    """Trains all weights but k_k, k_a, ln_x and r_k. The kernels give no gradients of these."""

    def _time_mix(
        self, layer: int, x: Tensor, v_first: Tensor | None, begins: Tensor, keep: Tensor
    ) -> tuple[Tensor, Tensor]:
        att = f"blocks.{layer}.att"
        d = shifted(x, begins) - x

        def stacked(*names: str) -> Tensor:
            zero = torch.zeros(self.shape.width, device=x.device)
            return torch.stack([self.weights.get(f"{att}.{name}", zero).detach().flatten() for name in names])

        def mixed(letter: str) -> Tensor:
            return x + d * self.weights[f"{att}.x_{letter}"]

        def low_rank(letter: str, between: Any = None) -> Tensor:
            first = mixed(letter) @ self.weights[f"{att}.{letter}1"]
            product = (first if between is None else between(first)) @ self.weights[f"{att}.{letter}2"]
            if (bias := self.weights.get(f"{att}.{letter}0")) is not None:  # the kernel adds it; its gradient is here
                product = product + (bias - bias.detach())
            return narrow(product)

        def narrow(product: Tensor) -> Tensor:
            return product.flatten(0, 1).bfloat16()

        r, k, v = (self._linear(mixed(letter), f"{att}.{name}") for letter, name in _PROJECTIONS)
        w, a, g = low_rank("w", torch.tanh), low_rank("a"), low_rank("g", torch.sigmoid)
        gate = None if v_first is None else low_rank("v")
        y: Tensor = TimeCore.apply(
            narrow(r), narrow(k), narrow(v), w, a, g, gate, None if v_first is None else v_first.flatten(0, 1).float(),
            None, stacked("w0", "a0", "v0", "k_k", "k_a"), stacked("ln_x.weight", "ln_x.bias", "r_k"), keep.contiguous(),
        )  # fmt: skip
        return self._linear(y.view(x.shape).to(x.dtype), f"{att}.output"), v if v_first is None else v_first
