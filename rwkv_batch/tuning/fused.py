"""The training model of frozen weights: matrix products, and one function for all that is between two of them.

The functions are Triton kernels on GPUs, in bf16, and C++ on CPUs, in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rwkv_batch.tuning.model import TrainingModel
from rwkv_batch.tuning.pacing import PieceEnd
from rwkv_batch.tuning.wkv import CHUNK

_MIXES = "rwkvag"


@dataclass(frozen=True, slots=True)
class _Vectors:
    """A layer's vectors, stacked for the kernels, fp32."""

    att_norm: Tensor
    """[2, C]: weight and bias"""
    ffn_norm: Tensor
    mixes: Tensor
    """[6, C] in the order of _MIXES"""
    ffn_mix: Tensor
    """[1, C]"""
    inputs: Tensor
    """[5, C]: w0, a0, v0, k_k, k_a"""
    outputs: Tensor
    """[3, C]: ln_x's weight and bias, r_k"""


class Kernels(NamedTuple):
    """The functions between the products; `tuning.gpu` says what they compute."""

    shifted_norm: type[torch.autograd.Function]
    squared_relu: type[torch.autograd.Function]
    time_core: type[torch.autograd.Function]


class FusedTrainingModel(TrainingModel):
    """Trains states and LoRAs. The tokens of a batch are one list, whose rows follow each other."""

    kernels: ClassVar[Kernels]
    _vectors: list[_Vectors] | None = None

    def hidden(self, tokens: Tensor, begins: Tensor) -> Tensor:
        """Return the head's inputs [rows, time, C] in fp32."""
        if self._vectors is None:
            self._vectors = [self._stacked(layer) for layer in range(self.shape.layers)]
        keep, flat = ~begins[:, ::CHUNK].contiguous(), begins.flatten()
        with torch.autocast(tokens.device.type, enabled=False):
            x = self._norm(F.embedding(tokens.flatten(), self.weights["emb.weight"]).float(), "blocks.0.ln0")
            y, first_v = torch.zeros_like(x, dtype=self.weights["emb.weight"].dtype), None
            for layer in range(self.shape.layers):
                x = self._piece(x, "value" if layer else "embedding")
                given = layer, x, y, first_v, flat, keep
                if layer < self.plan.recomputed_layers and torch.is_grad_enabled():
                    x, y, first_v = checkpoint(self._fused_layer, *given, use_reentrant=False, preserve_rng_state=False)
                else:
                    x, y, first_v = self._fused_layer(*given)
            hidden: Tensor = self._norm(x + y, "ln_out").view(*tokens.shape, -1)
            return hidden

    def _piece(self, x: Tensor, name: str) -> Tensor:
        """Return x [tokens, C], with which a piece of work ends if the run is paced."""
        if self.pacer is None:
            return x
        ended: Tensor = PieceEnd.apply(x, self.pacer, name)
        return ended

    def _stacked(self, layer: int) -> _Vectors:
        block = f"blocks.{layer}"

        def stack(*names: str) -> Tensor:
            given = (self.weights.get(f"{block}.{name}") for name in names)
            zero = torch.zeros(self.shape.width, device=self.device)
            return torch.stack([zero if one is None else one.detach().float().flatten() for one in given])

        return _Vectors(
            att_norm=stack("ln1.weight", "ln1.bias"),
            ffn_norm=stack("ln2.weight", "ln2.bias"),
            mixes=stack(*(f"att.x_{letter}" for letter in _MIXES)),
            ffn_mix=stack("ffn.x_k"),
            inputs=stack("att.w0", "att.a0", "att.v0", "att.k_k", "att.k_a"),
            outputs=stack("att.ln_x.weight", "att.ln_x.bias", "att.r_k"),
        )

    def _linear(self, x: Tensor, name: str) -> Tensor:
        y = self._base_product(x, f"{name}.weight")
        if name not in self.tunables.pairs:
            return y
        a, b = (one.to(x.dtype) for one in self.tunables.pairs[name])
        return y.addmm(F.linear(x, a), b.t())

    def _fused_layer(
        self, layer: int, x: Tensor, y: Tensor, first_v: Tensor | None, begins: Tensor, keep: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the residual stream x, what is to be added to it, and layer 0's values.

        x, y: [tokens, C]
        """
        assert self._vectors is not None
        vectors, att, ffn = self._vectors[layer], f"blocks.{layer}.att", f"blocks.{layer}.ffn"
        x, *mixed = self.kernels.shifted_norm.apply(x, y, begins, vectors.att_norm, vectors.mixes)
        of = dict(zip(_MIXES, mixed, strict=True))

        def low_rank(letter: str) -> Tensor:
            first: Tensor = of[letter] @ self.weights[f"{att}.{letter}1"]
            first = first.tanh() if letter == "w" else first.sigmoid() if letter == "g" else first
            return first @ self.weights[f"{att}.{letter}2"]

        r, k, v = (self._linear(of[one], f"{att}.{name}") for one, name in zip("rkv", _PROJECTIONS, strict=True))
        w, a, g = (low_rank(letter) for letter in "wag")
        gate = None if first_v is None else low_rank("v")
        state = self.tunables.states[layer] if self.tunables.states else None
        r = self._piece(r, "projections")
        out: Tensor = self.kernels.time_core.apply(
            r, k, v, w, a, g, gate, first_v, state, vectors.inputs, vectors.outputs, keep, self.pacer
        )
        y = self._linear(self._piece(out, "core"), f"{att}.output")
        x, mixed_ffn = self.kernels.shifted_norm.apply(x, y, begins, vectors.ffn_norm, vectors.ffn_mix)
        hidden = self.kernels.squared_relu.apply(self._linear(self._piece(mixed_ffn, "output"), f"{ffn}.key"))
        hidden = self._piece(hidden, "key")
        return x, self._linear(hidden, f"{ffn}.value"), v.float() if first_v is None else first_v


_PROJECTIONS = ("receptance", "key", "value")
