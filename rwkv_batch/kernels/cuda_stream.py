"""Products of up to 16 rows that stream their weights once (csrc/stream.cu): halves, or codes of 8 or 4 bits."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rwkv_batch.kernels.activation import Activation
from rwkv_batch.kernels.cuda_library import MAX_MAPS, StreamArgs, cuda_pointer, library
from rwkv_batch.model.quant.formats import Format

MAX_STREAM_ROWS = 16
OUTPUT_STEP = 32
NUMBERS: dict[Format | None, int] = {Format.FP8: 0, Format.INT8: 1, Format.INT4: 2, None: 3}
"""Of a format in csrc/quant.cuh; None: halves."""
INPUT_STEP: dict[Format | None, int] = {Format.FP8: 128, Format.INT8: 128, Format.INT4: 256, None: 64}

TUNE = {
    "prefetch": 0, "places": 2, "variant": 0, "dense_value": 1, "percent": 100, "padding": 0, "percent_rows": 100, "padding_rows": 0,
    "stream": 1, "half_rows": 8, "half_low_rows": 16, "one_group": 1, "codes_group": 1,
    "few_fp8": 8, "few_int8": 8, "few_int4": 8, "codes_fp8": 64, "codes_int8": 256, "codes_int4": 256,
    "sparse_rows": 8, "sparse_percent": -1,
}


@dataclass(slots=True)
class Operand:
    """A weight [n, k] as the kernel reads it."""

    weight: Tensor
    """fp16, or codes"""
    n: int
    k: int
    format: Format | None = None
    scales: Tensor | None = None


@dataclass(slots=True)
class StreamMap:
    """One map of a grouped launch: y = activation(x @ weight.T); x [rows, k] fp16, y [rows, n] fp16 or fp32."""

    operand: Operand
    x: Tensor
    y: Tensor
    activation: Activation = Activation.NONE


def fits_stream(n: int, k: int, format_: Format | None = None) -> bool:
    """Whether the kernel takes a weight [n, k] of this format."""
    return n % OUTPUT_STEP == 0 and k % INPUT_STEP[format_] == 0


def stream(maps: Sequence[StreamMap]) -> None:
    """Up to 8 maps over the same number of rows (at most 16) in one launch, of halves and of one format besides.

    Raises ValueError for more, for other formats, or for shapes that do not fit each other.
    """
    rows = maps[0].x.shape[0]
    formats = {m.operand.format for m in maps} - {None}
    if len(maps) > MAX_MAPS or rows > MAX_STREAM_ROWS or len(formats) > 1:
        raise ValueError(
            f"a launch takes {MAX_MAPS} maps of {MAX_STREAM_ROWS} rows and one format beside fp16, not {len(maps)} of "
            f"{rows} and {len(formats)}"
        )
    shared = ("percent", "padding") if rows <= 4 else ("percent_rows", "padding_rows")
    args = StreamArgs(count=len(maps), rows=rows, shared_percent=TUNE[shared[0]], padding=TUNE[shared[1]])
    args.prefetch, args.places, args.variant = TUNE["prefetch"], TUNE["places"], TUNE["variant"]
    for slot, m in zip(args.maps, sorted(maps, key=lambda m: m.operand.format is not None), strict=False):
        w = m.operand
        if not fits_stream(w.n, w.k, w.format) or m.x.shape != (rows, w.k) or m.y.shape != (rows, w.n):
            raise ValueError(
                f"{w.format or 'fp16'} [{w.n}, {w.k}], {tuple(m.x.shape)}, {tuple(m.y.shape)} do not fit each other"
            )
        slot.weight = w.weight.data_ptr()
        slot.scales = None if w.scales is None else w.scales.data_ptr()
        slot.x, slot.y = cuda_pointer(m.x), cuda_pointer(m.y, m.y.dtype)
        slot.n, slot.k, slot.ld_y, slot.format = w.n, w.k, w.n, NUMBERS[w.format]
        slot.activation, slot.float_out = m.activation, m.y.dtype == torch.float32
    library().call("rwkv_stream", ctypes.byref(args))
