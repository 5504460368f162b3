"""The CUDA kernels as two shared libraries, bound by ctypes. Built at first use."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, Structure, c_int, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from native import build
from native.tensors import bind, fields
from rwkv_batch.kernels.cuda.w8a8.arguments import (
    MAX_W8A8_GEMMS,
    MixedLaunchArgs,
    W8A8Args,
    W8A8QuantiseArgs,
    W8A8SparseArgs,
)

SOURCES = Path(__file__).with_name("csrc")
NAMES = (
    "mix/shift_mix",
    "elementwise",
    "wkv/wkv_decode",
    "wkv/wkv_few",
    "wkv/wkv_chunk",
    "wkv/wkv_sequence",
    "skinny/skinny",
    "skinny/skinny_quant",
    "sparse/sparse_value",
    "sparse/sparse_value_quant",
    "sparse/sparse_few_quant",
    "sparse/sparse_row_quant",
    "quantise",
    "transpose_weights",
    "adapters",
    "draft/guess_tokens",
    "w8a8/w8a8_quantise",
    "w8a8/w8a8_mma",
    "w8a8/w8a8_sparse",
    "w8a8/w8a8_sparse_row",
)
HOPPER_NAMES = (
    "gemm/gemm_fp16",
    "gemm/gemm_input_projections",
    "gemm/gemm_fp8",
    "gemm/gemm_fp8_transposed",
    "gemm/gemm_two_part",
    "gemm/gemm_w8a8",
    "weight_only/weight_only_fp8",
    "weight_only/weight_only_int4",
    "skinny/hopper_row",
    "w8a8/w8a8_few",
    "w8a8/w8a8_middle",
    "w8a8/w8a8_many",
    "w8a8/w8a8_many_unsigned",
    "draft/draft_step",
)
MAX_GEMMS = 8
MAX_HOPPER_GEMMS = 12


class CudaError(RuntimeError):
    """The driver refused a launch. The message names the launcher and CUDA's error number."""


class ShiftMixArgs(Structure):
    """Mirrors the struct in mix/shift_mix.cuh."""

    _fields_ = [
        *fields(c_void_p, "x delta partials sums to_clear row_scales output_scales"),
        *fields(c_void_p, "x_out mixed quantised scales ratios"),
        *fields(c_void_p, "shift last_h weight bias mix"),
        *fields(c_void_p, "cu_seqlens token_rows read_slots write_slots"),
        ("slot_stride", c_int64),
        *fields(c_int, "tokens width mixes tokens_per_cta"),
        *fields(c_int, "scale_pitch num_splits token_ctas are_rows_known"),
        *[(name, c_void_p * MAX_W8A8_GEMMS) for name in ("factors", "stored_factors", "order")],
    ]


class WkvArgs(Structure):
    """Mirrors the struct in wkv/wkv.cuh."""

    _fields_ = [
        *fields(c_void_p, "r w k v a g v_gate v_first"),
        *fields(c_void_p, "w0 a0 v0 k_k k_a r_k ln_weight ln_bias"),
        *fields(c_void_p, "y y_two_part state"),
        *fields(c_void_p, "cu_seqlens read_slots write_slots"),
        ("slot_stride", c_int64),
        *fields(c_int, "rows heads continuing"),
    ]


class LowRankUpArgs(Structure):
    """Mirrors the struct in wkv/wkv_few.cu."""

    _fields_ = [
        *fields(c_void_p, "hidden gate_hidden up_weight gate_up_weight"),
        *fields(c_int, "groups rank gate_rank in_order"),
    ]


class SkinnyGemmArgs(Structure):
    """Mirrors struct Map in skinny/skinny.cu."""

    _fields_ = [
        *fields(c_void_p, "weight x y"),
        *fields(c_int, "n k ld_y activation out_fp32 warps_k first_block blocks"),
    ]


class SkinnyLaunchArgs(Structure):
    """Mirrors the struct in skinny/skinny.cu."""

    _fields_ = [("gemms", SkinnyGemmArgs * MAX_GEMMS), ("count", c_int), ("rows", c_int)]


