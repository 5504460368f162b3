"""The C ABI of csrc/*.cpp: signatures, argument structs, and the library, built on first use."""

from __future__ import annotations

import ctypes
import enum
import functools
from pathlib import Path

from native import build
from native.tensors import fields
from rwkv_batch.model.low_rank import Target

SOURCES = Path(__file__).with_name("csrc")
LIBRARY = build.Library(
    name="rwkv_cpu",
    sources=(SOURCES / "linear.cpp", SOURCES / "mix.cpp", SOURCES / "layers.cpp"),
    # GCC 12 warns of uninitialised values in its own AVX-512 intrinsics.
    flags=("-Wno-maybe-uninitialized",),
)


class Packing(enum.IntEnum):
    """Format of a packed matrix, as in csrc/linear.cpp."""

    FP32 = 0
    BF16 = 1
    INT4 = 2
    W8A8 = 3
    W8U8 = 4
    """W8A8 whose inputs are not negative"""


class StepFailure(enum.IntEnum):
    """What `rwkv_layers` returns if a step failed."""

    ROWS_DO_NOT_FIT = 1
    """a row has no tokens, ends beyond the step's tokens, or names a slot that does not exist"""
    NO_MEMORY = 2


class MatrixArgs(ctypes.Structure):
    """csrc/linear.h's PackedMatrix [out, in].

    parts: numbers that each x is split into: bf16 1 or 3, W8A8 1 or 2
    """

    _fields_ = [*fields(ctypes.c_void_p, "data"), *fields(ctypes.c_int64, "in_features out_features packing parts")]


class GemmArgs(ctypes.Structure):
    """csrc/linear.h's Gemm: one matrix over the rows of a call."""

    _fields_ = [("w", MatrixArgs), *fields(ctypes.c_void_p, "x y"), *fields(ctypes.c_int64, "activation")]


class LayerArgs(ctypes.Structure):
    """csrc/layers.cpp's Layer: addresses of the tensors of model/layer.py's Layer; null: absent."""

    _fields_ = [
        *fields(ctypes.c_void_p, "ln1_weight ln1_bias ln2_weight ln2_bias ln_x_weight ln_x_bias"),
        *fields(ctypes.c_void_p, "att_mix ffn_mix w0 a0 v0 k_k k_a r_k"),
        *((name, MatrixArgs) for name in ("receptance", "key", "value", "output", "ffn_key", "ffn_value")),
        *((name, MatrixArgs) for name in ("w1", "a1", "g1", "v1", "w2", "a2", "g2", "v2")),
    ]


class PairArgs(ctypes.Structure):
    """csrc/layers.cpp's Pair: an adapter's low-rank pair at one linear layer, y += b (a x)."""

    _fields_ = [*fields(ctypes.c_void_p, "a b"), *fields(ctypes.c_int64, "rank")]


class AdapterLayerArgs(ctypes.Structure):
    """csrc/layers.cpp's AdapterLayer: an adapter's part of one layer.

    An adapter may have several experts at the channel mix; the router chooses `active` of them for each token.
    """

    _fields_ = [
        ("pairs", PairArgs * len(Target)),
        *fields(ctypes.c_void_p, "router experts"),
        *fields(ctypes.c_int64, "num_experts active"),
    ]


class StepArgs(ctypes.Structure):
    """csrc/layers.cpp's Step: inputs and outputs of a step. Shapes are there.

    x: overwritten by the result; v_first: the values v of layer 0, which later layers mix into theirs
    wkv, shift: the states, by slot
    ends, read, write: for each row, the end of its tokens, the slot that it reads and the slot that it writes
    rows, tokens: of the step; slots: of the states; width: C; head_bytes: of a head's state, which select its format
    begins_within, ends_within: as model.layer.Cuts
    """

    _fields_ = [
        ("layers", ctypes.POINTER(LayerArgs)),
        *fields(ctypes.c_int64, "num_layers"),
        *fields(ctypes.c_void_p, "x v_first wkv shift ends read write"),
        *fields(ctypes.c_int64, "rows tokens slots width threads head_bytes"),
        *fields(ctypes.c_int64, "begins_within ends_within"),
        *fields(ctypes.c_void_p, "adapters"),
    ]


_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "rwkv_has_amx": (ctypes.c_int64, []),
    "rwkv_packed_bytes": (ctypes.c_int64, [ctypes.c_int64] * 3),
    "rwkv_pack_fp32": (None, [ctypes.c_void_p, *[ctypes.c_int64] * 4, ctypes.c_void_p, ctypes.c_int64]),
    "rwkv_pack_bf16": (None, [ctypes.c_void_p, *[ctypes.c_int64] * 4, ctypes.c_void_p, ctypes.c_int64]),
    "rwkv_pack_int4": (None, [*[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 2, ctypes.c_void_p, ctypes.c_int64]),
    "rwkv_pack_w8a8": (None, [*[ctypes.c_void_p] * 5, *[ctypes.c_int64] * 2, ctypes.c_void_p, ctypes.c_int64]),
    "rwkv_linear": (ctypes.c_int64, [ctypes.c_void_p, *[ctypes.c_int64] * 3]),
    "rwkv_layers": (ctypes.c_int64, [ctypes.c_void_p]),
    "rwkv_reserve": (ctypes.c_int64, [ctypes.c_void_p]),
}


@functools.cache
def library() -> ctypes.CDLL:
    """Returns the library, built if needed. Raises native.build.BuildError with the compiler's output."""
    return declare(build.load(LIBRARY))


def declare(built: ctypes.CDLL) -> ctypes.CDLL:
    """Declares the functions' signatures."""
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(built, name)
        function.restype, function.argtypes = result, arguments
    return built


@functools.cache
def library_unavailable_reason() -> str | None:
    """Returns why the library cannot be built or loaded; None if it can."""
    try:
        library()
    except (build.BuildError, OSError) as error:
        return str(error)
    return None
