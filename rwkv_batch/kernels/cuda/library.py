"""The forward's CUDA kernels as a shared library: built at first use, bound by ctypes, every call checked."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, Structure, c_int, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from native import build
from native.binding import bind

SOURCES = Path(__file__).with_name("csrc")
NAMES = (
    "shift_mix",
    "elementwise",
    "wkv_decode",
    "wkv_few",
    "wkv_chunk",
    "skinny",
    "skinny_quant",
    "sparse_value",
    "sparse_codes",
    "sparse_few",
    "sparse_row",
    "quantise",
    "turn_codes",
    "adapters",
)
HOPPER_NAMES = (
    "wide",
    "wide_entrance",
    "wide_fp8",
    "wide_fp8_turned",
    "wide_parts",
    "wide_int8",
    "wide_int8_turned",
    "wide_codes_fp8",
    "wide_codes_int8",
    "wide_codes_int4",
    "wide_row",
    "wide_few",
)
MAX_MAPS = 8
MAX_HOPPER_GEMMS = 12


class CudaError(RuntimeError):
    """A launch was refused by the driver; the message has the kernel and CUDA's error number."""


class ShiftMixArgs(Structure):
    """Mirrors the struct in shift_mix.cuh."""

    _fields_ = [
        *[(name, c_void_p) for name in ("x", "delta", "shares", "sums", "added", "x_out", "mixed", "codes", "scales")],
        *[(name, c_void_p) for name in ("shift", "tail")],
        *[(name, c_void_p) for name in ("weight", "bias", "mix")],
        *[(name, c_void_p) for name in ("cu_seqlens", "token_rows", "read_slots", "write_slots")],
        ("slot_stride", c_int64),
        *[(name, c_int) for name in ("tokens", "width", "mixes", "tokens_per_block")],
        *[(name, c_int) for name in ("scale_pitch", "num_shares", "token_blocks", "in_bytes")],
    ]


class WkvArgs(Structure):
    """Mirrors the struct in wkv.cuh."""

    _fields_ = [
        *[(name, c_void_p) for name in ("r", "w", "k", "v", "a", "g", "v_gate", "v_first")],
        *[(name, c_void_p) for name in ("w0", "a0", "v0", "k_k", "k_a", "r_k", "ln_weight", "ln_bias")],
        *[(name, c_void_p) for name in ("y", "parts", "scales", "state", "cu_seqlens", "read_slots", "write_slots")],
        ("slot_stride", c_int64),
        *[(name, c_int) for name in ("rows", "heads", "scale_pitch")],
    ]


class LowExits(Structure):
    """Mirrors the struct in wkv_few.cu."""

    _fields_ = [
        *[(name, c_void_p) for name in ("low", "gate", "low_out", "gate_out")],
        *[(name, c_int) for name in ("groups", "rank", "gate_rank")],
    ]


class SkinnyMap(Structure):
    """Mirrors struct Map in skinny.cu."""

    _fields_ = [
        *[(name, c_void_p) for name in ("weight", "x", "y")],
        *[(name, c_int) for name in ("n", "k", "ld_y", "activation", "float_out", "warps_k", "first_block", "blocks")],
    ]


class SkinnyArgs(Structure):
    """Mirrors the struct in skinny.cu."""

    _fields_ = [("maps", SkinnyMap * MAX_MAPS), ("count", c_int), ("rows", c_int)]


class QuantMapArgs(Structure):
    """Mirrors struct QuantMap in quant_maps.cuh."""

    _fields_ = [
        *[(name, c_void_p) for name in ("codes", "scales", "x", "y")],
        *[(name, c_int) for name in ("n", "k", "ld_y", "activation", "float_out", "warps_k", "first_block", "blocks")],
    ]


class NormMixArgs(Structure):
    """Mirrors the struct in norm_mix.cuh."""

    _fields_ = [
        *[(name, c_void_p) for name in ("x", "delta", "sums", "x_out", "shift")],
        *[(name, c_void_p) for name in ("weight", "bias", "read_slots", "write_slots")],
        ("slot_stride", c_int64),
        ("counter", c_void_p),
        ("width", c_int),
    ]


class RowValueArgs(Structure):
    """Mirrors struct RowValue in quant_maps.cuh."""

    _fields_ = [*[(name, c_void_p) for name in ("codes", "scales", "sums")], ("width", c_int)]


class QuantArgs(Structure):
    """Mirrors the struct in quant_maps.cuh."""

    _fields_ = [
        ("maps", QuantMapArgs * MAX_MAPS),
        *[(name, c_int) for name in ("count", "rows", "format")],
        ("norm", NormMixArgs),
        ("value", RowValueArgs),
    ]


class WideMap(Structure):
    """Mirrors the structs in wide.cu and wide_entrance.cu."""

    _fields_ = [
        *[(name, c_void_p) for name in ("weight", "x", "y")],
        *[(name, c_int) for name in ("n", "k", "activation")],
    ]


