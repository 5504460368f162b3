"""Loads the layers of one stage to one device.

They come from an opened weight file.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from rwkv_batch import load_progress
from rwkv_batch.model.files.gguf_blocks import BlockTensor
from rwkv_batch.model.layer import MIX_ORDER, Layer, LayerBase, Linear, Norm, ValueResidual
from rwkv_batch.model.mmap_release import release
from rwkv_batch.model.older.files import make_layer
from rwkv_batch.model.older.layer import OlderLayer, square_maps
from rwkv_batch.model.quant.formats import (
    NOT_ROUNDED,
    Format,
    Quantised,
    format_for,
    format_of,
    has_squared_inputs,
    quantise,
)
from rwkv_batch.model.quant.store import QuantStore
from rwkv_batch.model.quant_linear import plain_quantised
from rwkv_batch.model.state import RWKV7, StateFormat
from rwkv_batch.model.weights import Weights

PROGRESS_FROM_BYTES = 256 << 20
FOLD_ROWS = 8192
NORM_EPS = 1e-5
HOPPER = 9
"""Compute capability whose kernels need ffn.value in one order of fp8 and in both orders of int8."""


@dataclass(frozen=True, slots=True)
class Precision:
    device: torch.device
    weights: torch.dtype
    """of the matrices"""
    activations: torch.dtype
    """of the residual stream and between kernels"""
    wkv_state: StateFormat
    storage: Format | None = None
    """format of the large matrices if they are quantised"""
    activation_bits: int = 8
    """of int8"""

    @property
    def weight_bytes(self) -> float:
        """Bytes per number of a large matrix, including scales and second copies."""
        if self.storage is None:
            return self.weights.itemsize
        if self.device.type != "cuda":
            return {Format.FP8: 2.0, Format.INT4: 1.05, Format.W8A8: 1.01}[self.storage]
        fp8_bytes = 1.1 if torch.cuda.get_device_capability(self.device)[0] == HOPPER else 1.4
        return {Format.FP8: fp8_bytes, Format.INT4: 0.6, Format.W8A8: 1.01}[self.storage]

    @property
    def weights_name(self) -> str:
        """Return the display name of the matrices' format: "float16", "fp8"."""
        if self.storage is None:
            return str(self.weights).removeprefix("torch.")
        return f"{self.storage.value}, 16-bit inputs" if self.activation_bits == 16 else self.storage.value


@dataclass(slots=True)
class Embedding:
    """The token table [V, C], and the first LayerNorm unless folded in."""

    table: Tensor
    ln0: Norm | None
    """None: already applied to the table"""

    def fold(self, dtype: torch.dtype) -> Embedding:
        """Apply the norm to the whole table, on the norm's device. Embedding a token is then one read."""
        if self.ln0 is None:
            return self
        device = self.ln0.weight.device
        table = torch.empty(self.table.shape, dtype=dtype, device=device)
        for start in range(0, len(table), FOLD_ROWS):
            rows = self.table[start : start + FOLD_ROWS].to(device).float()
            table[start : start + FOLD_ROWS] = torch.nn.functional.layer_norm(
                rows, rows.shape[1:], self.ln0.weight, self.ln0.bias, NORM_EPS
            )
        release(self.table)
        return Embedding(table, None)


@dataclass(slots=True)
class Head:
    ln_out: Norm
    linear: Linear


MakeLinear = Callable[[Tensor], Linear]
MakeQuantised = Callable[[str, Quantised], Linear]
"""(name of a tensor, quantised weight) -> the linear map"""


LargestInputs = Callable[[str], Tensor]
"""Name of a matrix [out, in] -> the largest absolute input of each channel [in]; see runner/calibration.py."""


L = TypeVar("L", bound=LayerBase)


