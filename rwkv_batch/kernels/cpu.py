"""Backend for CPUs: a stage's layers in one C++ call, on fp32 activations and packed matrices.

Owns the binding to csrc/*.cpp. Results are independent of what else is in the batch, of how a prompt
is cut into chunks and of the number of threads: bit for bit, for every type of the weights.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor

from native.binding import pointer
from rwkv_batch.kernels.activation import Activation
from rwkv_batch.kernels.cpu_adapters import CpuAdapterTable
from rwkv_batch.kernels.cpu_library import (
    Failure,
    JobArgs,
    Kind,
    LayerArgs,
    MapArgs,
    StepArgs,
    build_problem,
    library,
)
from rwkv_batch.kernels.cpu_memory import PackedMemory, plain
from rwkv_batch.kernels.naive import NaiveOps
from rwkv_batch.model.adapter_table import AdapterTable
from rwkv_batch.model.layer import Layer, Norm
from rwkv_batch.model.linear import Linear
from rwkv_batch.model.quant.formats import GROUP, SCALE_UNIT, Format, Quantised, codes_int4, dequantise
from rwkv_batch.model.state_arena import StateArena
from rwkv_batch.model.state_form import StateForm
from rwkv_batch.model.step_inputs import StepInputs

Take = Callable[[int], Tensor]
"""Bytes -> zeroed memory for a packed matrix, see `cpu_memory`."""
CPU = torch.device("cpu")


class CpuLinear(Linear):
    """A packed matrix on a CPU: [T, in] fp32 -> [T, out] fp32.

    bf16 weights: products of bf16 parts, summed in fp32 (AMX), or exact fp32 products (no AMX).
    fp32 weights: exact fp32 products. When all of them are bf16 numbers, as in the public files, they are
    kept as bf16, at half the bytes, and x is split into three bf16 parts whose sum is x.
    """

    def __init__(self, weight: Tensor, take: Take = plain) -> None:
        """Pack weight [out, in] (bf16, fp16 or fp32, any strides). Raises ValueError for other types."""
        if weight.dim() != 2 or weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(
                f"a CPU matrix is [out, in] in bf16, fp16 or fp32, not {tuple(weight.shape)} {weight.dtype}"
            )
        self.parts = 1 if weight.dtype == torch.bfloat16 else 3
        if weight.dtype != torch.bfloat16:
            weight = _as_bf16_if_exact(weight.float())
        self.kind = Kind.BF16 if weight.dtype == torch.bfloat16 else Kind.FP32
        self.out_features, self.in_features = weight.shape
        self.packed = _pack(weight, self.kind, take)
        self.args = MapArgs(self.packed.data_ptr(), self.in_features, self.out_features, self.kind, self.parts)

    @property
    def num_bytes(self) -> int:
        """Bytes that the matrix takes."""
        return self.packed.numel()

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        return run_linears([(self, x, Activation.NONE)])[0].to(x.dtype)

    def to_fp32(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See Linear.to_fp32: written where it is to be."""
        return run_linears([(self, x, Activation.NONE)], None if out is None else [out])[0]


class CpuQuantLinear(CpuLinear):
    """A matrix of int8 codes on a CPU, a scale per output and 128 inputs: [T, in] fp32 -> [T, out] fp32.

    x is taken as 16-bit codes, a scale per 128 inputs; sums over these are whole numbers.
    """

    def __init__(self, codes: Tensor, scales: Tensor, take: Take = plain) -> None:
        """Pack codes [out, in] int8 and scales [out, ceil(in / 128)] fp32."""
        self.parts, self.kind = 1, Kind.INT8
        self.out_features, self.in_features = codes.shape
        self.packed = take(library().rwkv_packed_bytes(self.in_features, self.out_features, self.kind))
        codes, scales = codes.contiguous(), scales.contiguous()
        sizes = self.in_features, self.out_features
        library().rwkv_pack_int8(
            codes.data_ptr(), scales.data_ptr(), *sizes, self.packed.data_ptr(), torch.get_num_threads()
        )
        self.args = MapArgs(self.packed.data_ptr(), *sizes, self.kind, self.parts)


def make_quantised(name: str, stored: Quantised, take: Take = plain) -> Linear:
    """A matrix of small weights. int4 is kept as int8, without loss; fp8 in bf16: there is no arithmetic for it."""
    if stored.format is Format.FP8:
        return CpuLinear(dequantise(stored).bfloat16().float(), take)
    codes = stored.codes
    if stored.zeros is not None:
        zeros = stored.zeros.to(torch.int8).repeat_interleave(GROUP, dim=1)[:, : stored.in_features]
        codes = codes_int4(stored).to(torch.int8) - zeros
    return CpuQuantLinear(codes, stored.scales.float() * SCALE_UNIT, take)


