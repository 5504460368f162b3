"""The C ABI of csrc/*.cpp: signatures, argument blocks, and the library built on first use."""

from __future__ import annotations

import ctypes
import enum
import functools
from pathlib import Path

from native import build

SOURCES = Path(__file__).with_name("csrc")
LIBRARY = build.Library(
    name="rwkv_cpu",
    sources=(SOURCES / "linear.cpp", SOURCES / "mix.cpp"),
    # GCC 12 takes the "undefined" operands inside its own AVX-512 intrinsics for mistakes.
    flags=("-Wno-maybe-uninitialized",),
)


class Kind(enum.IntEnum):
    """How a matrix is packed."""

    FP32 = 0
    BF16 = 1


class Activation(enum.IntEnum):
    """What a linear map applies to its outputs."""

    NONE = 0
    TANH = 1
    SIGMOID = 2
    RELU_SQUARED = 3


def _pointers(*names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_void_p) for name in names]


def _integers(*names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_int64) for name in names]


class ShiftMixCall(ctypes.Structure):
    """csrc/mix.cpp's ShiftMix, field by field."""

    _fields_ = [
        *_pointers("x", "delta", "sum", "weight", "bias", "mix", "shift"),
        *_integers("shift_stride"),
        *_pointers("ends", "read", "write"),
        *_integers("rows", "tokens", "slots", "width", "mixes"),
        *_pointers("h", "mixed"),
        *_integers("threads"),
    ]


class TimeMixCall(ctypes.Structure):
    """csrc/mix.cpp's TimeMix, field by field."""

    _fields_ = [
        *_pointers("r", "w", "k", "v", "a", "g", "v_gate", "v_first"),
        *_pointers("w0", "a0", "v0", "k_k", "k_a", "r_k", "ln_weight", "ln_bias", "y", "wkv"),
        *_integers("slot_stride"),
        *_pointers("ends", "read", "write"),
        *_integers("rows", "tokens", "slots", "heads", "threads"),
    ]


_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "rwkv_has_amx": (ctypes.c_int64, []),
    "rwkv_packed_bytes": (ctypes.c_int64, [ctypes.c_int64] * 3),
    "rwkv_pack_fp32": (None, [ctypes.c_void_p, *[ctypes.c_int64] * 4, ctypes.c_void_p, ctypes.c_int64]),
    "rwkv_pack_bf16": (None, [ctypes.c_void_p, *[ctypes.c_int64] * 4, ctypes.c_void_p, ctypes.c_int64]),
    "rwkv_linear": (ctypes.c_int64, [ctypes.c_void_p, *[ctypes.c_int64] * 3]),
    "rwkv_shift_mix": (ctypes.c_int64, [ctypes.c_void_p]),
    "rwkv_time_mix": (ctypes.c_int64, [ctypes.c_void_p]),
}


@functools.cache
def library() -> ctypes.CDLL:
    """The built library, built now if it never was. Raises native.build.BuildError with the compiler's words."""
    built = build.load(LIBRARY)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(built, name)
        function.restype, function.argtypes = result, arguments
    return built


@functools.cache
def build_problem() -> str | None:
    """Why there is no library on this machine; None if there is one."""
    try:
        library()
    except (build.BuildError, OSError) as error:
        return str(error)
    return None