class WideArgs(Structure):
    """Mirrors the struct in wide.cu."""

    _fields_ = [
        ("maps", WideMap * MAX_HOPPER_GEMMS),
        *[(name, c_int) for name in ("count", "rows", "transposed", "to_floats", "tile_rows", "splits")],
        ("partial", c_void_p),
        ("counters", c_void_p),
    ]


class WideEntranceArgs(Structure):
    """Mirrors the struct in wide_entrance.cu."""

    _fields_ = [
        ("maps", WideMap * MAX_HOPPER_GEMMS),
        *[(name, c_int) for name in ("count", "whole", "late", "rows", "tile_rows", "splits")],
        ("partial", c_void_p),
        ("counters", c_void_p),
    ]


class WideFp8Map(Structure):
    """Mirrors the struct in wide_fp8.cuh."""

    _fields_ = [
        *[(name, c_void_p) for name in ("weight", "x", "weight_scales", "input_scales", "y")],
        *[(name, c_int) for name in ("n", "k", "activation", "in_parts")],
    ]


class WideFp8Args(Structure):
    """Mirrors the struct in wide_fp8.cuh."""

    _fields_ = [
        ("maps", WideFp8Map * MAX_HOPPER_GEMMS),
        *[(name, c_int) for name in ("count", "late", "rows", "tile_rows", "splits")],
        *[(name, c_int) for name in ("to_floats", "turned", "to_shares")],
        ("partial", c_void_p),
        ("counters", c_void_p),
    ]


class WideInt8Map(Structure):
    """Mirrors the struct in wide_int8.cuh."""

    _fields_ = [
        *[(name, c_void_p) for name in ("weight", "x", "weight_scales", "input_scales", "y", "y_scales")],
        *[(name, c_int) for name in ("n", "k", "activation", "unused")],
    ]


class WideInt8Args(Structure):
    """Mirrors the struct in wide_int8.cuh."""

    _fields_ = [
        ("maps", WideInt8Map * MAX_HOPPER_GEMMS),
        *[(name, c_int) for name in ("count", "late", "rows", "tile_rows", "splits")],
        *[(name, c_int) for name in ("pitch", "groups", "to_shares", "turned")],
        ("partial", c_void_p),
        ("counters", c_void_p),
    ]


class WideCodesMap(Structure):
    """Mirrors the struct in wide_codes.cuh."""

    _fields_ = [
        *[(name, c_void_p) for name in ("codes", "scales", "x", "y")],
        *[(name, c_int) for name in ("n", "k", "activation", "float_out")],
    ]


class WideCodesArgs(Structure):
    """Mirrors the struct in wide_codes.cuh."""

    _fields_ = [
        ("maps", WideCodesMap * MAX_HOPPER_GEMMS),
        *[(name, c_int) for name in ("count", "rows", "transposed", "tile_rows", "splits")],
        ("partial", c_void_p),
        ("counters", c_void_p),
    ]


class AdapterMapArgs(Structure):
    """Mirrors struct AdapterMap in adapters.cu."""

    _fields_ = [("x", c_void_p), ("y", c_void_p), *[(name, c_int) for name in ("k", "n", "target", "unused")]]


class AdapterArgs(Structure):
    """Mirrors the struct in adapters.cu."""

    _fields_ = [
        ("maps", AdapterMapArgs * 3),
        *[(name, c_void_p) for name in ("pairs", "tokens", "numbers", "partial")],
        *[
            (name, c_int)
            for name in ("count", "tiles", "layers", "layer", "targets", "splits", "squares", "tiles_at_once")
        ],
    ]