class LayerLoader:
    """Loads tensors of a weight file for one stage.

    Without `moves_matrices`, matrices stay where the file's tensors are: the backend places them itself.
    """

    def __init__(
        self,
        weights: Weights,
        precision: Precision,
        make_linear: MakeLinear = Linear,
        moves_matrices: bool = True,
        make_quantised: MakeQuantised = plain_quantised,
        largest_inputs: LargestInputs | None = None,
    ) -> None:
        """largest_inputs: needed if the precision's storage is int8 or int4."""
        self._tensor = weights.tensor
        self._names, self._shape = weights.tensors.keys(), weights.shape
        self._precision = precision
        self._make_linear = make_linear
        self._moves_matrices = moves_matrices
        self._make_quantised = make_quantised
        storage = precision.storage
        self._store = None if storage is None else QuantStore(weights.path, weights.fingerprint, storage)
        self._largest_inputs = largest_inputs

    def on_host(self) -> LayerLoader:
        host_loader = copy.copy(self)
        host_loader._moves_matrices = False
        return host_loader

    def embedding(self) -> Embedding:
        """Return the token table as stored, memory-mapped; a quantised one is decoded."""
        table = self._tensor("emb.weight")
        if isinstance(table, BlockTensor):
            table = table.decode(self._precision.weights)
        return Embedding(table, self.norm("blocks.0.ln0"))

    def head(self) -> Head:
        return Head(self.norm("ln_out"), self.linear("head.weight"))

    def has(self, name: str) -> bool:
        return name in self._names

    def older_layer(self, i: int) -> OlderLayer:
        return make_layer(self, self._shape, i)

    def layer(self, i: int) -> Layer:
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
        """Load a vector, [C] fp32."""
        return self._tensor(name).reshape(-1).to(self._precision.device, torch.float32)

    def norm(self, name: str) -> Norm:
        """Load scale and shift of a normalisation, [C] each."""
        return Norm(self.vector(f"{name}.weight"), self.vector(f"{name}.bias"))

    def linears(self, name: str, transpose: bool = False) -> list[Linear]:
        """Load several matrices of one tensor.

        The tensor is [number, out, in], or [number, in, out] with `transpose`.
        """
        stored = self._tensor(name)
        maps = [self._plain_linear(one, transpose) for one in stored]
        release(stored)
        return maps

    def linear(self, name: str, transpose: bool = False) -> Linear:
        """Load a matrix [out, in], or [in, out] with `transpose`. Quantised if the stage's format covers the matrix."""
        storage = self._precision.storage
        format_ = None if storage is None else format_for(name, storage)
        if format_ is not None:
            stored = self._quantised(name, format_)
            stored.activation_bits = self._precision.activation_bits
            return self._make_quantised(name, stored)
        tensor = self._tensor(name)
        linear = self._plain_linear(tensor, transpose)
        kept = getattr(linear, "weight", None)
        if not (isinstance(kept, Tensor) and kept.data_ptr() == tensor.data_ptr()):
            release(tensor)
        return linear

    def _plain_linear(self, stored: Tensor, transpose: bool) -> Linear:
        device = self._precision.device if self._moves_matrices else stored.device
        weight = stored.to(device, self._precision.weights)
        return self._make_linear(weight.T if transpose else weight)

    def _quantised(self, name: str, format_: Format) -> Quantised:
        """Return a quantised matrix: from the disk, or quantised on its device and saved."""
        assert self._store is not None, "only stages with a storage format quantise"
        stored = self._tensor(name)
        found = self._store.load(name, tuple(stored.shape), format_)
        if found is not None:
            return found.to(self._precision.device)
        x_max = None
        if format_ is Format.W8A8:
            assert self._largest_inputs is not None, "int8 needs the largest inputs"
            x_max = self._largest_inputs(name)
        codes = quantise(stored.to(self._precision.device), format_, x_max, has_squared_inputs(name))
        release(stored)
        self._store.save(name, codes)
        return codes

    def _low_rank(self, name: str) -> Linear:
        """Load a matrix stored as [in, out], for x @ w."""
        return self.linear(name, transpose=True)


def load_layers(make: Callable[[int], L], weights: Weights, first: int, last: int) -> Iterator[L]:
    """Load the layers of a stage. With a progress bar for large files."""
    return (make(i) for i in _progress(range(first, last), weights))


def _progress(numbers: range, weights: Weights) -> Iterator[int]:
    is_large = weights.num_bytes >= PROGRESS_FROM_BYTES
    bar = tqdm(numbers, desc=f"loading {weights.path.name}", unit="layer", file=sys.stderr, disable=not is_large)
    for number in bar:
        yield number
        load_progress.report((number + 1) / weights.shape.layers)


def precision_for(
    device: torch.device, dtype: str, wkv_state: str, version: str = RWKV7, activation_bits: int = 8
) -> Precision:
    """Return the dtypes of a stage.

    "auto" weights and states: fp16 on a GPU, fp32 on a CPU. CPU activations are fp32. "fp8", "int8" and "int4" quantise
    the large matrices; everything else is as with "auto". Versions before RWKV-7 use bf16 weights on a GPU, and fp32
    activations and states, because their sums exceed fp16. Their inputs of int8 are not calibrated, so they have 16
    bits on a CPU and stay as they are on a GPU. Raises ValueError for a state format that the version does not have.
    """
    by_name = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    storage = format_of(dtype)
    if activation_bits != 8 and storage is not Format.W8A8:
        raise ValueError(f"--activation-bits {activation_bits} is for --dtype int8, not {dtype}; give both or neither")
    dtype = "auto" if storage is not None else dtype
    on_gpu = device.type == "cuda"
    if version != RWKV7:
        if wkv_state not in ("auto", "fp32"):
            raise ValueError(
                f"states of {version} must be fp32, not {wkv_state}; omit --wkv-state (in a request: the field "
                "wkv_state)"
            )
        weights = by_name[dtype] if dtype != "auto" else (torch.bfloat16 if on_gpu else torch.float32)
        bits = NOT_ROUNDED if on_gpu else 16
        return Precision(device, weights, torch.float32, StateFormat.FP32, storage, bits)
    weights = by_name[dtype] if dtype != "auto" else (torch.float16 if on_gpu else torch.float32)
    activations = weights if on_gpu else torch.float32
    if wkv_state == "auto":  # bf16's eight bits of mantissa are too few for sums
        wkv_state = "fp16" if on_gpu and weights is torch.float16 else "fp32"
    state = StateFormat(wkv_state)
    return Precision(device, weights, activations, state, storage, activation_bits)
