"""2 to 4 rows times fp8 weights on Hopper's tensor cores. Compares csrc/skinny/hopper_few.cu with fp32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rwkv_batch.kernels.activation import Activation
from rwkv_batch.kernels.cuda.linear import Gemm
from rwkv_batch.kernels.cuda.quant_linear import CudaQuantLinear
from rwkv_batch.kernels.cuda.skinny_quant import HOPPER_FEW_ROWS, QuantGemm, fits_hopper_few, multiply_few
from rwkv_batch.model.quant.formats import Format, dequantise, quantise

GPU = torch.device("cuda", 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
CLOSE = 2e-3
"""Inputs are two e4m3 values of 4 bits each."""


def error(y: Tensor, reference: Tensor) -> float:
    """Return the relative error of the worst row."""
    return float(((y.float() - reference.float()).norm(dim=1) / reference.float().norm(dim=1)).max())


def normal(*size: int) -> Tensor:
    return torch.randn(*size, device=GPU).half()


def linear(n: int, k: int) -> tuple[CudaQuantLinear, Tensor]:
    stored = quantise(torch.randn(n, k, device=GPU) / k**0.5, Format.FP8)
    made = CudaQuantLinear(stored)
    if not fits_hopper_few(made, [k], HOPPER_FEW_ROWS[0]):
        pytest.skip("a kernel for sm_90 only")
    return made, dequantise(stored)


@pytest.mark.parametrize("inputs", ["normal", "outlier", "tiny", "zero but one"])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (32, 128), (96, 768), (2560, 2560), (16384, 1024), (65536, 4096)])
@pytest.mark.parametrize("rows", [2, 3, 4])
def test_any_inputs(rows: int, n: int, k: int, inputs: str) -> None:
    map_, meant = linear(n, k)
    x = normal(rows, k)
    if inputs == "outlier":
        x[1, k // 2] = 20000
    elif inputs == "tiny":
        x *= 1e-4
    elif inputs == "zero but one":
        x[:, 1:] = 0
    out = torch.full((rows, n), torch.nan, device=GPU)
    reference = x.float() @ meant.T
    assert error(map_.to_fp32(x, out), reference) < (
        CLOSE if inputs != "zero but one" else 8e-3
    )  # one rounding, not many
    assert torch.equal(map_.to_fp32(x), out)
    assert torch.equal(map_.to_fp32(x[:2].contiguous()), out[:2]), "a row is the same in company"


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_are_kept(value: float) -> None:
    map_, _ = linear(96, 768)
    x = normal(3, 768)
    expected = map_.to_fp32(x, torch.zeros(3, 96, device=GPU)).clone()
    x[1, 300] = value
    out = map_.to_fp32(x, torch.zeros(3, 96, device=GPU))
    assert not torch.isfinite(out[1]).any()
    assert torch.equal(out[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("width", [4096, 1024, 768])
@pytest.mark.parametrize("rows", [2, 3, 4])
def test_quantised_and_fp16_products_in_one_launch(rows: int, width: int) -> None:
    sizes = (width, 32, 4 * width, 544)
    maps = [linear(n, width) for n in sizes]
    halves = [normal(n, width) / width**0.5 for n in (64, 512)]
    x = normal(6, rows, width)
    ys = [torch.full((rows, n), torch.nan, device=GPU).half() for n in (*sizes, 64, 512)]
    coded = [QuantGemm(map_, x[i], ys[i], Activation.RELU_SQUARED) for i, (map_, _) in enumerate(maps)]
    others = [Gemm(halves[i], x[4 + i], ys[4 + i], (Activation.TANH, Activation.SIGMOID)[i]) for i in range(2)]
    multiply_few(coded, others)
    for i, (_, meant) in enumerate(maps):
        assert error(ys[i], torch.relu(x[i].float() @ meant.T).square()) < 2 * CLOSE, i
    assert error(ys[4], torch.tanh(x[4].float() @ halves[0].float().T)) < 1e-3
    assert error(ys[5], torch.sigmoid(x[5].float() @ halves[1].float().T)) < 1e-3
