"""Arguments of the W8A8 kernels, as their launchers take them."""

from __future__ import annotations

from ctypes import Structure, c_int, c_void_p

from native.tensors import fields

MAX_W8A8_GEMMS = 3
MAX_MIXED_GEMMS = 12


class W8A8GemmArgs(Structure):
    """Mirrors the struct in w8a8/w8a8_args.cuh."""

    _fields_ = [
        *fields(c_void_p, "weights x weight_scales weight_ratios"),
        *fields(c_void_p, "input_scales input_ratios y"),
        *fields(c_int, "n out_fp32"),
    ]


class W8A8Args(Structure):
    """Mirrors the struct in w8a8/w8a8_args.cuh."""

    _fields_ = [
        ("gemms", W8A8GemmArgs * MAX_W8A8_GEMMS),
        *fields(c_int, "count rows k pitch is_unsigned is_two_byte"),
        *fields(c_int, "tile_rows splits in_memory pair"),
        *fields(c_int, "warpgroups blocks lead ctas_per_sm"),
        *fields(c_void_p, "exchange counters fed_factors fed_largest"),
    ]


class W8A8QuantiseArgs(Structure):
    """Mirrors the struct in w8a8/w8a8_quantise.cu."""

    _fields_ = [
        *[(name, c_void_p * MAX_W8A8_GEMMS) for name in ("factors", "stored_factors", "order")],
        *fields(c_void_p, "x codes scales ratios"),
        *fields(c_int, "count rows k pitch relu_squared is_two_byte"),
    ]


class W8A8SparseArgs(Structure):
    """Mirrors the struct in w8a8/w8a8_sparse.cu."""

    _fields_ = [
        *fields(c_void_p, "h weights factors weight_scales weight_ratios y"),
        *fields(c_void_p, "sums scales largest"),
        *fields(c_int, "rows width ffn unused"),
    ]


class MixedGemmArgs(Structure):
    """Mirrors the struct in gemm/gemm_w8a8.cu."""

    _fields_ = [
        *fields(c_void_p, "weight x y"),
        *fields(c_void_p, "weight_scales weight_ratios input_scales input_ratios"),
        *fields(c_int, "n k activation unused"),
    ]


class MixedLaunchArgs(Structure):
    """Mirrors the struct in gemm/gemm_w8a8.cu."""

    _fields_ = [
        ("gemms", MixedGemmArgs * MAX_MIXED_GEMMS),
        *fields(c_int, "count dependent rows tile_rows splits"),
        *fields(c_void_p, "partials counters"),
    ]