SIGNATURES: dict[str, list[type]] = {
    "rwkv_shift_mix": [POINTER(ShiftMixArgs), c_int, c_void_p],
    "rwkv_add_shares": [c_void_p] * 3 + [c_int, c_int64, c_void_p],
    "rwkv_norm_rows": [c_void_p] * 5 + [c_int, c_int, c_void_p],
    "rwkv_relu_square": [c_void_p, c_int64, c_void_p],
    "rwkv_low_rank_act": [c_void_p, c_int64, c_void_p, c_int64, c_void_p],
    "rwkv_wkv_decode": [POINTER(WkvArgs), c_int, c_void_p],
    "rwkv_wkv_few": [POINTER(WkvArgs), POINTER(LowExits), c_int, c_void_p],
    "rwkv_wkv_chunk": [POINTER(WkvArgs), c_int, c_int64, c_void_p],
    "rwkv_skinny": [POINTER(SkinnyArgs), c_void_p],
    "rwkv_skinny_quant": [POINTER(QuantArgs), c_void_p],
    "rwkv_sparse_value": [c_void_p] * 5 + [c_int, c_int, c_int, c_void_p],
    "rwkv_sparse_value_quant": [*[c_void_p] * 4, *[c_int] * 4, c_void_p],
    "rwkv_sparse_few": [*[c_void_p] * 4, *[c_int] * 4, c_void_p],
    "rwkv_sparse_row_quant": [*[c_void_p] * 4, *[c_int] * 3, c_void_p],
    "rwkv_quantise_rows": [*[c_void_p] * 3, *[c_int] * 3, c_void_p],
    "rwkv_row_parts": [c_void_p, c_void_p, c_int, c_int, c_void_p],
    "rwkv_row_bytes": [c_void_p] * 3 + [c_int, c_int, c_int, c_int, c_void_p],
    "rwkv_adapters": [POINTER(AdapterArgs), c_void_p],
    "rwkv_turn_codes": [c_void_p, c_void_p, c_int, c_int, c_void_p],
    "rwkv_dequantise": [*[c_void_p] * 3, c_int, c_int, c_int64, c_int, c_void_p],
}
HOPPER_SIGNATURES: dict[str, list[type]] = {
    "rwkv_wide": [POINTER(WideArgs), c_void_p],
    "rwkv_wide_entrance": [POINTER(WideEntranceArgs), c_void_p],
    "rwkv_wide_fp8": [POINTER(WideFp8Args), c_void_p],
    "rwkv_wide_fp8_turned": [POINTER(WideFp8Args), c_void_p],
    "rwkv_wide_parts": [POINTER(WideFp8Args), c_void_p],
    "rwkv_wide_int8": [POINTER(WideInt8Args), c_void_p],
    "rwkv_wide_int8_turned": [POINTER(WideInt8Args), c_void_p],
    "rwkv_wide_row": [POINTER(QuantArgs), c_void_p],
    "rwkv_add_sums": [*[c_void_p] * 3, c_int, c_void_p],
    "rwkv_wide_few": [POINTER(QuantArgs), c_void_p],
    **{f"rwkv_wide_codes_{name}": [POINTER(WideCodesArgs), c_void_p] for name in ("fp8", "int8", "int4")},
}


class Kernels:
    """The loaded library. `call` launches on the current stream of the current device."""

    def __init__(self, library: ctypes.CDLL, signatures: dict[str, list[type]]) -> None:
        self._functions = {name: bind(library, name, *types) for name, types in signatures.items()}

    def call(self, name: str, *args: object) -> None:
        """Run a launcher; raises CudaError if the driver refuses the launch."""
        status = self._functions[name](*args, torch.cuda.current_stream().cuda_stream)
        if status:
            raise CudaError(f"{name} failed with CUDA error {status}")


@functools.cache
def library() -> Kernels:
    """The kernels for the GPU present, compiled if this machine has not compiled these sources before."""
    sources = tuple(SOURCES / f"{name}.cu" for name in NAMES)
    return Kernels(build.load(build.Library("rwkv_kernels", sources)), SIGNATURES)


@functools.cache
def library_unavailable_reason() -> str | None:
    """Why there is no such library on this machine; None if there is one, built now if it never was."""
    try:
        library()
    except (build.BuildError, OSError) as error:
        return str(error)
    return None


@functools.cache
def hopper_library() -> Kernels:
    """The kernels that use Hopper's own instructions; for a machine whose GPUs all are of compute capability 9.0."""
    sources = tuple(SOURCES / f"{name}.cu" for name in HOPPER_NAMES)
    return Kernels(build.load(build.Library("rwkv_hopper", sources, arch_specific=True)), HOPPER_SIGNATURES)


def cuda_pointer(tensor: Tensor | None, dtype: torch.dtype = torch.float16) -> int | None:
    """Address of a contiguous CUDA tensor [...] of the given type; None stays None. Raises ValueError otherwise.

    native.binding.pointer checks more; this one is on the way of every launch.
    """
    if tensor is None:
        return None
    alignment = 16 if dtype.is_floating_point else dtype.itemsize
    if not tensor.is_cuda or tensor.dtype != dtype or not tensor.is_contiguous() or tensor.data_ptr() % alignment:
        raise ValueError(
            f"a kernel wants a contiguous, {alignment}-byte aligned {dtype} tensor on a GPU; got {tensor.dtype} "
            f"{tuple(tensor.shape)} strides {tensor.stride()} on {tensor.device}"
        )
    return tensor.data_ptr()


def slots_pointer(slots: Tensor, dtypes: tuple[torch.dtype, ...]) -> int:
    """Address of a view [num_slots, ...] of one layer: strided over slots, contiguous inside one. Raises ValueError."""
    if not slots.is_cuda or slots.dtype not in dtypes or not slots[0].is_contiguous() or slots.data_ptr() % 16:
        raise ValueError(
            f"slots of {slots.dtype} {tuple(slots.shape)} with strides {slots.stride()} do not fit the kernels"
        )
    return slots.data_ptr()
