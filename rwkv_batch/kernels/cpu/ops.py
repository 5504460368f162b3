"""The CPU backend: a stage's layers in one C++ call, on fp32 activations and packed matrices.

For every weight type, results are bit-identical for any batch, any split of a prompt and any number of threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor

from native.tensors import pointer
from rwkv_batch.kernels.cpu.adapters import CpuAdapterTable
from rwkv_batch.kernels.cpu.library import LayerArgs, StepArgs, StepFailure, library, library_unavailable_reason
from rwkv_batch.kernels.cpu.linear import CPU, CpuLinear, make_quantised
from rwkv_batch.kernels.cpu.memory import PackedMemory
from rwkv_batch.kernels.naive import NaiveOps
from rwkv_batch.model.adapter_table import AdapterTable
from rwkv_batch.model.layer import Layer, Linear, Norm
from rwkv_batch.model.quant.formats import Quantised
from rwkv_batch.model.state import StateArena, StateFormat
from rwkv_batch.model.step_inputs import StepInputs


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
        """Requires a CPU and, for the first build, a C++ compiler."""
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
    """The C++ backend. fp16 and int8 states use the plain torch layers with packed matrices."""

    @staticmethod
    def prepare_layer(layer: Layer) -> CpuLayer:
        """See ops.PreparesLayers."""
        return CpuLayer(**{field.name: getattr(layer, field.name) for field in fields(Layer)}, args=_layer_args(layer))

    @staticmethod
    def can_run_layers(state: StateArena) -> bool:
        """See ops.RunsLayers: fp32 states."""
        return state.form is StateFormat.FP32

    make_adapter_table = staticmethod(partial(CpuAdapterTable, make_linear=CpuLinear))

    def run_layers(
        self,
        layers: Sequence[Layer],
        x: Tensor,
        v_first: Tensor | None,
        state: StateArena,
        inputs: StepInputs,
        adapters: AdapterTable | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """See ops.RunsLayers. Raises ValueError, IndexError (rows that do not fit the slots) and MemoryError."""
        if not self.can_run_layers(state):
            raise ValueError(f"the cpu kernels run layers over fp32 states, not {state.form}")
        prepared = [layer.args for layer in layers if isinstance(layer, CpuLayer)]
        assert len(prepared) == len(layers), "prepare_layer comes first"
        x = x.to(torch.float32).contiguous()
        tokens, width = x.shape
        out = torch.empty_like(x)
        first = torch.empty_like(x) if v_first is None else v_first.to(torch.float32).contiguous()
        own = adapters.addresses(inputs) if isinstance(adapters, CpuAdapterTable) else None
        args = StepArgs(
            (LayerArgs * len(layers))(*prepared), len(layers),
            x.data_ptr(), out.data_ptr(), first.data_ptr(), state.wkv.data_ptr(), state.shift.data_ptr(),
            *_rows(inputs), inputs.read_slots.numel(), tokens, state.num_slots, width, torch.get_num_threads(),
            None if own is None else own.data_ptr(),
        )  # fmt: skip
        _check_status(library().rwkv_layers(ctypes.byref(args)), inputs, state)
        return out, first


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
