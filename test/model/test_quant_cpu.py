"""int8 products on a CPU: exact up to 16-bit rounding of x, and independent of the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rwkv_batch.kernels.activation import Activation
from rwkv_batch.kernels.cpu import library as cpu_library
from rwkv_batch.kernels.cpu.linear import CpuLinear, CpuQuantLinear, make_quantised, run_linears
from rwkv_batch.model.quant.formats import Format, dequantise, quantise

pytestmark = pytest.mark.skipif(
    cpu_library.library_unavailable_reason() is not None, reason=str(cpu_library.library_unavailable_reason())
)
SHAPES = [(64, 128), (20, 192), (192, 20), (100, 77), (1, 1), (33, 31), (3072, 64), (65, 768), (40, 1000)]


def make(out: int, inner: int, seed: int = 0) -> Tensor:
    return torch.randn(out, inner, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("format_", [Format.INT8, Format.INT4])
@pytest.mark.parametrize(("out", "inner"), SHAPES)
def test_it_equals_the_dequantised_product(format_: Format, out: int, inner: int) -> None:
    stored = quantise(make(out, inner), format_)
    meaning, linear = dequantise(stored).double(), make_quantised("", stored)
    assert isinstance(linear, CpuQuantLinear)
    for rows in (1, 2, 3, 5, 11, 12, 13, 33):
        x = make(rows, inner, 1) * 10 ** torch.linspace(-6, 3, rows).unsqueeze(1)
        scale = x.abs().amax(1, keepdim=True).double() * meaning.abs().sum(1)
        assert ((linear(x) - x.double() @ meaning.T).abs() <= 2e-5 * scale + 1e-12).all()


def test_it_takes_one_byte_per_weight() -> None:
    weight = make(256, 1024)
    assert make_quantised("", quantise(weight, Format.INT8)).num_bytes < 1.04 * weight.numel()
    assert make_quantised("", quantise(weight, Format.FP8)).num_bytes == 2 * weight.numel()


def test_a_row_has_the_same_bits_alone_and_in_a_batch() -> None:
    linear, x = make_quantised("", quantise(make(96, 200), Format.INT8)), make(1000, 200, 1)
    whole = linear(x)
    for start, stop in ((0, 1), (479, 481), (3, 4), (999, 1000), (5, 17), (0, 200), (100, 131), (480, 1000)):
        assert torch.equal(linear(x[start:stop]), whole[start:stop]), (start, stop)


def test_the_number_of_threads_changes_nothing() -> None:
    linear, x = make_quantised("", quantise(make(700, 64), Format.INT8)), make(40, 64, 1)
    threads = torch.get_num_threads()
    try:
        results = []
        for n in (1, 2, 5):
            torch.set_num_threads(n)
            results.append(linear(x))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_with_other_formats_in_one_call() -> None:
    weights = [make(24 + 40 * i, 64, 10 + i) * 0.1 for i in range(3)]
    stored = quantise(weights[1], Format.INT8)
    linears = [CpuLinear(weights[0]), make_quantised("", stored), CpuLinear(weights[2].bfloat16().float())]
    assert all(isinstance(linear, CpuLinear) for linear in linears)
    x = [make(7, 64, i) for i in range(3)]
    maps = [(linear, xi, Activation.RELU_SQUARED) for linear, xi in zip(linears, x, strict=True)]
    reference = [weights[0], dequantise(stored), weights[2].bfloat16().float()]
    for y, w, xi in zip(run_linears(maps), reference, x, strict=True):  # type: ignore[arg-type]
        assert (y - torch.relu(xi @ w.T).square()).abs().max() < 2e-4


def test_nan_stays_in_its_row() -> None:
    linear, x = make_quantised("", quantise(make(8, 256), Format.INT8)), make(4, 256, 1)
    x[1, 5], x[2, 200], x[3] = float("nan"), float("inf"), 0.0
    y = linear(x)
    assert y[1].isnan().all() and not y[2].isfinite().any()
    assert y[0].isfinite().all() and not y[3].any()
