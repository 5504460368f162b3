"""fp8 rows times fp8 weights by cuBLAS."""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from rwkv_batch.kernels.cuda.packed_weights import Packed
from rwkv_batch.model.quant.formats import Format

logger = logging.getLogger(__name__)


def scaled_mm(packed: Packed, codes: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    """fp8 rows [T, K] with scales [T] times fp8 weights -> out [T, N]."""
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
