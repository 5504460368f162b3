"""Linear layers on a CPU: packed matrices (csrc/linear.cpp), several per call.

For every weight type, results are bit-identical for any batch, any split of a prompt and any number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from native.tensors import pointer
from rwkv_batch.kernels.activation import Activation
from rwkv_batch.kernels.cpu.library import GemmArgs, MatrixArgs, Packing, library
from rwkv_batch.kernels.cpu.memory import allocate_plain
from rwkv_batch.model.layer import Linear
from rwkv_batch.model.quant import w8a8
from rwkv_batch.model.quant.formats import (
    SCALE_UNIT,
    Format,
    Quantised,
    codes_int4,
    dequantise,
    has_squared_inputs,
)

Allocate = Callable[[int], Tensor]
"""Number of bytes -> zeroed memory for a packed matrix, see `memory.py`."""
CPU = torch.device("cpu")
MAX_W8A8_INPUTS = 32768
"""Sums of more products may not fit 32 bits."""


class CpuLinear(Linear):
    """A packed matrix on a CPU: [T, in] fp32 -> [T, out] fp32.

    bf16 weights: AMX multiplies bf16 parts with fp32 sums; without AMX exact fp32 products.
    fp32 weights: exact fp32 products. In the public files, all of them are bf16 numbers. Then they are stored as bf16,
    at half the bytes. x is split into three bf16 parts whose sum is x.
    """

    def __init__(self, weight: Tensor, allocate: Allocate = allocate_plain) -> None:
        """Packs weight [out, in] (bf16, fp16 or fp32, any strides). Raises ValueError for other types."""
        if weight.dim() != 2 or weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(
                f"a CPU matrix is [out, in] in bf16, fp16 or fp32, not {tuple(weight.shape)} {weight.dtype}"
            )
        self.parts = 1 if weight.dtype == torch.bfloat16 else 3
        if weight.dtype != torch.bfloat16:
            weight = _as_bf16_if_exact(weight.float())
        self.packing = Packing.BF16 if weight.dtype == torch.bfloat16 else Packing.FP32
        self.out_features, self.in_features = weight.shape
        self.packed = _pack(weight, self.packing, allocate)
        self.args = MatrixArgs(self.packed.data_ptr(), self.in_features, self.out_features, self.packing, self.parts)

    @property
    def num_bytes(self) -> int:
        return self.packed.numel()

    def __call__(self, x: Tensor) -> Tensor:
        """Maps [T, in] to [T, out]."""
        return run_linears([(self, x, Activation.NONE)])[0].to(x.dtype)

    def to_fp32(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See Linear.to_fp32."""
        return run_linears([(self, x, Activation.NONE)], None if out is None else [out])[0]


class CpuInt4Linear(CpuLinear):
    """An int4 matrix on a CPU.

    Maps [T, in] fp32 to [T, out] fp32. The matrix has a scale and a zero per output and 128 inputs. x is quantised to
    8-bit integers with a scale per 128 inputs; sums over these are exact.
    """

    def __init__(self, stored: Quantised, allocate: Allocate = allocate_plain) -> None:
        """Packs a matrix."""
        assert stored.zeros is not None, "4-bit codes have zeros"
        self.parts, self.packing = 1, Packing.INT4
        sizes = self.in_features, self.out_features = stored.in_features, stored.out_features
        self.packed = allocate(library().rwkv_packed_bytes(*sizes, self.packing))
        codes, zeros = codes_int4(stored).to(torch.int8).contiguous(), stored.zeros.to(torch.int8).contiguous()
        scales = (stored.scales.float() * SCALE_UNIT).contiguous()
        library().rwkv_pack_int4(
            *(t.data_ptr() for t in (codes, zeros, scales)), *sizes, self.packed.data_ptr(), torch.get_num_threads()
        )
        self.args = MatrixArgs(self.packed.data_ptr(), *sizes, self.packing, self.parts)


