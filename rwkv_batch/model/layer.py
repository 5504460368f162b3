"""The tensors of one layer: RWKV-7's, and those that all versions have; linear maps, plain or quantised.

RWKV-7's own letters, as in the paper (arXiv 2503.14456) and the weights' files. A layer is a time mix, then a channel
mix. Per head, the time mix keeps a matrix S [64 values, 64 keys], the WKV state:

    r        receptance [C]: reads the state, y = S r
    w        decay [C]: how much of each key's column is kept
    k, v     key and value [C]: S gets v k^T added
    a        in-context learning rate [C]: how much of the old value at a key is replaced
    g        gate [C]: multiplies the time mix's output
    v_first  the v of layer 0, which later layers mix into theirs by v_gate (the value residual)
    kk       k scaled by k_k and normalised per head: the key whose old value is replaced
    r_k      weights of the bonus, which adds the current token's own v to y
    w0 w1 w2, a0 a1 a2, g1 g2, v0 v1 v2    bias and low-rank pairs (C -> D -> C) that compute w, a, g and v_gate
    shift    the last token's LayerNorm output, which the token shift mixes with the current one

`kernels/naive.py` has the formulas.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Linear:
    """Computes y = x @ weight.T.

    x is [T, in], weight is [out, in] of any float dtype. y has the dtype of x. On a CPU, products of 16-bit weights are
    accumulated in fp32 and rounded to 16 bits once.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.contiguous()

    @property
    def num_bytes(self) -> int:
        return self.weight.numel() * self.weight.element_size()

    def __call__(self, x: Tensor) -> Tensor:
        """Map [T, in] to [T, out]."""
        weight = self.weight
        rows = x.to(weight.dtype)
        if rows.shape[0] == 1:
            # A matrix-vector product runs at memory speed; a bf16 GEMM on a CPU does not.
            return torch.mv(weight, rows[0]).unsqueeze(0).to(x.dtype)
        return torch.nn.functional.linear(rows, weight).to(x.dtype)

    def to_fp32(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Map [T, in] to [T, out] fp32. If possible, results are not rounded to a narrower dtype."""
        y = self(x).float()
        return y if out is None else out.copy_(y)


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
    others: tuple[Linear, ...] = ()
    """the maps of the next mixed inputs, if they have the consumer's size"""


@dataclass(slots=True)
class LayerBase:
    ln1: Norm
    ln2: Norm

    @property
    def has_uniform_layout(self) -> bool:
        """Whether the later layers' tensors have the same shapes."""
        return True


@dataclass(slots=True)
class ValueResidual:
    """The gate that mixes layer 0's values into a later layer's; absent in layer 0."""

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
        """Whether it has a value residual. Layer 0 lacks it."""
        return self.v_residual is not None

    @property
    def time_mix_prologue(self) -> Prologue:
        return Prologue(self.ln1, self.att_mix, self.receptance, (self.key, self.value))

    @property
    def channel_mix_prologue(self) -> Prologue:
        return Prologue(self.ln2, self.ffn_mix, self.ffn_key)


def linears_of(value: object) -> Iterator[Linear]:
    if isinstance(value, Linear):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from linears_of(part)
    elif is_dataclass(value):
        for field in fields(value):
            yield from linears_of(getattr(value, field.name))


@dataclass(slots=True)
class Projections:
    """Outputs of the time mix's input projections, [T, C] each; w, a and v_gate still lack their bias.

    The letters are explained at the top of this module.
    """

    r: Tensor
    w: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    g: Tensor
    """the complete gate"""
    v_gate: Tensor | None
    """None in layer 0"""


def layer_norm(x: Tensor, norm: Norm) -> Tensor:
    """LayerNorm over the last axis, eps 1e-5: [..., C] of any float dtype -> [..., C] fp32."""
    return torch.nn.functional.layer_norm(x.float(), x.shape[-1:], norm.weight, norm.bias, 1e-5)


class Cuts(NamedTuple):
    """Whether a range of layers starts or ends within a layer.

    Within: between the layer's time mix and channel mix.
    """

    begins_within: bool = False
    """the first layer has only its channel mix here"""
    ends_within: bool = False
    """the last layer has only its time mix here"""


WHOLE = Cuts()
