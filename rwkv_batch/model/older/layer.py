"""A layer of RWKV-4, 5 and 6: its forward, how its tensors are loaded, and the time mix of each version."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from rwkv_batch.model.layer import LayerBase, Linear, Norm, layer_norm
from rwkv_batch.model.state import ModelShape, StateArena
from rwkv_batch.model.step_inputs import StepInputs, longest_first, token_shift


class TimeMix(Protocol):
    def run(self, h: Tensor, previous: Tensor, wkv: Tensor, inputs: StepInputs) -> Tensor:
        """Return the time mix's output [T, C] fp32.

        It is to be added to the residual stream. h [T, C]: the normalised tokens; previous [T, C]: the token before
        each; both fp32. wkv [num_slots, ...] as `ModelShape.wkv` has it: read from `inputs.read_slots`, written to
        `inputs.write_slots`.
        """


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
        """Return sigmoid(R x_r) * V relu(K x_k)^2 for h.

        h [T, C]; previous [T, C]: the tokens before; both fp32
        """
        change = previous - h
        k = torch.relu(self.key(h + change * self.mix_k)).square()
        return sigmoid(self.receptance(h + change * self.mix_r)) * self.value(k)


@dataclass(slots=True)
class OlderLayer(LayerBase):
    """One layer of RWKV-4 to 6. Vectors are fp32, linear maps in the weights' dtype."""

    time_mix: TimeMix
    channel_mix: ChannelMix


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + e^-x) of [...]. The last bits of torch.sigmoid on a CPU depend on how threads split x."""
    return 1 / (1 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    """Return x * sigmoid(x) of [...]."""
    return x * sigmoid(x)


SQUARE = ("receptance", "key", "value", "output")


class TensorSource(Protocol):
    """Loads a file's tensors by name. Tensors are on a stage's device and in its dtypes. Raises KeyError."""

    def has(self, name: str) -> bool: ...

    def vector(self, name: str) -> Tensor:
        """Load a vector, [C] fp32."""

    def norm(self, name: str) -> Norm:
        """Load `.weight` and `.bias` of a norm, [C] fp32."""

    def linear(self, name: str, transpose: bool = False) -> Linear:
        """Load a matrix [out, in], or [in, out] with `transpose`."""

    def linears(self, name: str, transpose: bool = False) -> list[Linear]:
        """Load several matrices of one tensor.

        The tensor is [number, out, in], or [number, in, out] with `transpose`.
        """


def square_maps(source: TensorSource, att: str) -> dict[str, Linear]:
    """Load the four [C, C] maps of a time mix. Every version has them. The keys are field names."""
    return {name: source.linear(f"{att}.{name}.weight") for name in SQUARE}


GROUP_NORM_EPS = 64e-5


def wkv_heads(r: Tensor, k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, wkv: Tensor, inputs: StepInputs) -> Tensor:
    """y_i = sum_j r_j (bonus_j k_j v_i + S_ij);  S_ij <- decay_j S_ij + k_j v_i.  i: value, j: key.

    r, k, v [T, H, N] fp32; decay [T, H, N], or [1, H, N] if constant; bonus [H, N];
    wkv [num_slots, H, N (value), N (key)] is updated. Returns y [T, H, N] fp32.
    """
    y = torch.empty_like(v)
    for reads, writes, positions in longest_first(inputs):
        state = wkv[reads].float()
        for tokens in positions:
            s = state[: len(tokens)]
            kv = v[tokens].unsqueeze(-1) * k[tokens].unsqueeze(-2)
            # Not a matrix product, whose bits would depend on the number of rows.
            y[tokens] = ((bonus.unsqueeze(-2) * kv + s) * r[tokens].unsqueeze(-2)).sum(-1)
            step_decay = decay if len(decay) == 1 else decay[tokens]
            state[: len(tokens)] = step_decay.unsqueeze(-2) * s + kv
        wkv[writes] = state.to(wkv.dtype)
    return y


def head_norm(y: Tensor, norm: Norm) -> Tensor:
    """Normalise each head of y [T, H, N], then scale and shift.

    `norm` [C] has the scale and the shift. Returns [T, C] fp32.
    """
    tokens, heads, _ = y.shape
    return torch.nn.functional.group_norm(y.reshape(tokens, -1), heads, norm.weight, norm.bias, GROUP_NORM_EPS)


def forward_layers(layers: Iterable[OlderLayer], x: Tensor, state: StateArena, inputs: StepInputs) -> Tensor:
    """Run a stage's layers: x [T, C] fp32 -> [T, C]. Updates `state`."""
    for i, layer in enumerate(layers):
        h = layer_norm(x, layer.ln1)
        previous = token_shift(h, state.att_shift(i), inputs)
        x = x + layer.time_mix.run(h, previous, state.layer_wkv(i), inputs)
        h = layer_norm(x, layer.ln2)
        x = x + layer.channel_mix.run(h, token_shift(h, state.ffn_shift(i), inputs))
    return x


LOWEST = -1e30
"""The largest exponent before the first token."""


