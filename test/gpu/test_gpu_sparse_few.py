"""Sparse ffn.value of 2 to 8 rows (csrc/sparse/sparse_few_quant.cu), against fp32."""

from __future__ import annotations

import pytest
import torch

from rwkv_batch.kernels.cuda.channel_mix import sparse_value_quantised
from rwkv_batch.kernels.cuda.ops import CudaOps
from rwkv_batch.kernels.cuda.quant_linear import CudaQuantValue
from rwkv_batch.kernels.cuda.quantised_rows import sum_partials
from rwkv_batch.model.quant.formats import Format, dequantise, quantise

GPU = torch.device("cuda", 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("zeros", [0.88, 0.0, 0.995, 1.0])
@pytest.mark.parametrize(("width", "ffn"), [(4096, 16384), (2048, 7168), (2560, 10240), (768, 3072), (256, 1024)])
@pytest.mark.parametrize("rows", [2, 5, 8])
@pytest.mark.parametrize("format_", [Format.FP8])
def test_value(format_: Format, rows: int, width: int, ffn: int, zeros: float) -> None:
    ops = CudaOps()
    ops.prepare_device(GPU, width, ffn)
    stored = quantise(torch.randn(width, ffn, device=GPU) / ffn**0.5, format_)
    value = CudaQuantValue(stored)
    h = torch.randn(rows, ffn, device=GPU).square().half() * (torch.rand(rows, ffn, device=GPU) >= zeros)
    h[0, ffn - 1] = -0.0
    y = sum_partials(sparse_value_quantised(value, h))
    reference = h.float() @ dequantise(stored).T
    assert (y.float() - reference).norm() <= 1e-3 * reference.norm()
    for _ in range(3):
        assert torch.equal(sum_partials(sparse_value_quantised(value, h)), y)
