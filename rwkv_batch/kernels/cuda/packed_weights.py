"""Quantised weights in kernel order (csrc/quant.cuh); fp8 rows times fp8 weights by cuBLAS."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from rwkv_batch.kernels.activation import Activation
from rwkv_batch.kernels.cuda.hopper_gemm_weight_only import WeightOnlyGemm, fits_weight_only
from rwkv_batch.kernels.cuda.library import cuda_pointer, library
from rwkv_batch.model.quant.formats import Format, Quantised, codes_int4

NUMBERS = {Format.FP8: 0, Format.INT4: 2}
WEIGHT_ONLY_ROWS = {Format.FP8: 64, Format.INT4: 256}
"""Maximum rows of the weight-only kernel, or of fp8 with two-part rows; beyond, fp8 x fp8 is faster (docs/tries.md)."""
INPUT_STEP = {Format.FP8: 128, Format.INT4: 256}
OUTPUT_STEP = 32
MAX_INPUTS = 32768
ZERO_OFFSET = 1024
"""Added to a zero point: the value of fp16 with a 4-bit code in its lowest bits."""


@dataclass(slots=True)
class Packed:
    """Weights and scales in kernel order (csrc/quant.cuh); [n, k] as stored, [k, n] if transposed."""

    format: Format
    qweight: Tensor
    scales: Tensor
    rows: int
    columns: int
    transposed: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of weights and scales."""
        return self.qweight.nbytes + self.scales.nbytes

    @property
    def outputs(self) -> int:
        return self.columns if self.transposed else self.rows

    @property
    def inputs(self) -> int:
        return self.rows if self.transposed else self.columns

    def fits_weight_only(self, rows: int) -> bool:
        """Whether the weight-only kernel takes so many fp16 rows."""
        return rows <= WEIGHT_ONLY_ROWS[self.format] and fits_weight_only(
            rows, self.outputs, self.inputs, self.qweight.device
        )

    def weight_only_gemm(self, x: Tensor, y: Tensor, activation: Activation = Activation.NONE) -> WeightOnlyGemm:
        """A GEMM for that kernel: x [B, k] fp16 -> y [B, n] fp16."""
        n, k = self.outputs, self.inputs
        return WeightOnlyGemm(self.format, self.transposed, n, k, self.qweight, self.scales, x, y, activation)

    def output_major(self) -> Tensor:
        """Returns 8-bit weights [n, k]; transposed ones are copied into a buffer shared by all of the same size."""
        if not self.transposed:
            return self.qweight
        transposed_weight = transposed_buffer(self.qweight).view(self.qweight.dtype).view(self.outputs, self.inputs)
        library().call(
            "rwkv_transpose_weights", self.qweight.data_ptr(), transposed_weight.data_ptr(), self.inputs, self.outputs
        )
        return transposed_weight

    def dequantised(self) -> Tensor:
        """Returns [rows, columns] fp16."""
        out = torch.empty(self.rows, self.columns, dtype=torch.float16, device=self.qweight.device)
        library().call(
            "rwkv_dequantise", self.qweight.data_ptr(), self.scales.data_ptr(), cuda_pointer(out), NUMBERS[self.format],
            self.transposed, self.rows, self.columns,
        )  # fmt: skip
        return out


_TRANSPOSED_BUFFERS: WeakValueDictionary[tuple[torch.device, int], Tensor] = WeakValueDictionary()


def transposed_buffer(codes: Tensor) -> Tensor:
    """Returns [bytes] uint8 of the size and device of `codes`. All weights of that size share it."""
    key = codes.device, codes.nbytes
    place = _TRANSPOSED_BUFFERS.get(key)
    if place is None:
        place = _TRANSPOSED_BUFFERS[key] = torch.empty(codes.nbytes, dtype=torch.uint8, device=codes.device)
    return place


def check_shape(stored: Quantised) -> None:
    """Checks a matrix's sizes. Raises ValueError with the allowed sizes if a matrix has others."""
    n, k, step = stored.out_features, stored.in_features, INPUT_STEP[stored.format]
    if n % OUTPUT_STEP or k % step or k > MAX_INPUTS:
        raise ValueError(
            f"the cuda kernels take {stored.format} matrices of a multiple of {OUTPUT_STEP} outputs and {step} inputs, "
            f"up to {MAX_INPUTS}, not {n} x {k}; use --dtype fp16"
        )


def pack(stored: Quantised, transposed: bool = False) -> Packed:
    """Reorders weights and scales for the kernels."""
    n, k = stored.out_features, stored.in_features
    if stored.format is Format.FP8:
        codes, scales = stored.codes, stored.scales
    else:
        assert stored.zeros is not None, "4-bit codes have zeros"
        codes = codes_int4(stored)
        scales = torch.stack([stored.scales.T, stored.zeros.T.half() + ZERO_OFFSET], dim=-1).contiguous()
    if transposed:
        codes = codes.view(torch.uint8).T.contiguous().view(codes.dtype)
    codes = pack_nibbles(codes) if stored.format is Format.INT4 else codes.contiguous()
    rows, columns = (k, n) if transposed else (n, k)
    return Packed(stored.format, codes, scales, rows, columns, transposed)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Packs two 4-bit codes per byte: of eight, 0 2 4 6, then 1 3 5 7.

    [rows, columns], one per byte -> [rows, columns / 2]
    """
    c = codes.reshape(len(codes), -1, 4, 2).transpose(2, 3).reshape(len(codes), -1, 2)
    return (c[..., 0] | c[..., 1] << 4).contiguous()


logger = logging.getLogger(__name__)


def scaled_mm(packed: Packed, codes: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    """fp8 rows [T, K] times fp8 weights -> out [T, N]. The rows have scales [T]."""
    weight, types = packed.output_major(), scaled_mm_dtypes(out.device)
    dtype = out.dtype if out.dtype in types else types[0]
    place = out if dtype == out.dtype else torch.empty(out.shape, dtype=dtype, device=out.device)
    torch._scaled_mm(
        codes,
        weight.T,
        scale_a=scales.unsqueeze(1),
        scale_b=packed.scales.unsqueeze(0),
        out_dtype=dtype,
        use_fast_accum=True,
        out=place,
    )
    return out if place is out else out.copy_(place)


def has_fp8_gemm(format_: Format, device: torch.device) -> bool:
    """Whether a device multiplies fp8 rows by weights of this format."""
    return format_ is Format.FP8 and bool(scaled_mm_dtypes(device))


@functools.cache
def scaled_mm_dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """Returns the result types of fp8 GEMMs with row scales; empty if this GPU or torch has none."""
    if torch.cuda.get_device_capability(device) < (8, 9):
        return ()
    found = []
    ones = torch.ones(32, dtype=torch.float32, device=device)
    codes = torch.ones(32, 32, device=device).to(torch.float8_e4m3fn)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        try:
            torch._scaled_mm(codes, codes.T, ones.unsqueeze(1), ones.unsqueeze(0), out_dtype=dtype, use_fast_accum=True)
            found.append(dtype)
        except (RuntimeError, ValueError) as error:
            logger.info("no fp8 products with results in %s on %s: %s", dtype, device, str(error).splitlines()[0])
    return tuple(found)