class CpuW8A8Linear(CpuLinear):
    """A W8A8 matrix on a CPU, as model/quant/w8a8.py defines it: [T, in] fp32 -> [T, out] fp32.

    The result is not rounded to fp16, as it is on a GPU. A row with NaN or infinity becomes NaN.
    """

    def __init__(self, stored: Quantised, unsigned: bool = False, allocate: Allocate = allocate_plain) -> None:
        """Packs a matrix. unsigned: its inputs are never negative.

        Raises ValueError for more inputs than 32-bit sums allow, or other positions than a permutation's.
        """
        assert stored.transform is not None, "int8 has a transform of its inputs"
        self.parts, self.packing = stored.activation_bits // 8, Packing.W8U8 if unsigned else Packing.W8A8
        sizes = self.in_features, self.out_features = stored.in_features, stored.out_features
        if self.in_features > MAX_W8A8_INPUTS:
            raise ValueError(
                f"an int8 matrix with {self.in_features} inputs; the limit is {MAX_W8A8_INPUTS}; use --dtype bf16"
            )
        factors, positions = (t.contiguous() for t in stored.transform)
        if not torch.equal(w8a8.permutation((positions < w8a8.LARGE_CHANNELS).float()), positions):
            raise ValueError(
                f"positions of an int8 matrix that are not {w8a8.LARGE_CHANNELS} channels and the rest, each in order; "
                "delete the folder of quantised weights"
            )
        self.packed = allocate(library().rwkv_packed_bytes(*sizes, self.packing))
        tensors = [*(t.contiguous() for t in stored.in_segments()), factors, positions]
        library().rwkv_pack_w8a8(
            *(t.data_ptr() for t in tensors), *sizes, self.packed.data_ptr(), torch.get_num_threads()
        )
        self.args = MatrixArgs(self.packed.data_ptr(), *sizes, self.packing, self.parts)


def make_quantised(name: str, stored: Quantised, allocate: Allocate = allocate_plain) -> Linear:
    """Returns a quantised matrix. fp8 is stored as bf16, as CPUs have no fp8 arithmetic."""
    if stored.format is Format.W8A8:
        return CpuW8A8Linear(stored, has_squared_inputs(name), allocate)
    if stored.format is Format.FP8:
        return CpuLinear(dequantise(stored).bfloat16().float(), allocate)
    return CpuInt4Linear(stored, allocate)


def run_linears(
    maps: Sequence[tuple[CpuLinear, Tensor, Activation]], outs: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """Runs several matrices over the same number of rows: (linear, x [T, in], activation) -> y [T, out] fp32.

    outs: destination tensors. Raises ValueError for x or `outs` of another shape, MemoryError.
    """
    rows = maps[0][1].shape[0]
    inputs = [x.to(torch.float32).contiguous() for _, x, _ in maps]
    results = list(outs) if outs is not None else [torch.empty(rows, linear.out_features) for linear, _, _ in maps]
    gemms = (GemmArgs * len(maps))()
    for i, (linear, _, activation) in enumerate(maps):
        if inputs[i].shape != (rows, linear.in_features):
            raise ValueError(f"x is {tuple(inputs[i].shape)}, the map takes [{rows}, {linear.in_features}]")
        place = pointer(results[i], "a map's result", torch.float32, (rows, linear.out_features), CPU)
        gemms[i] = GemmArgs(linear.args, inputs[i].data_ptr(), place, activation)
    if library().rwkv_linear(gemms, len(maps), rows, torch.get_num_threads()):
        raise MemoryError(f"no memory to pack {rows} rows for {len(maps)} matrices")
    return results


def _as_bf16_if_exact(weight: Tensor) -> Tensor:
    """Returns the fp32 weight as bf16 if that is exact, else unchanged."""
    short = weight.to(torch.bfloat16)
    return short if torch.equal(short.float(), weight) else weight


def _pack(weight: Tensor, packing: Packing, allocate: Allocate) -> Tensor:
    """Returns the matrix packed for csrc/linear.cpp, 64-byte aligned, as bytes."""
    out, inner = weight.shape
    packed = allocate(library().rwkv_packed_bytes(inner, out, packing))
    pack = library().rwkv_pack_bf16 if packing is Packing.BF16 else library().rwkv_pack_fp32
    pack(weight.data_ptr(), *weight.stride(), inner, out, packed.data_ptr(), torch.get_num_threads())
    return packed
