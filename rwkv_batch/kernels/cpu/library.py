"""The C ABI of csrc/*.cpp: signatures, argument structs, and the library, built on first use."""

from __future__ import annotations

import ctypes
import enum
import functools
from pathlib import Path

from native import build

SOURCES = Path(__file__).with_name("csrc")
LIBRARY = build.Library(
    name="rwkv_cpu",
    sources=(SOURCES / "linear.cpp", SOURCES / "mix.cpp", SOURCES / "layers.cpp"),
    # GCC 12 takes the "undefined" operands inside its own AVX-512 intrinsics for mistakes.
    flags=("-Wno-maybe-uninitialized",),
)


class Kind(enum.IntEnum):
    """How a matrix is packed."""

    FP32 = 0
    BF16 = 1
    INT8 = 2


class Failure(enum.IntEnum):
    """Why a step failed."""

    ROWS_DO_NOT_FIT = 1
    NO_MEMORY = 2


def _pointers(*names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_void_p) for name in names]


def _integers(*names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_int64) for name in names]


class MapArgs(ctypes.Structure):
    """csrc/linear.h's Map: a packed matrix."""

    _fields_ = [*_pointers("weight"), *_integers("inner", "out", "kind", "parts")]


class JobArgs(ctypes.Structure):
    """csrc/linear.h's Job: one matrix over the rows of a call."""

    _fields_ = [("map", MapArgs), *_pointers("x", "y"), *_integers("activation")]


class LayerArgs(ctypes.Structure):
    """csrc/layers.cpp's Layer: addresses of a layer's tensors; null: absent."""

    _fields_ = [
        *_pointers("ln1_weight", "ln1_bias", "ln2_weight", "ln2_bias", "ln_x_weight", "ln_x_bias"),
        *_pointers("att_mix", "ffn_mix", "w0", "a0", "v0", "k_k", "k_a", "r_k"),
        *((name, MapArgs) for name in ("receptance", "key", "value", "output", "ffn_key", "ffn_value")),
        *((name, MapArgs) for name in ("w1", "a1", "g1", "v1", "w2", "a2", "g2", "v2")),
    ]


class PairArgs(ctypes.Structure):
    """csrc/layers.cpp's Pair: an adapter's pair at one linear layer."""

    _fields_ = [*_pointers("a", "b"), *_integers("rank")]


class AdapterLayerArgs(ctypes.Structure):
    """csrc/layers.cpp's AdapterLayer: an adapter's part of one layer."""

    _fields_ = [
        ("pairs", PairArgs * 6),
        *_pointers("router", "experts"),
        *_integers("num_experts", "active"),
    ]


class StepArgs(ctypes.Structure):
    """csrc/layers.cpp's Step: inputs and outputs of a step."""

    _fields_ = [
        ("layers", ctypes.POINTER(LayerArgs)),
        *_integers("num_layers"),
        *_pointers("x", "out", "v_first", "wkv", "shift", "ends", "read", "write"),
        *_integers("rows", "tokens", "slots", "width", "threads"),
        *_pointers("adapters"),
    ]


_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "rwkv_has_amx": (ctypes.c_int64, []),
    "rwkv_packed_bytes": (ctypes.c_int64, [ctypes.c_int64] * 3),
    "rwkv_pack_fp32": (None, [ctypes.c_void_p, *[ctypes.c_int64] * 4, ctypes.c_void_p, ctypes.c_int64]),
    "rwkv_pack_bf16": (None, [ctypes.c_void_p, *[ctypes.c_int64] * 4, ctypes.c_void_p, ctypes.c_int64]),
    "rwkv_pack_int8": (None, [*[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 2, ctypes.c_void_p, ctypes.c_int64]),
    "rwkv_linear": (ctypes.c_int64, [ctypes.c_void_p, *[ctypes.c_int64] * 3]),
    "rwkv_layers": (ctypes.c_int64, [ctypes.c_void_p]),
}


@functools.cache
def library() -> ctypes.CDLL:
    """Returns the library, built if needed. Raises native.build.BuildError with the compiler's output."""
    built = build.load(LIBRARY)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(built, name)
        function.restype, function.argtypes = result, arguments
    return built


@functools.cache
def build_unavailable_reason() -> str | None:
    """Returns why this machine has no library; None if it has one."""
    try:
        library()
    except (build.BuildError, OSError) as error:
        return str(error)
    return None
