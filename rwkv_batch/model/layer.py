"""The tensors of one layer: RWKV-7's, and those that all versions have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass

from torch import Tensor

from rwkv_batch.model.linear import Linear

HEAD_SIZE = 64
"""Channels of a head; RWKV-7 has no other size."""
MIX_ORDER = "rwkvag"
"""Order of the time mix's inputs in a layer's token-shift weights."""


@dataclass(slots=True)
class Norm:
    """Scale and shift of a normalisation, [C] fp32 each."""

    weight: Tensor
    bias: Tensor


@dataclass(slots=True)
class Prologue:
    """The operations at the start of a half layer of RWKV-7."""

    norm: Norm
    mix: Tensor
    """[M, C]: token-shift weights of the mixed inputs"""
    consumer: Linear
    """the linear map of the first mixed input"""


@dataclass(slots=True)
class LayerBase:
    """The tensors that a layer of any version has."""

    ln1: Norm
    ln2: Norm

    @property
    def has_uniform_layout(self) -> bool:
        """Whether the later layers' tensors have the same shapes."""
        return True


@dataclass(slots=True)
class ValueResidual:
    """The gate that mixes the first layer's values into a later layer's; absent in layer 0."""

    v0: Tensor
    """[C] fp32"""
    v1: Linear
    v2: Linear


@dataclass(slots=True)
class Layer(LayerBase):
    """One layer of RWKV-7. Vectors are fp32, matrices in the weights' dtype. C: width, H: heads, D: a low rank."""

    att_mix: Tensor
    """[6, C]: token-shift weights in MIX_ORDER"""
    receptance: Linear
    key: Linear
    value: Linear
    output: Linear
    w0: Tensor
    """[C] bias of the decay"""
    w1: Linear
    """C -> D"""
    w2: Linear
    """D -> C"""
    a0: Tensor
    a1: Linear
    a2: Linear
    g1: Linear
    g2: Linear
    v_residual: ValueResidual | None
    k_k: Tensor
    """[C]"""
    k_a: Tensor
    """[C]"""
    r_k: Tensor
    """[H, 64]"""
    ln_x: Norm
    ffn_mix: Tensor
    """[1, C]"""
    ffn_key: Linear
    """C -> 4C"""
    ffn_value: Linear
    """4C -> C"""

    @property
    def has_uniform_layout(self) -> bool:
        """Whether there is a value residual, which layer 0 lacks."""
        return self.v_residual is not None

    @property
    def time_mix_prologue(self) -> Prologue:
        return Prologue(self.ln1, self.att_mix, self.receptance)

    @property
    def channel_mix_prologue(self) -> Prologue:
        return Prologue(self.ln2, self.ffn_mix, self.ffn_key)


def linears_of(layer: LayerBase) -> list[Linear]:
    """Return all of a layer's linear maps."""
    return list(_linears_in(layer))


def _linears_in(value: object) -> Iterator[Linear]:
    if isinstance(value, Linear):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from _linears_in(part)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _linears_in(getattr(value, field.name))


@dataclass(slots=True)
class Projections:
    """Outputs of the time mix's input projections, [T, C] each; low-rank ones without bias."""

    r: Tensor
    w: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    g: Tensor
    """the complete gate"""
    v_gate: Tensor | None
    """None in layer 0"""
