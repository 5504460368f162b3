"""The tensors of one layer, as kernels want them."""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor

from rwkv_batch.model.linear import Linear

HEAD_SIZE = 64
"""Channels of a head: RWKV-7 knows no other size."""
MIX_ORDER = "rwkvag"
"""The time mix's inputs in the order in which a layer keeps their token-shift weights."""


@dataclass(slots=True)
class Norm:
    """Scale and shift of a normalisation, [C] fp32 each."""

    weight: Tensor
    bias: Tensor


@dataclass(slots=True)
class ValueResidual:
    """The gate that mixes the first layer's values into a later layer's; absent in layer 0."""

    v0: Tensor
    """[C] fp32"""
    v1: Linear
    v2: Linear


@dataclass(slots=True)
class Layer:
    """One layer. Vectors are fp32, linear maps in the weights' type; C width, H heads, D a low rank."""

    ln1: Norm
    ln2: Norm
    att_mix: Tensor
    """[6, C]: token-shift weights, in MIX_ORDER"""
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


def linears_of(layer: Layer) -> list[Linear]:
    """All of a layer's linear maps."""
    values = [getattr(layer, field.name) for field in fields(layer)]
    residual = [] if layer.v_residual is None else [layer.v_residual.v1, layer.v_residual.v2]
    return [value for value in values if isinstance(value, Linear)] + residual


@dataclass(slots=True)
class Projections:
    """Outputs of the time mix's entrance maps, [T, C] each; low-rank ones before their bias."""

    r: Tensor
    w: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    g: Tensor
    """the gate, complete"""
    v_gate: Tensor | None
    """None in layer 0"""
