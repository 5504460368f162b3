"""RWKV-5: heads with a matrix each. 5.0 has one decay for a head, 5.1 a gate too, 5.2 a decay for each channel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rwkv_batch.model.layer import Norm
from rwkv_batch.model.linear import Linear
from rwkv_batch.model.older.heads import head_norm, wkv_heads
from rwkv_batch.model.older.layer import silu
from rwkv_batch.model.older.source import TensorSource, square_maps
from rwkv_batch.model.shape import ModelShape
from rwkv_batch.model.step_inputs import StepInputs

WITHOUT_GATE, ONE_DECAY_A_HEAD = ("RWKV-5.0",), ("RWKV-5.0", "RWKV-5.1")
FIRST, FIRST_AS_LOGARITHM = "time_faaaa", "time_first"
"""The bonus of the token itself: files have it as it is, or its logarithm under the older name."""


@dataclass(slots=True)
class TimeMix5:
    """See `layer.TimeMix`; wkv is [num_slots, H, N (value), N (key)]."""

    mix_k: Tensor
    """[C]: share of the token before"""
    mix_v: Tensor
    mix_r: Tensor
    mix_g: Tensor | None
    decay: Tensor
    """[1, H, N]: what a state is multiplied by"""
    bonus: Tensor
    """[H, N]"""
    receptance: Linear
    key: Linear
    value: Linear
    gate: Linear | None
    output: Linear
    ln_x: Norm

    def run(self, h: Tensor, previous: Tensor, wkv: Tensor, inputs: StepInputs) -> Tensor:
        """[T, C] twice -> [T, C] fp32."""
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
    """Name -> shape of the time mix's tensors but for the four square matrices."""
    c, of_heads = shape.width, (shape.heads,) if shape.version in ONE_DECAY_A_HEAD else (shape.heads, shape.head_size)
    wanted: dict[str, tuple[int, ...]] = {
        **{f"time_mix_{letter}": (c,) for letter in "kvr"},
        "time_decay": of_heads,
        FIRST_AS_LOGARITHM if has_logarithm else FIRST: of_heads,
        "ln_x.weight": (c,),
        "ln_x.bias": (c,),
    }
    if shape.version not in WITHOUT_GATE:
        wanted |= {"time_mix_g": (c,), "gate.weight": (c, c)}
    return wanted


def time_mix(source: TensorSource, att: str, shape: ModelShape) -> TimeMix5:
    """From the tensors called `att`: vectors [H, N], matrices [C, C]."""
    gated = shape.version not in WITHOUT_GATE
    by_head = (shape.heads, 1 if shape.version in ONE_DECAY_A_HEAD else shape.head_size)
    whole = (shape.heads, shape.head_size)
    given = source.has(f"{att}.{FIRST}")
    first = source.vector(f"{att}.{FIRST}") if given else torch.exp(source.vector(f"{att}.{FIRST_AS_LOGARITHM}"))
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