class QuantGemmArgs(Structure):
    """Mirrors struct QuantMap in skinny/quant_args.cuh."""

    _fields_ = [
        *fields(c_void_p, "qweight scales x y"),
        *fields(c_int, "n k ld_y activation out_fp32 warps_k first_block blocks"),
        *fields(c_void_p, "weight_ratios factors order"),
    ]


class NormMixArgs(Structure):
    """Mirrors the struct in mix/norm_mix.cuh."""

    _fields_ = [
        *fields(c_void_p, "x delta sums x_out shift"),
        *fields(c_void_p, "weight bias read_slots write_slots"),
        ("slot_stride", c_int64),
        ("counter", c_void_p),
        ("width", c_int),
    ]


class RowValueArgs(Structure):
    """Mirrors struct RowValue in skinny/quant_args.cuh."""

    _fields_ = [*fields(c_void_p, "qweight scales sums"), ("width", c_int)]


class QuantLaunchArgs(Structure):
    """Mirrors the struct in skinny/quant_args.cuh."""

    _fields_ = [
        ("gemms", QuantGemmArgs * MAX_GEMMS),
        *fields(c_int, "count rows format"),
        ("norm", NormMixArgs),
        ("value", RowValueArgs),
    ]


class Fp16GemmArgs(Structure):
    """Mirrors the structs in gemm/gemm_fp16.cu and gemm/gemm_input_projections.cu."""

    _fields_ = [
        *fields(c_void_p, "weight x y"),
        *fields(c_int, "n k activation"),
    ]


class Fp16LaunchArgs(Structure):
    """Mirrors the struct in gemm/gemm_fp16.cu."""

    _fields_ = [
        ("gemms", Fp16GemmArgs * MAX_HOPPER_GEMMS),
        *fields(c_int, "count rows transposed to_fp32 tile_rows splits"),
        *fields(c_void_p, "partials counters"),
    ]


class InputProjectionArgs(Structure):
    """Mirrors the struct in gemm/gemm_input_projections.cu."""

    _fields_ = [
        ("gemms", Fp16GemmArgs * MAX_HOPPER_GEMMS),
        *fields(c_int, "count full dependent rows tile_rows splits"),
        *fields(c_void_p, "partials counters"),
    ]


class Fp8GemmArgs(Structure):
    """Mirrors the struct in gemm/gemm_fp8.cuh."""

    _fields_ = [
        *fields(c_void_p, "weight x weight_scales input_scales y"),
        *fields(c_int, "n k activation is_two_part"),
    ]


class Fp8LaunchArgs(Structure):
    """Mirrors the struct in gemm/gemm_fp8.cuh."""

    _fields_ = [
        ("gemms", Fp8GemmArgs * MAX_HOPPER_GEMMS),
        *fields(c_int, "count dependent rows tile_rows splits to_fp32 transposed to_partials"),
        *fields(c_void_p, "partials counters"),
    ]


class WeightOnlyGemmArgs(Structure):
    """Mirrors the struct in weight_only/weight_only.cuh."""

    _fields_ = [
        *fields(c_void_p, "qweight scales x y"),
        *fields(c_int, "n k activation out_fp32"),
    ]


class WeightOnlyLaunchArgs(Structure):
    """Mirrors the struct in weight_only/weight_only.cuh."""

    _fields_ = [
        ("gemms", WeightOnlyGemmArgs * MAX_HOPPER_GEMMS),
        *fields(c_int, "count rows transposed tile_rows splits"),
        *fields(c_void_p, "partials counters"),
    ]


class AdapterGemmArgs(Structure):
    """Mirrors struct AdapterMap in adapters.cu."""

    _fields_ = [*fields(c_void_p, "x y"), *fields(c_int, "k n target unused")]


class AdapterArgs(Structure):
    """Mirrors the struct in adapters.cu."""

    _fields_ = [
        ("gemms", AdapterGemmArgs * 3),
        *fields(c_void_p, "pairs tokens numbers partials"),
        *fields(c_int, "count tiles layers layer targets splits squared_relu tiles_in_grid"),
    ]


