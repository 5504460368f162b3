"""RWKV-4's time mix: a weighted mean of values per channel, safe from overflow."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rwkv_batch.model.layer import Linear
from rwkv_batch.model.older.layer import TensorSource, sigmoid, square_maps
from rwkv_batch.model.state import ModelShape
from rwkv_batch.model.step_inputs import StepInputs, longest_first

LOWEST = -1e30
"""The largest exponent before the first token."""


@dataclass(slots=True)
class TimeMix4:
    """See `layer.TimeMix`. Zeros are the initial state.

    wkv [num_slots, 3, C]: sum of weighted values, sum of weights, and the exponent that scales both.
    """

    mix_k: Tensor
    """[C]: weight of the previous token"""
    mix_v: Tensor
    mix_r: Tensor
    decay: Tensor
    """[C]: added to the exponent for each token, negative"""
    first: Tensor
    """[C]: exponent of the current token"""
    receptance: Linear
    key: Linear
    value: Linear
    output: Linear

    def run(self, h: Tensor, previous: Tensor, wkv: Tensor, inputs: StepInputs) -> Tensor:
        """[T, C] twice -> [T, C] fp32"""
        change = previous - h
        r = sigmoid(self.receptance(h + change * self.mix_r))
        k, v = self.key(h + change * self.mix_k).float(), self.value(h + change * self.mix_v).float()
        return self.output(r * self._means(k, v, wkv, inputs))

    def _means(self, k: Tensor, v: Tensor, wkv: Tensor, inputs: StepInputs) -> Tensor:
        """Return the weighted mean of values after each token: k, v [T, C] -> [T, C]."""
        means = torch.empty_like(v)
        order, positions = longest_first(inputs)
        state = wkv[inputs.read_slots[order]].float()
        for at in positions:
            values, weights, exponent = state[: len(at)].unbind(1)
            exponent = torch.where(weights == 0, LOWEST, exponent)  # after the first token, weights are at least 1
            current = self.first + k[at]
            top = torch.maximum(exponent, current)
            old, new = torch.exp(exponent - top), torch.exp(current - top)
            means[at] = (old * values + new * v[at]) / (old * weights + new)
            top = torch.maximum(exponent + self.decay, k[at])
            old, new = torch.exp(exponent + self.decay - top), torch.exp(k[at] - top)
            state[: len(at)] = torch.stack((old * values + new * v[at], old * weights + new, top), dim=1)
        wkv[inputs.write_slots[order]] = state.to(wkv.dtype)
        return means


def expected(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """without the four square matrices"""
    return dict.fromkeys(("time_decay", "time_first", "time_mix_k", "time_mix_v", "time_mix_r"), (shape.width,))


def time_mix(source: TensorSource, att: str, shape: ModelShape) -> TimeMix4:
    """vectors [C], matrices [C, C]"""
    return TimeMix4(
        mix_k=1 - source.vector(f"{att}.time_mix_k"),
        mix_v=1 - source.vector(f"{att}.time_mix_v"),
        mix_r=1 - source.vector(f"{att}.time_mix_r"),
        decay=-torch.exp(source.vector(f"{att}.time_decay")),
        first=source.vector(f"{att}.time_first"),
        **square_maps(source, att),
    )
