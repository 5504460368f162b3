"""From an opened weight file to the layers of one stage on one device, in one dtype."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from rwkv_batch.model.layer import MIX_ORDER, Layer, LayerBase, Norm, ValueResidual
from rwkv_batch.model.linear import Linear, QuantLinear
from rwkv_batch.model.mmap_release import release
from rwkv_batch.model.older.files import make_layer
from rwkv_batch.model.older.layer import OlderLayer
from rwkv_batch.model.older.source import square_maps
from rwkv_batch.model.quant.formats import Format, Quantised, format_for, quantise
from rwkv_batch.model.quant.store import QuantStore
from rwkv_batch.model.state_format import StateFormat
from rwkv_batch.model.weights import Weights

PROGRESS_FROM_BYTES = 256 << 20
FOLD_ROWS = 8192
NORM_EPS = 1e-5
HOPPER = 9
"""Compute capability, whose kernels want ffn.value in one order of fp8 and in both of int8."""


@dataclass(frozen=True, slots=True)
class Precision:
    """Where a stage's tensors live and in which types."""

    device: torch.device
    weights: torch.dtype
    """of the matrices"""
    activations: torch.dtype
    """of the residual stream and of what kernels pass on"""
    wkv_state: StateFormat
    storage: Format | None = None
    """of the large matrices, where they are kept in small codes"""

    @property
    def weight_bytes(self) -> float:
        """Bytes of a number of a large matrix, with its share of scales and of what is kept twice."""
        if self.storage is None:
            return self.weights.itemsize
        if self.device.type != "cuda":
            return {Format.FP8: 2.0, Format.INT8: 1.05, Format.INT4: 1.05}[self.storage]
        of_fp8 = 1.1 if torch.cuda.get_device_capability(self.device)[0] == HOPPER else 1.4
        return {Format.FP8: of_fp8, Format.INT8: 1.05, Format.INT4: 0.6}[self.storage]

    @property
    def weights_name(self) -> str:
        """What the matrices are kept in, for people: "float16", "fp8"."""
        return str(self.weights).removeprefix("torch.") if self.storage is None else self.storage.value


@dataclass(slots=True)
class Embedding:
    """The token table [V, C]: as stored with the first LayerNorm still to be applied, or with it folded in."""

    table: Tensor
    ln0: Norm | None
    """None: already applied to the table"""

    def fold(self, dtype: torch.dtype) -> Embedding:
        """Apply the norm to the whole table once, on the norm's device, so that embedding a token is one read."""
        if self.ln0 is None:
            return self
        device = self.ln0.weight.device
        table = torch.empty(self.table.shape, dtype=dtype, device=device)
        for at in range(0, len(table), FOLD_ROWS):
            rows = self.table[at : at + FOLD_ROWS].to(device).float()
            table[at : at + FOLD_ROWS] = torch.nn.functional.layer_norm(
                rows, rows.shape[1:], self.ln0.weight, self.ln0.bias, NORM_EPS
            )
        release(self.table)
        return Embedding(table, None)


@dataclass(slots=True)
class Head:
    """The last norm and the map to logits."""

    ln_out: Norm
    linear: Linear


MakeLinear = Callable[[Tensor], Linear]
MakeQuantised = Callable[[str, Quantised], Linear]
"""Name of a tensor and its codes -> the map."""


def plain_quantised(name: str, stored: Quantised) -> Linear:
    """For backends without kernels of their own for small codes."""
    return QuantLinear(stored)


L = TypeVar("L", bound=LayerBase)