class DraftStepArgs(Structure):
    """Mirrors the struct in draft/draft_step.cuh."""

    _fields_ = [
        *fields(c_void_p, "weights ups vectors mixes"),
        *fields(c_void_p, "embedding head out_weight out_bias wkv shift"),
        *fields(c_void_p, "table step chosen guesses"),
        *fields(c_void_p, "exchange keys v_first launches"),
        *fields(c_int64, "wkv_slot wkv_layer shift_slot shift_layer"),
        *fields(c_int, "num_layers width vocab rows table_rows"),
    ]


class GuessTableArgs(Structure):
    """Mirrors the struct in draft/guess_tokens.cu."""

    _fields_ = [
        *fields(c_void_p, "rows last after table"),
        *fields(c_int, "num_rows row_length padded_rows num_steps table_rows num_slots"),
    ]


SIGNATURES: dict[str, list[type]] = {
    "rwkv_place_tokens": [*[c_void_p] * 4, c_int, c_void_p],
    "rwkv_fill_guess_table": [POINTER(GuessTableArgs), c_void_p],
    "rwkv_shift_mix": [POINTER(ShiftMixArgs), c_int, c_void_p],
    "rwkv_add_partials": [c_void_p] * 3 + [c_int, c_int64, c_void_p],
    "rwkv_add_exact_sums": [*[c_void_p] * 5, c_int, c_int, c_void_p],
    "rwkv_norm_rows": [c_void_p] * 5 + [c_int, c_int, c_void_p],
    "rwkv_relu_square": [c_void_p, c_int64, c_void_p],
    "rwkv_low_rank_act": [c_void_p, c_int64, c_void_p, c_int64, c_void_p],
    "rwkv_wkv_decode": [POINTER(WkvArgs), c_int, c_void_p],
    "rwkv_wkv_few": [POINTER(WkvArgs), POINTER(LowRankUpArgs), c_int, c_void_p],
    "rwkv_wkv_chunk": [POINTER(WkvArgs), c_int, c_int64, c_void_p],
    "rwkv_wkv_sequence": [POINTER(WkvArgs), c_int, c_void_p],
    "rwkv_skinny": [POINTER(SkinnyLaunchArgs), c_void_p],
    "rwkv_skinny_quant": [POINTER(QuantLaunchArgs), c_void_p],
    "rwkv_sparse_value": [c_void_p] * 5 + [c_int, c_int, c_int, c_void_p],
    "rwkv_sparse_value_quant": [*[c_void_p] * 4, *[c_int] * 4, c_void_p],
    "rwkv_sparse_few_quant": [*[c_void_p] * 4, *[c_int] * 4, c_void_p],
    "rwkv_sparse_row_quant": [*[c_void_p] * 4, *[c_int] * 3, c_void_p],
    "rwkv_quantise_rows": [*[c_void_p] * 3, *[c_int] * 3, c_void_p],
    "rwkv_two_part_rows": [c_void_p, c_void_p, c_int, c_int, c_void_p],
    "rwkv_adapters": [POINTER(AdapterArgs), c_void_p],
    "rwkv_transpose_weights": [c_void_p, c_void_p, c_int, c_int, c_void_p],
    "rwkv_dequantise": [*[c_void_p] * 3, c_int, c_int, c_int64, c_int, c_void_p],
    "rwkv_w8a8_quantise": [POINTER(W8A8QuantiseArgs), c_void_p],
    "rwkv_w8a8_mma": [POINTER(W8A8Args), c_void_p],
    "rwkv_w8a8_sparse": [POINTER(W8A8SparseArgs), c_void_p],
    "rwkv_w8a8_sparse_row": [POINTER(W8A8SparseArgs), c_void_p],
}
HOPPER_SIGNATURES: dict[str, list[type]] = {
    "rwkv_gemm_fp16": [POINTER(Fp16LaunchArgs), c_void_p],
    "rwkv_gemm_input_projections": [POINTER(InputProjectionArgs), c_void_p],
    "rwkv_gemm_fp8": [POINTER(Fp8LaunchArgs), c_void_p],
    "rwkv_gemm_fp8_transposed": [POINTER(Fp8LaunchArgs), c_void_p],
    "rwkv_gemm_two_part": [POINTER(Fp8LaunchArgs), c_void_p],
    "rwkv_gemm_w8a8": [POINTER(MixedLaunchArgs), c_void_p],
    "rwkv_hopper_row": [POINTER(QuantLaunchArgs), c_void_p],
    "rwkv_add_fixed_point": [*[c_void_p] * 3, c_int, c_void_p],
    "rwkv_w8a8": [POINTER(W8A8Args), c_void_p],
    "rwkv_draft_step": [POINTER(DraftStepArgs), c_void_p],
    **{f"rwkv_weight_only_{name}": [POINTER(WeightOnlyLaunchArgs), c_void_p] for name in ("fp8", "int4")},
}


