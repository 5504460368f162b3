"""What RWKV-4, 5 and 6 have in common: a layer, its forward, how its tensors are loaded, the recurrence of 5 and 6."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rwkv_batch.model.layer import LayerBase, Linear, Norm, layer_norm
from rwkv_batch.model.state import StateArena
from rwkv_batch.model.step_inputs import StepInputs, longest_first, token_shift


class TimeMix(Protocol):
    def run(self, h: Tensor, previous: Tensor, wkv: Tensor, inputs: StepInputs) -> Tensor:
        """Return the time mix's output [T, C] fp32, to be added to the residual stream.

        h [T, C]: the normalised tokens; previous [T, C]: the token before each; both fp32. wkv [num_slots, ...] as
        `ModelShape.wkv` has it: read from `inputs.read_slots`, written to `inputs.write_slots`.
        """
        ...


@dataclass(slots=True)
class ChannelMix:
    """the same in RWKV-4, 5 and 6"""

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
    """Vectors are fp32, linear maps in the weights' dtype."""

    time_mix: TimeMix
    channel_mix: ChannelMix


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x) of [...]

    The last bits of torch.sigmoid on a CPU depend on how threads split x.
    """
    return 1 / (1 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x) of [...]"""
    return x * sigmoid(x)


SQUARE = ("receptance", "key", "value", "output")


class TensorSource(Protocol):
    """Tensors are on a stage's device and in its dtypes. Raises KeyError."""

    def has(self, name: str) -> bool: ...

    def vector(self, name: str) -> Tensor:
        """[C] fp32"""
        ...

    def norm(self, name: str) -> Norm:
        """`.weight` and `.bias` [C] fp32"""
        ...

    def linear(self, name: str, transpose: bool = False) -> Linear:
        """[out, in], or [in, out] with `transpose`"""
        ...

    def linears(self, name: str, transpose: bool = False) -> list[Linear]:
        """The matrices are stored as one tensor [number, out, in], or [number, in, out] with `transpose`."""
        ...


def square_maps(source: TensorSource, att: str) -> dict[str, Linear]:
    """The four [C, C] maps of every version's time mix, by field name."""
    return {name: source.linear(f"{att}.{name}.weight") for name in SQUARE}


GROUP_NORM_EPS = 64e-5


def wkv_heads(r: Tensor, k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, wkv: Tensor, inputs: StepInputs) -> Tensor:
    """y_i = sum_j r_j (bonus_j k_j v_i + S_ij);  S_ij <- decay_j S_ij + k_j v_i.  i: value, j: key.

    r, k, v [T, H, N] fp32; decay [T, H, N], or [1, H, N] if constant; bonus [H, N];
    wkv [num_slots, H, N (value), N (key)] is updated. Returns y [T, H, N] fp32.
    """
    y = torch.empty_like(v)
    order, positions = longest_first(inputs)
    state = wkv[inputs.read_slots[order]].float()
    for at in positions:
        s = state[: len(at)]
        kv = v[at].unsqueeze(-1) * k[at].unsqueeze(-2)
        # Not a matrix product, whose bits would depend on the number of rows.
        y[at] = ((bonus.unsqueeze(-2) * kv + s) * r[at].unsqueeze(-2)).sum(-1)
        step_decay = decay if len(decay) == 1 else decay[at]
        state[: len(at)] = step_decay.unsqueeze(-2) * s + kv
    wkv[inputs.write_slots[order]] = state.to(wkv.dtype)
    return y


def head_norm(y: Tensor, norm: Norm) -> Tensor:
    """Normalise each head of y [T, H, N], then scale and shift by `norm` [C]: [T, C] fp32."""
    tokens, heads, _ = y.shape
    return torch.nn.functional.group_norm(y.reshape(tokens, -1), heads, norm.weight, norm.bias, GROUP_NORM_EPS)


def forward_layers(layers: Iterable[OlderLayer], x: Tensor, state: StateArena, inputs: StepInputs) -> Tensor:
    """x [T, C] fp32 -> [T, C]. Updates `state`."""
    for i, layer in enumerate(layers):
        h = layer_norm(x, layer.ln1)
        previous = token_shift(h, state.att_shift(i), inputs)
        x = x + layer.time_mix.run(h, previous, state.layer_wkv(i), inputs)
        h = layer_norm(x, layer.ln2)
        x = x + layer.channel_mix.run(h, token_shift(h, state.ffn_shift(i), inputs))
    return x