class LayerLoader:
    """Takes tensors out of a weight file for one stage.

    With `moves_matrices` off they stay where the file's tensors are, for a backend that puts them in places of its own.
    """

    def __init__(
        self,
        weights: Weights,
        precision: Precision,
        make_linear: MakeLinear = Linear,
        moves_matrices: bool = True,
        make_quantised: MakeQuantised = plain_quantised,
    ) -> None:
        self._tensor = weights.tensor
        self._names, self._shape = weights.tensors.keys(), weights.shape
        self._precision = precision
        self._make_linear = make_linear
        self._moves_matrices = moves_matrices
        self._make_quantised = make_quantised
        storage = precision.storage
        self._store = None if storage is None else QuantStore(weights.path, weights.fingerprint, storage)

    def on_host(self) -> LayerLoader:
        """The same, with `moves_matrices` off."""
        apart = copy.copy(self)
        apart._moves_matrices = False
        return apart

    def embedding(self) -> Embedding:
        """The table stays as it is stored and where (memory-mapped on a CPU)."""
        return Embedding(self._tensor("emb.weight"), self.norm("blocks.0.ln0"))

    def head(self) -> Head:
        """Norm and logits map."""
        return Head(self.norm("ln_out"), self.linear("head.weight"))

    def has(self, name: str) -> bool:
        """Whether the file has a tensor of that name."""
        return name in self._names

    def older_layer(self, i: int) -> OlderLayer:
        """Layer i of RWKV-4, 5 or 6."""
        return make_layer(self, self._shape, i)

    def layer(self, i: int) -> Layer:
        """Layer i of RWKV-7."""
        att, ffn = f"blocks.{i}.att", f"blocks.{i}.ffn"
        residual = None
        if i > 0:
            residual = ValueResidual(self.vector(f"{att}.v0"), self._low_rank(f"{att}.v1"), self._low_rank(f"{att}.v2"))
        return Layer(
            ln1=self.norm(f"blocks.{i}.ln1"),
            ln2=self.norm(f"blocks.{i}.ln2"),
            att_mix=torch.stack([self.vector(f"{att}.x_{name}") for name in MIX_ORDER]),
            **square_maps(self, att),
            w0=self.vector(f"{att}.w0"),
            w1=self._low_rank(f"{att}.w1"),
            w2=self._low_rank(f"{att}.w2"),
            a0=self.vector(f"{att}.a0"),
            a1=self._low_rank(f"{att}.a1"),
            a2=self._low_rank(f"{att}.a2"),
            g1=self._low_rank(f"{att}.g1"),
            g2=self._low_rank(f"{att}.g2"),
            v_residual=residual,
            k_k=self.vector(f"{att}.k_k"),
            k_a=self.vector(f"{att}.k_a"),
            r_k=self.vector(f"{att}.r_k").view(-1, 64),
            ln_x=self.norm(f"{att}.ln_x"),
            ffn_mix=self.vector(f"{ffn}.x_k").unsqueeze(0),
            ffn_key=self.linear(f"{ffn}.key.weight"),
            ffn_value=self.linear(f"{ffn}.value.weight"),
        )

    def vector(self, name: str) -> Tensor:
        """A vector [C], fp32."""
        return self._tensor(name).reshape(-1).to(self._precision.device, torch.float32)

    def norm(self, name: str) -> Norm:
        """Scale and shift [C] of a normalisation."""
        return Norm(self.vector(f"{name}.weight"), self.vector(f"{name}.bias"))

    def linears(self, name: str, transpose: bool = False) -> list[Linear]:
        """Several matrices kept as one tensor [number, out, in], or [number, in, out] with `transpose`."""
        stored = self._tensor(name)
        maps = [self._plain_linear(one, transpose) for one in stored]
        release(stored)
        return maps

    def linear(self, name: str, transpose: bool = False) -> Linear:
        """A matrix [out, in], or [in, out] with `transpose`; in small codes where the stage has them for that name."""
        storage = self._precision.storage
        format_ = None if storage is None else format_for(name, storage)
        if format_ is not None:
            return self._make_quantised(name, self._quantised(name, format_))
        stored = self._tensor(name)
        linear = self._plain_linear(stored, transpose)
        kept = getattr(linear, "weight", None)
        if not (isinstance(kept, Tensor) and kept.data_ptr() == stored.data_ptr()):
            release(stored)
        return linear

    def _plain_linear(self, stored: Tensor, transpose: bool) -> Linear:
        device = self._precision.device if self._moves_matrices else stored.device
        weight = stored.to(device, self._precision.weights)
        return self._make_linear(weight.T if transpose else weight)

    def _quantised(self, name: str, format_: Format) -> Quantised:
        """The codes of a matrix: from an earlier start, or made where they will be."""
        assert self._store is not None, "only a stage with small weights asks"
        stored = self._tensor(name)
        found = self._store.load(name, tuple(stored.shape), format_)
        if found is not None:
            return found.to(self._precision.device)
        codes = quantise(stored.to(self._precision.device), format_)
        release(stored)
        self._store.save(name, codes)
        return codes

    def _low_rank(self, name: str) -> Linear:
        """Stored [in, out] for x @ w; a Linear wants [out, in]."""
        return self.linear(name, transpose=True)


def load_layers(make: Callable[[int], L], weights: Weights, first: int, last: int) -> Iterator[L]:
    """Layers first .. last-1, with a progress bar when the file is large enough to make one wait."""
    return (make(i) for i in _progress(range(first, last), weights))


def _progress(numbers: range, weights: Weights) -> Iterator[int]:
    wanted = weights.num_bytes >= PROGRESS_FROM_BYTES
    bar = tqdm(numbers, desc=f"loading {weights.path.name}", unit="layer", file=sys.stderr, disable=not wanted)
    yield from bar