class Kernels:
    """The loaded library. `call` launches on the current stream of the current device."""

    def __init__(self, library: ctypes.CDLL, signatures: dict[str, list[type]]) -> None:
        self._functions = {name: bind(library, name, *types) for name, types in signatures.items()}

    def call(self, name: str, *args: object) -> None:
        """Launch a kernel. Raises CudaError if the driver refuses it."""
        status = self._functions[name](*args, torch.cuda.current_stream().cuda_stream)
        if status:
            raise CudaError(f"{name} failed with CUDA error {status}")


@functools.cache
def library() -> Kernels:
    """The kernels for every GPU. Compiled at the first use of these sources."""
    sources = tuple(SOURCES / f"{name}.cu" for name in NAMES)
    return Kernels(build.load(build.Library("rwkv_kernels", sources)), SIGNATURES)


@functools.cache
def library_unavailable_reason() -> str | None:
    """Why this machine has no such library; None if it has one. Builds it if needed."""
    try:
        library()
    except (build.BuildError, OSError) as error:
        return str(error)
    return None


@functools.cache
def hopper_library() -> Kernels:
    """The kernels that use Hopper's instructions. Requires compute capability 9.0 on every GPU."""
    sources = tuple(SOURCES / f"{name}.cu" for name in HOPPER_NAMES)
    return Kernels(build.load(build.Library("rwkv_hopper", sources, arch_specific=True)), HOPPER_SIGNATURES)


def cuda_pointer(tensor: Tensor | None, dtype: torch.dtype = torch.float16) -> int | None:
    """Returns the address of a contiguous CUDA tensor [...] of that dtype; None stays None.

    Runs at every launch, so it checks less than native.tensors.pointer. Raises ValueError for another tensor.
    """
    if tensor is None:
        return None
    alignment = 16 if dtype.is_floating_point else dtype.itemsize
    if not tensor.is_cuda or tensor.dtype != dtype or not tensor.is_contiguous() or tensor.data_ptr() % alignment:
        raise ValueError(
            f"got {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}; "
            f"a kernel requires a contiguous, {alignment}-byte aligned {dtype} tensor on a GPU"
        )
    return tensor.data_ptr()


def slots_pointer(slots: Tensor, dtypes: tuple[torch.dtype, ...]) -> int:
    """Returns the address of one layer's slots [num_slots, ...].

    They may be strided over slots only. Raises ValueError for others.
    """
    if not slots.is_cuda or slots.dtype not in dtypes or not slots[0].is_contiguous() or slots.data_ptr() % 16:
        raise ValueError(
            f"got slots of {slots.dtype} {tuple(slots.shape)} with strides {slots.stride()} on {slots.device}; the "
            f"kernels require {' or '.join(map(str, dtypes))} on a GPU, 16-byte aligned and contiguous within a slot"
        )
    return slots.data_ptr()


def fp32_result(out: Tensor | None, rows: int, outputs: int, device: torch.device) -> Tensor:
    """Return `out`, or else a new tensor [rows, outputs] fp32. Raises ValueError if `out` has another shape."""
    if out is None:
        return torch.empty(rows, outputs, dtype=torch.float32, device=device)
    if out.shape != (rows, outputs):
        raise ValueError(f"the result is {(rows, outputs)}, the place for it {tuple(out.shape)}")
    return out