def run_linears(
    maps: Sequence[tuple[CpuLinear, Tensor, Activation]], outs: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """Several maps over as many rows each, in one call: (map, x [T, in], activation) -> y [T, out] fp32.

    `outs`: where they are to be put. Raises ValueError for an x of another width or an unfit out, MemoryError.
    """
    rows = maps[0][1].shape[0]
    inputs = [x.to(torch.float32).contiguous() for _, x, _ in maps]
    results = list(outs) if outs is not None else [torch.empty(rows, linear.out_features) for linear, _, _ in maps]
    jobs = (JobArgs * len(maps))()
    for i, (linear, _, activation) in enumerate(maps):
        if inputs[i].shape != (rows, linear.in_features):
            raise ValueError(f"x is {tuple(inputs[i].shape)}, the map takes [{rows}, {linear.in_features}]")
        place = pointer(results[i], "a map's result", torch.float32, (rows, linear.out_features), CPU)
        jobs[i] = JobArgs(linear.args, inputs[i].data_ptr(), place, activation)
    if library().rwkv_linear(jobs, len(maps), rows, torch.get_num_threads()):
        raise MemoryError(f"no memory to pack {rows} rows for {len(maps)} matrices")
    return results


@dataclass(slots=True)
class CpuLayer(Layer):
    """A layer with the addresses of its tensors."""

    args: LayerArgs


class PackedOps(NaiveOps):
    """Plain torch but for the matrices, which are packed: what older versions of the model run on."""

    name = "cpu"

    def __init__(self) -> None:
        self._memory = PackedMemory()

    @staticmethod
    def why_not(device: torch.device) -> str | None:
        """Needs a CPU and a C++ compiler (once: the library is cached)."""
        if device.type != "cpu":
            return f"the cpu kernels run on a CPU, not on {device}"
        return build_problem()

    def make_linear(self, weight: Tensor) -> Linear:
        """Packs a matrix [out, in] in bf16, fp16 or fp32."""
        return CpuLinear(weight, self._memory.take)

    def make_quantised(self, name: str, stored: Quantised) -> Linear:
        """A matrix [out, in] of small weights, see the function."""
        return make_quantised(name, stored, self._memory.take)


class CpuOps(PackedOps):
    """The C++ backend. States in fp16 and int8 take the plain path, with packed matrices."""

    @staticmethod
    def prepare_layer(layer: Layer) -> CpuLayer:
        """See ops.PreparesLayers."""
        return CpuLayer(**{field.name: getattr(layer, field.name) for field in fields(Layer)}, args=_layer_args(layer))

    @staticmethod
    def can_run_layers(state: StateArena) -> bool:
        """See ops.RunsLayers: states in fp32."""
        return state.form is StateForm.FP32

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
        _raise_on(library().rwkv_layers(ctypes.byref(args)), inputs, state)
        return out, first


def _layer_args(layer: Layer) -> LayerArgs:
    """Addresses of a layer's tensors, which live as long as the layer."""
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


def _as_bf16_if_exact(weight: Tensor) -> Tensor:
    """The fp32 weight as bf16 if no bit is lost, else unchanged."""
    short = weight.to(torch.bfloat16)
    return short if torch.equal(short.float(), weight) else weight


def _pack(weight: Tensor, kind: Kind, take: Take) -> Tensor:
    """The matrix in the order csrc/linear.cpp reads it, 64-byte aligned, as bytes."""
    out, inner = weight.shape
    packed = take(library().rwkv_packed_bytes(inner, out, kind))
    pack = library().rwkv_pack_bf16 if kind is Kind.BF16 else library().rwkv_pack_fp32
    pack(weight.data_ptr(), *weight.stride(), inner, out, packed.data_ptr(), torch.get_num_threads())
    return packed


def _rows(inputs: StepInputs) -> tuple[int, int, int]:
    """Pointers to where rows end and which slots they use."""
    ends, read, write = inputs.cu_seqlens, inputs.read_slots, inputs.write_slots
    if any(t.dtype != torch.int64 or not t.is_contiguous() or t.device.type != "cpu" for t in (ends, read, write)):
        raise ValueError("cu_seqlens, read_slots and write_slots are contiguous int64 on the CPU")
    if not ends.numel() - 1 == read.numel() == write.numel():
        raise ValueError(f"{ends.numel() - 1} rows, but {read.numel()} slots to read and {write.numel()} to write")
    return ends.data_ptr(), read.data_ptr(), write.data_ptr()


def _raise_on(failure: int, inputs: StepInputs, state: StateArena) -> None:
    if failure == Failure.NO_MEMORY:
        raise MemoryError(f"no memory for a step over {len(inputs.tokens)} tokens")
    if failure:
        raise IndexError(
            f"rows that end at {inputs.cu_seqlens.tolist()} with slots {inputs.read_slots.tolist()} -> "
            f"{inputs.write_slots.tolist()} do not fit {state.num_slots} slots and the tokens given"
        )
