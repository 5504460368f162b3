"""Arguments of the W8A8 kernels, as their launchers take them."""

from __future__ import annotations

from ctypes import Structure, c_int, c_void_p

MAX_W8A8_GEMMS = 3
MAX_MIXED_GEMMS = 12


class W8A8GemmArgs(Structure):
    """Mirrors the struct in w8a8/w8a8_args.cuh."""

    _fields_ = [
        *[(name, c_void_p) for name in ("weights", "x", "weight_scales", "weight_ratios")],
        *[(name, c_void_p) for name in ("input_scales", "input_ratios", "y")],
        *[(name, c_int) for name in ("n", "out_fp32")],
    ]


class W8A8Args(Structure):
    """Mirrors the struct in w8a8/w8a8_args.cuh."""

    _fields_ = [
        ("gemms", W8A8GemmArgs * MAX_W8A8_GEMMS),
        *[(name, c_int) for name in ("count", "rows", "k", "pitch", "is_unsigned", "is_two_byte")],
        *[(name, c_int) for name in ("tile_rows", "splits", "in_memory", "pair")],
        *[(name, c_int) for name in ("warpgroups", "blocks", "lead", "ctas_per_sm")],
        *[(name, c_void_p) for name in ("exchange", "counters", "fed_factors", "fed_largest")],
    ]


class W8A8QuantiseArgs(Structure):
    """Mirrors the struct in w8a8/w8a8_quantise.cu."""

    _fields_ = [
        *[(name, c_void_p * MAX_W8A8_GEMMS) for name in ("factors", "stored_factors", "order")],
        *[(name, c_void_p) for name in ("x", "codes", "scales", "ratios")],
        *[(name, c_int) for name in ("count", "rows", "k", "pitch", "relu_squared", "is_two_byte")],
    ]


class W8A8SparseArgs(Structure):
    """Mirrors the struct in w8a8/w8a8_sparse.cu."""

    _fields_ = [
        *[(name, c_void_p) for name in ("h", "weights", "factors", "weight_scales", "weight_ratios", "y")],
        *[(name, c_void_p) for name in ("sums", "scales", "largest")],
        *[(name, c_int) for name in ("rows", "width", "ffn", "unused")],
    ]


class MixedGemmArgs(Structure):
    """Mirrors the struct in gemm/gemm_w8a8.cu."""

    _fields_ = [
        *[(name, c_void_p) for name in ("weight", "x", "y")],
        *[(name, c_void_p) for name in ("weight_scales", "weight_ratios", "input_scales", "input_ratios")],
        *[(name, c_int) for name in ("n", "k", "activation", "unused")],
    ]


class MixedLaunchArgs(Structure):
    """Mirrors the struct in gemm/gemm_w8a8.cu."""

    _fields_ = [
        ("gemms", MixedGemmArgs * MAX_MIXED_GEMMS),
        *[(name, c_int) for name in ("count", "dependent", "rows", "tile_rows", "splits")],
        *[(name, c_void_p) for name in ("partials", "counters")],
    ]
