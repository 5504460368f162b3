"""The C ABI of csrc/training.cpp, with which states and LoRAs are tuned on a CPU."""

from __future__ import annotations

import ctypes
import functools

from native import build
from native.tensors import fields
from rwkv_batch.kernels.cpu.library import SOURCES

LIBRARY = build.Library(name="rwkv_training", sources=(SOURCES / "training.cpp",), flags=("-Wno-maybe-uninitialized",))
MAX_MIXES = 6


class CoreArgs(ctypes.Structure):
    """csrc/training.cpp's Core. Shapes are there."""

    _fields_ = [
        *fields(ctypes.c_void_p, "r k v w a g gate first_v first vectors output_vectors keep"),
        *fields(ctypes.c_void_p, "y out states grad dr dk dv dw da dg dgate dfirst_v dfirst"),
        *fields(ctypes.c_int64, "rows chunks heads threads"),
    ]


class NormArgs(ctypes.Structure):
    """csrc/training.cpp's NormShift. Shapes are there."""

    _fields_ = [
        *fields(ctypes.c_void_p, "x y begins norm mixes total stats outputs grad"),
        ("grads", ctypes.c_void_p * MAX_MIXES),
        *fields(ctypes.c_void_p, "dx"),
        *fields(ctypes.c_int64, "tokens width count threads"),
    ]


@functools.cache
def library() -> ctypes.CDLL:
    """Returns the library, built if needed. Raises native.build.BuildError with the compiler's output."""
    built = build.load(LIBRARY)
    for name, arguments in (("core", CoreArgs), ("norm", NormArgs)):
        for way in ("forward", "backward"):
            function = getattr(built, f"training_{name}_{way}")
            function.restype, function.argtypes = None, [ctypes.POINTER(arguments)]
    return built