@dataclass(slots=True)
class TimeMix4:
    """RWKV-4: a weighted mean of values per channel, safe from overflow. Zeros are the initial state.

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
        """Compute the time mix: [T, C] twice -> [T, C] fp32."""
        change = previous - h
        r = sigmoid(self.receptance(h + change * self.mix_r))
        k, v = self.key(h + change * self.mix_k).float(), self.value(h + change * self.mix_v).float()
        return self.output(r * self._means(k, v, wkv, inputs))

    def _means(self, k: Tensor, v: Tensor, wkv: Tensor, inputs: StepInputs) -> Tensor:
        """Return the weighted mean of values after each token: k, v [T, C] -> [T, C]."""
        means = torch.empty_like(v)
        for reads, writes, positions in longest_first(inputs):
            state = wkv[reads].float()
            for tokens in positions:
                values, weights, exponent = state[: len(tokens)].unbind(1)
                exponent = torch.where(weights == 0, LOWEST, exponent)  # after the first token, weights are at least 1
                current = self.first + k[tokens]
                top = torch.maximum(exponent, current)
                old, new = torch.exp(exponent - top), torch.exp(current - top)
                means[tokens] = (old * values + new * v[tokens]) / (old * weights + new)
                top = torch.maximum(exponent + self.decay, k[tokens])
                old, new = torch.exp(exponent + self.decay - top), torch.exp(k[tokens] - top)
                state[: len(tokens)] = torch.stack((old * values + new * v[tokens], old * weights + new, top), dim=1)
            wkv[writes] = state.to(wkv.dtype)
        return means

    @staticmethod
    def expected(shape: ModelShape) -> dict[str, tuple[int, ...]]:
        """Return the tensors' shapes by name, without the four square matrices."""
        return dict.fromkeys(("time_decay", "time_first", "time_mix_k", "time_mix_v", "time_mix_r"), (shape.width,))

    @classmethod
    def load(cls, source: TensorSource, att: str, shape: ModelShape) -> Self:
        """Load the time mix: vectors [C], matrices [C, C]."""
        return cls(
            mix_k=1 - source.vector(f"{att}.time_mix_k"),
            mix_v=1 - source.vector(f"{att}.time_mix_v"),
            mix_r=1 - source.vector(f"{att}.time_mix_r"),
            decay=-torch.exp(source.vector(f"{att}.time_decay")),
            first=source.vector(f"{att}.time_first"),
            **square_maps(source, att),
        )


WITHOUT_GATE, ONE_DECAY_PER_HEAD = ("RWKV-5.0",), ("RWKV-5.0", "RWKV-5.1")
FIRST, FIRST_AS_LOGARITHM = "time_faaaa", "time_first"
"""Bonus of the current token: as a number, or as its logarithm under the older name."""


@dataclass(slots=True)
class TimeMix5:
    """RWKV-5: a matrix per head; wkv is [num_slots, H, N (value), N (key)].

    5.0 has one decay per head, 5.1 also a gate, 5.2 also a decay per channel.
    """

    mix_k: Tensor
    """[C]: weight of the previous token"""
    mix_v: Tensor
    mix_r: Tensor
    mix_g: Tensor | None
    decay: Tensor
    """[1, H, N]: factor of the state"""
    bonus: Tensor
    """[H, N]"""
    receptance: Linear
    key: Linear
    value: Linear
    gate: Linear | None
    output: Linear
    ln_x: Norm

    def run(self, h: Tensor, previous: Tensor, wkv: Tensor, inputs: StepInputs) -> Tensor:
        """Compute the time mix: [T, C] twice -> [T, C] fp32."""
        change = previous - h
        heads = (len(h), *self.bonus.shape)
        r = self.receptance(h + change * self.mix_r).float().view(heads)
        k = self.key(h + change * self.mix_k).float().view(heads)
        v = self.value(h + change * self.mix_v).float().view(heads)
        y = head_norm(wkv_heads(r, k, v, self.decay, self.bonus, wkv, inputs), self.ln_x)
        if self.gate is not None and self.mix_g is not None:
            y = y * silu(self.gate(h + change * self.mix_g))
        return self.output(y)

    @staticmethod
    def expected(shape: ModelShape, has_logarithm: bool) -> dict[str, tuple[int, ...]]:
        """Return the tensors' shapes by name, without the four square matrices."""
        c, head_shape = (
            shape.width,
            (shape.heads,) if shape.version in ONE_DECAY_PER_HEAD else (shape.heads, shape.head_size),
        )
        expected: dict[str, tuple[int, ...]] = {
            **{f"time_mix_{letter}": (c,) for letter in "kvr"},
            "time_decay": head_shape,
            FIRST_AS_LOGARITHM if has_logarithm else FIRST: head_shape,
            "ln_x.weight": (c,),
            "ln_x.bias": (c,),
        }
        if shape.version not in WITHOUT_GATE:
            expected |= {"time_mix_g": (c,), "gate.weight": (c, c)}
        return expected

    @classmethod
    def load(cls, source: TensorSource, att: str, shape: ModelShape) -> Self:
        """Load the time mix: vectors [H, N], matrices [C, C]."""
        gated = shape.version not in WITHOUT_GATE
        by_head = (shape.heads, 1 if shape.version in ONE_DECAY_PER_HEAD else shape.head_size)
        whole = (shape.heads, shape.head_size)
        has_bonus = source.has(f"{att}.{FIRST}")
        first = source.vector(f"{att}.{FIRST if has_bonus else FIRST_AS_LOGARITHM}")
        first = first if has_bonus else torch.exp(first)
        decay = torch.exp(-torch.exp(source.vector(f"{att}.time_decay")))
        return cls(
            mix_k=1 - source.vector(f"{att}.time_mix_k"),
            mix_v=1 - source.vector(f"{att}.time_mix_v"),
            mix_r=1 - source.vector(f"{att}.time_mix_r"),
            mix_g=1 - source.vector(f"{att}.time_mix_g") if gated else None,
            decay=decay.view(by_head).expand(whole).contiguous().unsqueeze(0),
            bonus=first.view(by_head).expand(whole).contiguous(),
            gate=source.linear(f"{att}.gate.weight") if gated else None,
            **square_maps(source, att),
            ln_x=source.norm(f"{att}.ln_x"),
        )


