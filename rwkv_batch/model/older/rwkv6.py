"""RWKV-6's time mix: RWKV-5.2 with data-dependent token shift and decay."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rwkv_batch.model.layer import Linear, Norm
from rwkv_batch.model.older.layer import TensorSource, head_norm, silu, square_maps, wkv_heads
from rwkv_batch.model.state import ModelShape
from rwkv_batch.model.step_inputs import StepInputs

MIXES = "wkvrg"
"""The time mix's inputs, in the order of the file's low-rank maps."""


@dataclass(slots=True)
class TimeMix6:
    """See `layer.TimeMix`; wkv is [num_slots, H, N (value), N (key)]."""

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
        """[T, C] twice -> [T, C] fp32"""
        w, k, v, r, g = self._mixed(h, previous - h)
        heads = (len(h), *self.bonus.shape)
        dynamic = self.decay_w2(torch.tanh(self.decay_w1(w))).float()
        decay = torch.exp(-torch.exp(self.decay + dynamic)).view(heads)
        r, k = self.receptance(r).float().view(heads), self.key(k).float().view(heads)
        y = wkv_heads(r, k, self.value(v).float().view(heads), decay, self.bonus, wkv, inputs)
        return self.output(head_norm(y, self.ln_x) * silu(self.gate(g)))

    def _mixed(self, h: Tensor, change: Tensor) -> list[Tensor]:
        """Return the five inputs [T, C] from h [T, C] and the difference to the previous token [T, C]."""
        ranks = torch.tanh(self.mix_w1(h + change * self.mix_x)).view(len(h), len(MIXES), -1)
        dynamic = [second(ranks[:, i].contiguous()) for i, second in enumerate(self.mix_w2)]
        return [h + change * (mix + one) for mix, one in zip(self.mixes, dynamic, strict=True)]


def expected(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """without the four square matrices"""
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


def time_mix(source: TensorSource, att: str, shape: ModelShape) -> TimeMix6:
    """vectors [C] and [H, N], matrices [C, C]"""
    return TimeMix6(
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
