"""Backend for CPUs: fused C++ pieces of a layer on fp32 activations and packed matrices.

Owns the binding to csrc/*.cpp. Results are independent of what else is in the batch, of how a prompt
is cut into chunks and of the number of threads: bit for bit, for every type of the weights.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from rwkv_batch.batch import StepInputs
from rwkv_batch.kernels.cpu_library import Activation, Kind, ShiftMixCall, TimeMixCall, build_problem, library
from rwkv_batch.kernels.naive import NaiveOps
from rwkv_batch.layer import Layer, Norm, Projections
from rwkv_batch.linear import Linear

ALIGNMENT = 64
WIDTH_MULTIPLE = 64


class CpuLinear(Linear):
    """A packed matrix on a CPU: [T, in] fp32 -> [T, out] fp32.

    bf16 weights: products of bf16 parts, summed in fp32 (AMX), or exact fp32 products (no AMX).
    fp32 weights: exact fp32 products. When all of them are bf16 numbers, as in the public files, they are
    kept as bf16, at half the bytes, and x is split into three bf16 parts whose sum is x.
    """

    def __init__(self, weight: Tensor) -> None:
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
        self.packed = _pack(weight, self.kind)
        self._job_tail = (self.in_features, self.out_features, int(self.kind), self.parts)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        return run_linears([(self, x, Activation.NONE)])[0].to(x.dtype)

    def job(self, x: Tensor, y: Tensor, activation: Activation) -> tuple[int, ...]:
        """The eight numbers of csrc/linear.cpp's Job."""
        return (self.packed.data_ptr(), x.data_ptr(), y.data_ptr(), *self._job_tail, int(activation))


def run_linears(maps: Sequence[tuple[CpuLinear, Tensor, Activation]]) -> list[Tensor]:
    """Several maps over as many rows each, in one call: (map, x [T, in], activation) -> y [T, out] fp32."""
    rows = maps[0][1].shape[0]
    inputs = [_fp32(x) for _, x, _ in maps]
    results = [torch.empty(rows, linear.out_features) for linear, _, _ in maps]
    numbers: list[int] = []
    for (linear, _, activation), x, y in zip(maps, inputs, results, strict=True):
        if x.shape != (rows, linear.in_features):
            raise ValueError(f"x is {tuple(x.shape)}, the map takes [{rows}, {linear.in_features}]")
        numbers.extend(linear.job(x, y, activation))
    jobs = (ctypes.c_int64 * len(numbers))(*numbers)
    if library().rwkv_linear(ctypes.addressof(jobs), len(maps), rows, torch.get_num_threads()):
        raise MemoryError(f"no memory to pack {rows} rows for {len(maps)} matrices")
    return results


