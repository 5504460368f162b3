"""The CPU backend: a stage's layers in one C++ call, on fp32 activations and packed matrices.

For every weight and state type, results are bit-identical for any batch, any split of a prompt and any number of
threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from native.tensors import pointer
from rwkv_batch.kernels.cpu.library import (
    AdapterLayerArgs,
    LayerArgs,
    PairArgs,
    StepArgs,
    StepFailure,
    library,
    library_unavailable_reason,
)
from rwkv_batch.kernels.cpu.linear import CPU, CpuLinear, make_quantised
from rwkv_batch.kernels.cpu.memory import PackedMemory
from rwkv_batch.kernels.naive import NaiveOps
from rwkv_batch.model.adapter_table import NO_ADAPTER, AdapterTable
from rwkv_batch.model.layer import WHOLE, Cuts, Layer, Linear, Norm
from rwkv_batch.model.low_rank import LayerPairs, Pair, Target
from rwkv_batch.model.quant.formats import Quantised
from rwkv_batch.model.state import HEAD_SIZE, StateArena
from rwkv_batch.model.step_inputs import StepInputs

HEAD = (1, HEAD_SIZE, HEAD_SIZE)
"""Sizes of one head's state."""


class CpuAdapterTable(AdapterTable):
    """A stage's adapters, with the addresses of their pairs.

    Each adapter has an array [layers] of its pairs' addresses, b transposed.
    """

    def __init__(self, first: int, last: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(first, last, device, dtype)
        self._arrays: dict[int, ctypes.Array[AdapterLayerArgs]] = {}
        """by number"""
        self._kept: dict[int, list[object]] = {}

    def put(self, number: int, layers: Mapping[int, LayerPairs]) -> None:
        """See AdapterTable."""
        self.drop(number)
        super().put(number, layers)
        array = (AdapterLayerArgs * len(self.layers))()
        kept: list[object] = []
        for place, layer in zip(array, self.pairs(number), strict=True):
            for target, pair in layer.pairs.items():
                place.pairs[target] = _pair_args(pair, kept)
            if (experts := layer.experts) is not None:
                of_experts = (PairArgs * (2 * len(experts.pairs)))()
                for e, pairs in enumerate(experts.pairs):
                    for i, target in enumerate((Target.FFN_KEY, Target.FFN_VALUE)):
                        if target in pairs:
                            of_experts[2 * e + i] = _pair_args(pairs[target], kept)
                place.router, place.experts = experts.router.data_ptr(), ctypes.addressof(of_experts)
                place.num_experts, place.active = len(experts.pairs), experts.active
                kept.append(of_experts)
        self._arrays[number], self._kept[number] = array, kept

    def drop(self, number: int) -> None:
        """See AdapterTable."""
        super().drop(number)
        self._arrays.pop(number, None)
        self._kept.pop(number, None)

    def addresses(self, inputs: StepInputs) -> Tensor | None:
        """Returns each token's adapter address, [T] int64.

        0: none; None: no row has one.
        """
        if inputs.adapters is None:
            return None
        places = {number: ctypes.addressof(array) for number, array in self._arrays.items()} | {NO_ADAPTER: 0}
        return torch.tensor([places[number] for number in inputs.adapters.tolist()], dtype=torch.int64)


def _pair_args(pair: Pair, kept: list[object]) -> PairArgs:
    """Returns a pair's addresses; appends the tensors to keep alive to `kept`."""
    b_transposed = pair.b.T.contiguous()
    kept.append(b_transposed)
    return PairArgs(pair.a.data_ptr(), b_transposed.data_ptr(), pair.rank)


@dataclass(slots=True)
class CpuLayer(Layer):
    """A layer and its tensors' addresses."""

    args: LayerArgs


class PackedOps(NaiveOps):
    """Plain torch with packed matrices; runs older model versions."""

    name = "cpu"

    def __init__(self) -> None:
        self._memory = PackedMemory()

    @staticmethod
    def unavailable_reason(device: torch.device) -> str | None:
        """Returns why it cannot run, None if it can. Requires a CPU and, for the first build, a C++ compiler."""
        if device.type != "cpu":
            return f"the cpu kernels run on a CPU, not on {device}"
        return library_unavailable_reason()

    def make_linear(self, weight: Tensor) -> Linear:
        """Packs a matrix [out, in] in bf16, fp16 or fp32."""
        return CpuLinear(weight, self._memory.allocate)

    def make_quantised(self, name: str, stored: Quantised) -> Linear:
        """A quantised matrix [out, in], see the function."""
        return make_quantised(name, stored, self._memory.allocate)


class CpuOps(PackedOps):
    """The C++ backend."""

    @staticmethod
    def prepare_layer(layer: Layer) -> CpuLayer:
        """See ops.PreparesLayers."""
        return CpuLayer(**{field.name: getattr(layer, field.name) for field in fields(Layer)}, args=_layer_args(layer))

    make_adapter_table = CpuAdapterTable

    @staticmethod
    def reserve(layers: Sequence[Layer], width: int, tokens: int) -> None:
        """See ops.RunsLayers."""
        args = StepArgs(_layers_args(layers), len(layers), tokens=tokens, width=width)
        if library().rwkv_reserve(ctypes.byref(args)) == StepFailure.NO_MEMORY:
            raise MemoryError(f"no memory for a step over {tokens} tokens")

    def run_layers(
        self,
        layers: Sequence[Layer],
        x: Tensor,
        v_first: Tensor | None,
        state: StateArena,
        inputs: StepInputs,
        adapters: AdapterTable | None = None,
        cuts: Cuts = WHOLE,
    ) -> tuple[Tensor, Tensor | None]:
        """See ops.RunsLayers. Raises IndexError (rows that do not fit the slots) and MemoryError."""
        tokens, width = x.shape
        out = x.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        first = torch.empty_like(out) if v_first is None else v_first.to(torch.float32).contiguous()
        own = adapters.addresses(inputs) if isinstance(adapters, CpuAdapterTable) else None
        args = StepArgs(
            _layers_args(layers), len(layers),
            out.data_ptr(), first.data_ptr(), state.wkv.data_ptr(), state.shift.data_ptr(),
            *_rows(inputs), inputs.read_slots.numel(), tokens, state.num_slots, width, torch.get_num_threads(),
            state.form.num_bytes(HEAD), *cuts,
            None if own is None else own.data_ptr(),
        )  # fmt: skip
        _check_status(library().rwkv_layers(ctypes.byref(args)), inputs, state)
        return out, first


def _layers_args(layers: Sequence[Layer]) -> ctypes.Array[LayerArgs]:
    prepared = [layer.args for layer in layers if isinstance(layer, CpuLayer)]
    assert len(prepared) == len(layers), "prepare_layer comes first"
    return (LayerArgs * len(layers))(*prepared)


def _layer_args(layer: Layer) -> LayerArgs:
    """Addresses of a layer's tensors, which must outlive the result."""
    args, residual = LayerArgs(), layer.v_residual
    for name in ("ln1", "ln2", "ln_x"):
        norm: Norm = getattr(layer, name)
        setattr(args, f"{name}_weight", _vector(norm.weight))
        setattr(args, f"{name}_bias", _vector(norm.bias))
    for name in ("att_mix", "ffn_mix", "w0", "a0", "k_k", "k_a", "r_k"):
        setattr(args, name, _vector(getattr(layer, name)))
    for name in ("receptance", "key", "value", "output", "ffn_key", "ffn_value", "w1", "a1", "g1", "w2", "a2", "g2"):
        setattr(args, name, getattr(layer, name).args)
    if residual is not None:
        args.v0 = _vector(residual.v0)
        assert isinstance(residual.v1, CpuLinear) and isinstance(residual.v2, CpuLinear)
        args.v1, args.v2 = residual.v1.args, residual.v2.args
    return args


def _vector(x: Tensor) -> int:
    return pointer(x, "a layer's vector", torch.float32, tuple(x.shape), CPU)


def _rows(inputs: StepInputs) -> tuple[int, int, int]:
    """Returns pointers to row ends, read slots and write slots."""
    ends, read, write = inputs.cu_seqlens, inputs.read_slots, inputs.write_slots
    if any(t.dtype != torch.int64 or not t.is_contiguous() or t.device.type != "cpu" for t in (ends, read, write)):
        raise ValueError("cu_seqlens, read_slots and write_slots are contiguous int64 on the CPU")
    if not ends.numel() - 1 == read.numel() == write.numel():
        raise ValueError(f"{ends.numel() - 1} rows, but {read.numel()} slots to read and {write.numel()} to write")
    return ends.data_ptr(), read.data_ptr(), write.data_ptr()


def _check_status(failure: int, inputs: StepInputs, state: StateArena) -> None:
    if failure == StepFailure.NO_MEMORY:
        raise MemoryError(f"no memory for a step over {len(inputs.tokens)} tokens")
    if failure:
        raise IndexError(
            f"rows that end at {inputs.cu_seqlens.tolist()} with slots {inputs.read_slots.tolist()} -> "
            f"{inputs.write_slots.tolist()} do not fit {state.num_slots} slots and the tokens given"
        )
