"""W8A8 products on a CPU: the bits of the definition, for any batch, split and thread count."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from demo.random_weights import write_random_model
from rwkv_batch.kernels.activation import Activation
from rwkv_batch.kernels.cpu.library import Packing
from rwkv_batch.kernels.cpu.linear import CpuLinear, CpuW8A8Linear, make_quantised, run_linears
from rwkv_batch.model.quant import w8a8
from rwkv_batch.model.quant.formats import Format, Quantised, quantise
from rwkv_batch.model.quant_linear import W8A8Linear
from rwkv_batch.model.step_inputs import step_inputs
from rwkv_batch.model.weights import open_weights
from rwkv_batch.runner.pipeline import Pipeline
from test.model.test_model import needs_compiler
from test.model.test_w8a8 import random

pytestmark = needs_compiler
SHAPES = [(64, 256), (20, 192), (192, 200), (33, 1000), (65, 131), (40, 129), (100, 128), (70, 77), (1, 1), (8, 3072)]
ROWS = (1, 2, 3, 4, 5, 7, 12, 13, 16, 17, 31, 32, 33, 48, 49, 70)


def matrix(out: int, inner: int, outliers: float = 20.0, bits: int = 8) -> tuple[Quantised, Tensor]:
    """Return a matrix and the largest inputs [in] it is made for. A few of them are outliers."""
    largest = random(inner, seed=1).abs() + 0.5
    largest[torch.randperm(inner, generator=torch.Generator().manual_seed(2))[:8]] *= outliers
    stored = quantise(random(out, inner, seed=3) * 0.05, Format.W8A8, largest)
    return dataclasses.replace(stored, activation_bits=bits), largest


def inputs(rows: int, largest: Tensor, unsigned: bool = False) -> Tensor:
    """Return rows of very different sizes. The last of several is zero."""
    x = random(rows, len(largest), seed=rows) * largest * 10 ** torch.linspace(-42, 12, rows).unsqueeze(1)
    if rows > 1:
        x[-1] = 0
    return x.relu().square().clamp(max=3e38) if unsigned else x


def check_bits(unsigned: bool, bits: int = 8) -> None:
    for out, inner in SHAPES:
        stored, largest = matrix(out, inner, bits=bits)
        linear, reference = CpuW8A8Linear(stored, unsigned), W8A8Linear(stored, unsigned)
        for rows in ROWS:
            x = inputs(rows, largest, unsigned)
            assert torch.equal(linear(x), reference(x)), (out, inner, rows)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("unsigned", [False, True])
def test_bits_equal_the_definition(unsigned: bool, bits: int) -> None:
    check_bits(unsigned, bits)


@pytest.mark.parametrize("activation", [Activation.NONE, Activation.TANH, Activation.SIGMOID, Activation.RELU_SQUARED])
def test_activations_and_other_types_in_one_call(activation: Activation) -> None:
    stored, largest = matrix(100, 200)
    weight, x = random(50, 64), [inputs(7, largest) * 1e-9, random(7, 64), random(7, 64)]
    linears = [CpuW8A8Linear(stored), CpuLinear(weight), make_quantised("", quantise(weight, Format.INT4))]
    maps = [(linear, rows, activation) for linear, rows in zip(linears, x, strict=True)]
    together = run_linears(maps)  # type: ignore[arg-type]
    assert all(torch.equal(y, run_linears([one])[0]) for y, one in zip(together, maps, strict=True))  # type: ignore[list-item]
    y = W8A8Linear(stored)(x[0])
    expected = {Activation.TANH: y.tanh(), Activation.SIGMOID: y.sigmoid(), Activation.RELU_SQUARED: y.relu().square()}
    assert torch.allclose(together[0], expected.get(activation, y), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 2e38])
@pytest.mark.parametrize("positions", [slice(5, 6), slice(200, 201), slice(None)])
@pytest.mark.parametrize("rows", [3, 40])
def test_invalid_rows_stay_alone(value: float, positions: slice, rows: int) -> None:
    stored, largest = matrix(20, 300)
    assert stored.transform is not None
    order = stored.transform.positions
    stored = dataclasses.replace(stored, transform=w8a8.InputTransform(torch.ones(300), order))
    linear, x = CpuW8A8Linear(stored), inputs(rows, largest)
    clean = linear(x)
    x[1, order.argsort()[positions]] = value
    y = linear(x)
    assert torch.equal(y[1].isnan(), W8A8Linear(stored)(x)[1].isnan())
    assert y[1].isnan().all() or value == 2e38
    others = [row for row in range(rows) if row != 1]
    assert torch.equal(y[others], clean[others])


def test_it_takes_one_byte_per_weight() -> None:
    stored, _ = matrix(256, 1024)
    assert CpuW8A8Linear(stored).num_bytes < 1.06 * 256 * 1024


def test_squares_are_unsigned() -> None:
    stored, _ = matrix(8, 64)
    packings = [make_quantised(f"blocks.0.ffn.{name}.weight", stored) for name in ("key", "value")]
    assert [linear.args.packing for linear in packings] == [Packing.W8A8, Packing.W8U8]  # type: ignore[attr-defined]


def test_what_does_not_fit_is_refused() -> None:
    stored, _ = matrix(2, 32769)
    with pytest.raises(ValueError, match="32769 inputs; the limit is 32768; use --dtype bf16"):
        CpuW8A8Linear(stored)
    stored, _ = matrix(2, 256)
    assert stored.transform is not None
    for wrong in (torch.zeros(256, dtype=torch.int32), torch.arange(256, dtype=torch.int32).flip(0)):
        with pytest.raises(ValueError, match="delete the folder of quantised weights"):
            CpuW8A8Linear(dataclasses.replace(stored, transform=w8a8.InputTransform(stored.transform.factors, wrong)))


@pytest.mark.slow
def test_a_model_gives_the_same_bits_for_any_batch_and_split(tmp_path: Path) -> None:
    weights = open_weights(write_random_model(tmp_path / "tiny.pth", layers=2, width=256))
    pipelines = {kernels: Pipeline(weights, ("cpu",), "int8", kernels) for kernels in ("cpu", "naive")}
    for pipeline in pipelines.values():
        pipeline.allocate_slots(40)
    model = pipelines["cpu"]
    prompts = [[(7 * row + 3 * i) % 250 + 1 for i in range(1 + row % 23)] for row in range(36)]
    slots = list(range(2, 38))

    def forward(rows: list[int], tokens: list[list[int]], read: list[int]) -> Tensor:
        return model.forward(step_inputs(tokens, read, [slots[row] for row in rows], list(range(len(rows))))).clone()

    together = forward(list(range(36)), prompts, [0] * 36)
    assert torch.equal(together, torch.cat([forward([row], [prompts[row]], [0]) for row in range(36)]))
    for row in (6, 22):
        for i, token in enumerate(prompts[row]):
            logits = forward([row], [[token]], [slots[row] if i else 0])
        assert torch.equal(logits[0], together[row])
    naive = pipelines["naive"].forward(step_inputs(prompts, [0] * 36, slots, list(range(36))))
    assert (naive - together).norm() < 0.02 * naive.norm()