MIXES = "wkvrg"
"""The time mix's inputs, in the order of the file's low-rank maps."""


@dataclass(slots=True)
class TimeMix6:
    """RWKV-6: RWKV-5.2 with data-dependent token shift and decay; wkv as in TimeMix5."""

    mix_x: Tensor
    """[C]: weight of the previous token in the input of mix_w1"""
    mixes: Tensor
    """[5, C]: constant weights of the previous token, in the order of MIXES"""
    mix_w1: Linear
    """C -> 5 D"""
    mix_w2: list[Linear]
    """D -> C, in the order of MIXES"""
    decay: Tensor
    """[C]: the constant part of the decay"""
    decay_w1: Linear
    """C -> D'"""
    decay_w2: Linear
    """D' -> C"""
    bonus: Tensor
    """[H, N]"""
    receptance: Linear
    key: Linear
    value: Linear
    gate: Linear
    output: Linear
    ln_x: Norm

    def run(self, h: Tensor, previous: Tensor, wkv: Tensor, inputs: StepInputs) -> Tensor:
        """Compute the time mix: [T, C] twice -> [T, C] fp32."""
        w, k, v, r, g = self._mixed(h, previous - h)
        heads = (len(h), *self.bonus.shape)
        dynamic = self.decay_w2(torch.tanh(self.decay_w1(w))).float()
        decay = torch.exp(-torch.exp(self.decay + dynamic)).view(heads)
        r, k = self.receptance(r).float().view(heads), self.key(k).float().view(heads)
        y = wkv_heads(r, k, self.value(v).float().view(heads), decay, self.bonus, wkv, inputs)
        return self.output(head_norm(y, self.ln_x) * silu(self.gate(g)))

    def _mixed(self, h: Tensor, change: Tensor) -> list[Tensor]:
        """Return the five inputs [T, C] from h [T, C].

        change [T, C]: the difference to the previous token
        """
        ranks = torch.tanh(self.mix_w1(h + change * self.mix_x)).view(len(h), len(MIXES), -1)
        dynamic = [second(ranks[:, i].contiguous()) for i, second in enumerate(self.mix_w2)]
        return [h + change * (mix + one) for mix, one in zip(self.mixes, dynamic, strict=True)]

    @staticmethod
    def expected(shape: ModelShape) -> dict[str, tuple[int, ...]]:
        """Return the tensors' shapes by name, without the four square matrices."""
        c, mix, decay = shape.width, shape.mix_rank, shape.decay_rank
        return {
            **{f"time_maa_{letter}": (c,) for letter in f"x{MIXES}"},
            "time_maa_w1": (c, len(MIXES) * mix),
            "time_maa_w2": (len(MIXES), mix, c),
            "time_decay": (c,),
            "time_decay_w1": (c, decay),
            "time_decay_w2": (decay, c),
            "time_faaaa": (shape.heads, shape.head_size),
            "gate.weight": (c, c),
            "ln_x.weight": (c,),
            "ln_x.bias": (c,),
        }

    @classmethod
    def load(cls, source: TensorSource, att: str, shape: ModelShape) -> Self:
        """Load the time mix: vectors [C] and [H, N], matrices [C, C]."""
        return cls(
            mix_x=source.vector(f"{att}.time_maa_x"),
            mixes=torch.stack([source.vector(f"{att}.time_maa_{letter}") for letter in MIXES]),
            mix_w1=source.linear(f"{att}.time_maa_w1", transpose=True),
            mix_w2=source.linears(f"{att}.time_maa_w2", transpose=True),
            decay=source.vector(f"{att}.time_decay"),
            decay_w1=source.linear(f"{att}.time_decay_w1", transpose=True),
            decay_w2=source.linear(f"{att}.time_decay_w2", transpose=True),
            bonus=source.vector(f"{att}.time_faaaa").view(shape.heads, shape.head_size),
            gate=source.linear(f"{att}.gate.weight"),
            **square_maps(source, att),
            ln_x=source.norm(f"{att}.ln_x"),
        )
