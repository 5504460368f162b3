"""A layer of RWKV-4, 5 or 6, and the interface of its time mix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rwkv_batch.model.layer import LayerBase
from rwkv_batch.model.linear import Linear
from rwkv_batch.model.step_inputs import StepInputs


class TimeMix(Protocol):
    """The time mix of one version, with its tensors."""

    def run(self, h: Tensor, previous: Tensor, wkv: Tensor, inputs: StepInputs) -> Tensor:
        """Return the time mix's output [T, C] fp32, to be added to the residual stream.

        h [T, C]: the normalised tokens; previous [T, C]: the token before each; both fp32. wkv [num_slots, ...] as
        `ModelShape.wkv` has it: read from `inputs.read_slots`, written to `inputs.write_slots`.
        """
        ...


@dataclass(slots=True)
class ChannelMix:
    """The channel mix, the same in RWKV-4, 5 and 6."""

    mix_k: Tensor
    """[C]: weight of the previous token"""
    mix_r: Tensor
    key: Linear
    """C -> F"""
    value: Linear
    """F -> C"""
    receptance: Linear

    def run(self, h: Tensor, previous: Tensor) -> Tensor:
        """Return sigmoid(R x_r) * V relu(K x_k)^2 for h [T, C] and the tokens before [T, C], fp32."""
        change = previous - h
        k = torch.relu(self.key(h + change * self.mix_k)).square()
        return sigmoid(self.receptance(h + change * self.mix_r)) * self.value(k)


@dataclass(slots=True)
class OlderLayer(LayerBase):
    """One layer. Vectors are fp32, linear maps in the weights' dtype."""

    time_mix: TimeMix
    channel_mix: ChannelMix


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + e^-x) of [...].

    The last bits of torch.sigmoid on a CPU depend on how threads split x.
    """
    return 1 / (1 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    """Return x * sigmoid(x) of [...], with this module's sigmoid."""
    return x * sigmoid(x)
