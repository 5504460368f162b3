"""RWKV-5's time mix, with a matrix per head.

5.0 has one decay per head, 5.1 also a gate, 5.2 also a decay per channel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rwkv_batch.model.layer import Linear, Norm
from rwkv_batch.model.older.layer import TensorSource, head_norm, silu, square_maps, wkv_heads
from rwkv_batch.model.state import ModelShape
from rwkv_batch.model.step_inputs import StepInputs

WITHOUT_GATE, ONE_DECAY_PER_HEAD = ("RWKV-5.0",), ("RWKV-5.0", "RWKV-5.1")
FIRST, FIRST_AS_LOGARITHM = "time_faaaa", "time_first"
"""Bonus of the current token: as a number, or as its logarithm under the older name."""


@dataclass(slots=True)
class TimeMix5:
    """See `layer.TimeMix`; wkv is [num_slots, H, N (value), N (key)]."""

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
        """[T, C] twice -> [T, C] fp32"""
        change = previous - h
        heads = (len(h), *self.bonus.shape)
        r = self.receptance(h + change * self.mix_r).float().view(heads)
        k = self.key(h + change * self.mix_k).float().view(heads)
        v = self.value(h + change * self.mix_v).float().view(heads)
        y = head_norm(wkv_heads(r, k, v, self.decay, self.bonus, wkv, inputs), self.ln_x)
        if self.gate is not None and self.mix_g is not None:
            y = y * silu(self.gate(h + change * self.mix_g))
        return self.output(y)


def expected(shape: ModelShape, has_logarithm: bool) -> dict[str, tuple[int, ...]]:
    """without the four square matrices"""
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


def time_mix(source: TensorSource, att: str, shape: ModelShape) -> TimeMix5:
    """vectors [H, N], matrices [C, C]"""
    gated = shape.version not in WITHOUT_GATE
    by_head = (shape.heads, 1 if shape.version in ONE_DECAY_PER_HEAD else shape.head_size)
    whole = (shape.heads, shape.head_size)
    has_bonus = source.has(f"{att}.{FIRST}")
    first = source.vector(f"{att}.{FIRST}") if has_bonus else torch.exp(source.vector(f"{att}.{FIRST_AS_LOGARITHM}"))
    decay = torch.exp(-torch.exp(source.vector(f"{att}.time_decay")))
    return TimeMix5(
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
