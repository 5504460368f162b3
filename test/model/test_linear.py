"""Linear maps on a CPU: plain, packed and quantised are equal, and packed rows do not depend on the batch."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rwkv_batch.kernels.activation import Activation
from rwkv_batch.kernels.cpu import library as cpu_library
from rwkv_batch.kernels.cpu.library import Packing
from rwkv_batch.kernels.cpu.linear import CpuInt4Linear, CpuLinear, CpuW8A8Linear, make_quantised, run_linears
from rwkv_batch.model.layer import Linear
from rwkv_batch.model.quant.formats import Format, dequantise, quantise
from test.model.test_model import needs_compiler

pytestmark = needs_compiler
SHAPES = [(64, 64), (20, 192), (192, 20), (100, 77), (1, 1), (33, 31), (3072, 64), (65, 768), (40, 1000), (40, 2101)]


def make(out: int, inner: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(out, inner, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(x: Tensor, weight: Tensor) -> Tensor:
    return x.double() @ weight.double().T


def test_plain_linear_one_row_and_many() -> None:
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.5)):
        weight = make(48, 80, dtype)
        x = make(9, 80, torch.float32, 1)
        for rows in (x, x[:1]):
            y = Linear(weight)(rows)
            assert y.dtype == torch.float32 and y.shape == (len(rows), 48)
            assert (y - exact(rows, weight)).abs().max() < tolerance


@pytest.mark.parametrize(("out", "inner"), SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 10, 11, 16, 17, 33])
def test_packed_fp32_is_exact_to_rounding(out: int, inner: int, rows: int) -> None:
    x = make(rows, inner, torch.float32, 1)
    for weight in (
        make(out, inner, torch.float32),
        make(out, inner, torch.bfloat16).float(),
        make(out, inner, torch.float16),
    ):
        scale = x.abs().double() @ weight.abs().double().T
        error = (CpuLinear(weight)(x) - exact(x, weight)).abs()
        assert (error <= 1e-6 * scale + 1e-7).all()


@pytest.mark.parametrize("rows", [1, 16, 17, 500])
def test_packed_bf16_rounds_the_inputs_only(rows: int) -> None:
    weight, x = make(70, 100, torch.bfloat16), make(rows, 100, torch.float32, 1)
    y = CpuLinear(weight)(x)
    expected = exact(x.bfloat16() if cpu_library.library().rwkv_has_amx() else x, weight)
    assert (y - expected).abs().max() < 1e-4


def test_bf16_numbers_in_fp32_take_half_the_bytes() -> None:
    short, long = CpuLinear(make(64, 64, torch.bfloat16).float()), CpuLinear(make(64, 64, torch.float32))
    assert (short.packing, long.packing) == (Packing.BF16, Packing.FP32)
    assert short.packed.numel() * 2 == long.packed.numel()


KINDS: dict[str, Callable[[int, int], CpuLinear]] = {
    "fp32": lambda out, inner: CpuLinear(make(out, inner, torch.float32)),
    "fp32 of bf16 numbers": lambda out, inner: CpuLinear(make(out, inner, torch.bfloat16).float()),
    "bf16": lambda out, inner: CpuLinear(make(out, inner, torch.bfloat16)),
    "int4": lambda out, inner: quantised(make(out, inner, torch.float32), Format.INT4),
    "int8": lambda out, inner: int8_linear(out, inner, 8),
    "int8, 16 bits": lambda out, inner: int8_linear(out, inner, 16),
}


def quantised(weight: Tensor, format_: Format) -> CpuLinear:
    linear = make_quantised("", quantise(weight, format_))
    assert isinstance(linear, CpuLinear)
    return linear


def int8_linear(out: int, inner: int, bits: int) -> CpuLinear:
    """Return a map whose rows may be a few times larger than it is made for."""
    largest = make(1, inner, torch.float32, 5)[0].abs() + 0.5
    stored = quantise(make(out, inner, torch.float32) * 0.05, Format.W8A8, largest)
    return CpuW8A8Linear(dataclasses.replace(stored, activation_bits=bits))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inner", [200, 1100])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(kind: str, inner: int) -> None:
    linear, x = KINDS[kind](96, inner), make(1000, inner, torch.float32, 1)
    whole = linear(x)
    for start, stop in ((0, 1), (479, 481), (3, 4), (999, 1000), (5, 17), (0, 200), (100, 131), (480, 1000)):
        assert torch.equal(linear(x[start:stop]), whole[start:stop]), (start, stop)


@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_threads_changes_nothing(kind: str) -> None:
    linear, x = KINDS[kind](700, 64), make(40, 64, torch.float32, 1)
    threads = torch.get_num_threads()
    try:
        results = []
        for n in (1, 2, 5):
            torch.set_num_threads(n)
            results.append(linear(x))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_activations_and_maps_of_several_types_in_one_call() -> None:
    x = [make(7, 64, torch.float32, i) for i in range(4)]
    weights = [make(24 + 40 * i, 64, torch.float32, 10 + i) * 0.1 for i in range(4)]
    weights[2] = weights[2].bfloat16().float()
    stored = quantise(weights[3], Format.INT4)
    linears = [*map(CpuLinear, weights[:3]), make_quantised("", stored)]
    meaning = [*weights[:3], dequantise(stored)]
    kinds = [Activation.NONE, Activation.TANH, Activation.SIGMOID, Activation.RELU_SQUARED]
    results = run_linears(list(zip(linears, x, kinds, strict=True)))  # type: ignore[arg-type]
    functions = [lambda t: t, torch.tanh, torch.sigmoid, lambda t: torch.relu(t).square()]
    for y, w, xi, function, linear in zip(results, meaning, x, functions, linears, strict=True):
        seen = in_8_bits(xi) if isinstance(linear, CpuInt4Linear) else xi
        assert (y - function(exact(seen, w))).abs().max() < 1e-5


@pytest.mark.parametrize(("out", "inner"), SHAPES)
def test_an_int4_map_equals_its_definition(out: int, inner: int) -> None:
    stored = quantise(make(out, inner, torch.float32), Format.INT4)
    meaning, linear = dequantise(stored).double(), make_quantised("", stored)
    assert isinstance(linear, CpuInt4Linear)
    for rows in (1, 2, 3, 5, 11, 12, 13, 33):
        x = make(rows, inner, torch.float32, 1) * 10 ** torch.linspace(-6, 3, rows).unsqueeze(1)
        rounded = in_8_bits(x)
        scale = rounded.abs().amax(1, keepdim=True) * meaning.abs().sum(1)
        assert ((linear(x) - rounded @ meaning.T).abs() <= 1e-6 * scale + 1e-12).all()


def in_8_bits(x: Tensor) -> Tensor:
    """Return x [T, in] as 8-bit codes with a scale per 128 inputs, times that scale."""
    groups = torch.nn.functional.pad(x, (0, -x.shape[1] % 128)).unflatten(1, (-1, 128))
    largest = groups.abs().amax(2, keepdim=True)
    codes = (groups * (127 / largest)).nan_to_num().round()
    return (codes.double() * (largest / 127).double()).flatten(1)[:, : x.shape[1]]


def test_int8_takes_one_byte_per_weight_and_int4_half_a_byte() -> None:
    weight = make(256, 1024, torch.float32)
    assert make_quantised("", quantise(weight, Format.INT4)).num_bytes < 0.55 * weight.numel()
    assert int8_linear(256, 1024, 8).num_bytes < 1.06 * weight.numel()
    assert make_quantised("", quantise(weight, Format.FP8)).num_bytes == 2 * weight.numel()


def test_strided_weights_and_inputs() -> None:
    stored, x = make(64, 24, torch.float32), make(64, 5, torch.float32, 1).T
    assert not x.is_contiguous()
    assert (CpuLinear(stored.T)(x) - exact(x, stored.T)).abs().max() < 1e-4


def test_nan_stays_nan() -> None:
    for weight in (make(8, 64, torch.float32), make(8, 64, torch.bfloat16), make(8, 64, torch.bfloat16).float()):
        x = make(3, 64, torch.float32, 1)
        x[1, 5] = float("nan")
        y = CpuLinear(weight)(x)
        assert y[1].isnan().all() and y[0].isfinite().all() and y[2].isfinite().all()


def test_nan_stays_in_its_row_of_int4() -> None:
    linear, x = quantised(make(8, 256, torch.float32), Format.INT4), make(4, 256, torch.float32, 1)
    x[1, 5], x[2, 200], x[3] = float("nan"), float("inf"), 0.0
    y = linear(x)
    assert y[1].isnan().all() and not y[2].isfinite().any()
    assert y[0].isfinite().all() and not y[3].any()


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"bf16, fp16 or fp32"):
        CpuLinear(torch.zeros(4, 4, dtype=torch.int8))
    with pytest.raises(ValueError, match=r"takes \[3, 64\]"):
        CpuLinear(make(8, 64, torch.float32))(torch.zeros(3, 32))


def test_argument_blocks_have_the_size_the_library_reads() -> None:
    """Each field is eight bytes. So the test finds a missing or extra field."""
    assert ctypes.sizeof(cpu_library.GemmArgs) == 8 * 8
    assert ctypes.sizeof(cpu_library.LayerArgs) == 8 * (6 + 8 + 14 * 5)
    assert ctypes.sizeof(cpu_library.StepArgs) == 8 * 18