class CpuOps(NaiveOps):
    """The C++ backend. What it does not cover (fp16 states) falls back to plain torch, piece by piece."""

    name = "cpu"

    @staticmethod
    def why_not(device: torch.device) -> str | None:
        """Needs a CPU and a C++ compiler (once: the library is cached)."""
        if device.type != "cpu":
            return f"the cpu kernels run on a CPU, not on {device}"
        return build_problem()

    @staticmethod
    def make_linear(weight: Tensor) -> Linear:
        """Packs a matrix."""
        return CpuLinear(weight)

    def shift_mix(
        self, x: Tensor, delta: Tensor | None, norm: Norm, mix: Tensor, shift: Tensor, inputs: StepInputs
    ) -> tuple[Tensor, Tensor]:
        """As NaiveOps.shift_mix; x, delta and shift fp32."""
        tokens, width = x.shape
        if shift.dtype != torch.float32 or x.dtype != torch.float32 or width % WIDTH_MULTIPLE:
            return super().shift_mix(x, delta, norm, mix, shift, inputs)
        _check_slots(shift, inner=1)
        x = x.contiguous()
        delta = None if delta is None else _fp32(delta)
        total = x if delta is None else torch.empty_like(x)
        scratch = torch.empty_like(x)
        mixed = torch.empty(mix.shape[0], tokens, width)
        call = ShiftMixCall(
            x.data_ptr(), _pointer(delta), total.data_ptr(), norm.weight.data_ptr(), norm.bias.data_ptr(),
            mix.data_ptr(), shift.data_ptr(), shift.stride(0), *_rows(inputs),
            inputs.read_slots.numel(), tokens, len(shift), width, mix.shape[0],
            scratch.data_ptr(), mixed.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        _raise_on(library().rwkv_shift_mix(ctypes.byref(call)), inputs, shift)
        return total, mixed

    def project(self, layer: Layer, mixed: Tensor) -> Projections:
        """As NaiveOps.project, in two calls: everything that reads the mixes, then the low ranks' second halves."""
        xr, xw, xk, xv, xa, xg = mixed
        none = Activation.NONE
        first = [
            (layer.receptance, xr, none),
            (layer.key, xk, none),
            (layer.value, xv, none),
            (layer.w1, xw, Activation.TANH),
            (layer.a1, xa, none),
            (layer.g1, xg, Activation.SIGMOID),
        ]
        second = [layer.w2, layer.a2, layer.g2]
        if layer.v_residual is not None:
            first.append((layer.v_residual.v1, xv, none))
            second.append(layer.v_residual.v2)
        if not all(isinstance(linear, CpuLinear) for linear in (*second, *(linear for linear, _, _ in first))):
            return super().project(layer, mixed)
        r, k, v, *low = run_linears(first)  # type: ignore[arg-type]
        w, a, g, *gate = run_linears([(linear, x, none) for linear, x in zip(second, low, strict=True)])  # type: ignore[misc]
        return Projections(r=r, w=w, k=k, v=v, a=a, g=g, v_gate=gate[0] if gate else None)

    def time_mix(
        self, layer: Layer, p: Projections, v_first: Tensor | None, wkv: Tensor, inputs: StepInputs
    ) -> tuple[Tensor, Tensor]:
        """As NaiveOps.time_mix; the state is advanced in its slots (fp32; fp16 states take the naive path)."""
        if wkv.dtype != torch.float32 or p.r.dtype != torch.float32:
            return super().time_mix(layer, p, v_first, wkv, inputs)
        _check_slots(wkv, inner=3)
        residual = layer.v_residual if v_first is not None else None
        streams = [_fp32(t) for t in (p.r, p.w, p.k, p.v, p.a, p.g)]
        gate = None if residual is None or p.v_gate is None else _fp32(p.v_gate)
        first = streams[3] if gate is None or v_first is None else _fp32(v_first)
        y = torch.empty_like(streams[0])
        call = TimeMixCall(
            *(t.data_ptr() for t in streams), _pointer(gate), first.data_ptr(),
            layer.w0.data_ptr(), layer.a0.data_ptr(), _pointer(None if residual is None else residual.v0),
            layer.k_k.data_ptr(), layer.k_a.data_ptr(), layer.r_k.data_ptr(),
            layer.ln_x.weight.data_ptr(), layer.ln_x.bias.data_ptr(),
            y.data_ptr(), wkv.data_ptr(), wkv.stride(0), *_rows(inputs),
            inputs.read_slots.numel(), len(y), len(wkv), wkv.shape[1], torch.get_num_threads(),
        )  # fmt: skip
        _raise_on(library().rwkv_time_mix(ctypes.byref(call)), inputs, wkv)
        return y, first

    def channel_mix(self, layer: Layer, x: Tensor) -> Tensor:
        """As NaiveOps.channel_mix."""
        if not isinstance(layer.ffn_key, CpuLinear):
            return super().channel_mix(layer, x)
        hidden = run_linears([(layer.ffn_key, x, Activation.RELU_SQUARED)])[0]
        return layer.ffn_value(hidden)


def _as_bf16_if_exact(weight: Tensor) -> Tensor:
    """The fp32 weight as bf16 if no bit is lost, else unchanged."""
    short = weight.to(torch.bfloat16)
    return short if torch.equal(short.float(), weight) else weight


def _pack(weight: Tensor, kind: Kind) -> Tensor:
    """The matrix in the order csrc/linear.cpp reads it, 64-byte aligned, as bytes."""
    out, inner = weight.shape
    size = library().rwkv_packed_bytes(inner, out, kind)
    memory = torch.zeros(size + ALIGNMENT, dtype=torch.uint8)
    packed = memory[-memory.data_ptr() % ALIGNMENT :][:size]
    pack = library().rwkv_pack_bf16 if kind is Kind.BF16 else library().rwkv_pack_fp32
    pack(weight.data_ptr(), *weight.stride(), inner, out, packed.data_ptr(), torch.get_num_threads())
    return packed


def _fp32(x: Tensor) -> Tensor:
    return x.to(torch.float32).contiguous()


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _rows(inputs: StepInputs) -> tuple[int, int, int]:
    """Pointers to where rows end and which slots they use."""
    ends, read, write = inputs.cu_seqlens, inputs.read_slots, inputs.write_slots
    if any(t.dtype != torch.int64 or not t.is_contiguous() or t.device.type != "cpu" for t in (ends, read, write)):
        raise ValueError("cu_seqlens, read_slots and write_slots are contiguous int64 on the CPU")
    if not ends.numel() - 1 == read.numel() == write.numel():
        raise ValueError(f"{ends.numel() - 1} rows, but {read.numel()} slots to read and {write.numel()} to write")
    return ends.data_ptr(), read.data_ptr(), write.data_ptr()


def _raise_on(code: int, inputs: StepInputs, state: Tensor) -> None:
    if code:
        raise IndexError(
            f"rows that end at {inputs.cu_seqlens.tolist()} with slots {inputs.read_slots.tolist()} -> "
            f"{inputs.write_slots.tolist()} do not fit {len(state)} slots and the tokens given"
        )


def _check_slots(state: Tensor, inner: int) -> None:
    """State [num_slots, ...] may be strided over slots only."""
    expected = 1
    for size, stride in zip(reversed(state.shape[-inner:]), reversed(state.stride()[-inner:]), strict=True):
        if size > 1 and stride != expected:
            raise ValueError(f"state {tuple(state.shape)} with strides {state.stride()} is not contiguous in a slot")
        expected *= size
