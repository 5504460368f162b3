"""W8A8: the definition's exact sums and rounding, and the measured inputs that it needs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from demo.files import ensure_model
from demo.random_weights import write_random_model
from rwkv_batch.model.loader import precision_for
from rwkv_batch.model.quant import w8a8
from rwkv_batch.model.quant.formats import NOT_ROUNDED, Format, Quantised, dequantise, quantise
from rwkv_batch.model.quant_linear import W8A8Linear, plain_quantised
from rwkv_batch.model.step_inputs import step_inputs
from rwkv_batch.model.weights import open_weights
from rwkv_batch.runner import calibration
from rwkv_batch.runner.calibration import MeasuredInputs
from rwkv_batch.runner.pipeline import Pipeline
from test.model.test_quant import error

CPU = torch.device("cpu")


def random(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def stored_and_rows(inner: int, outliers: float = 1.0, out: int = 96, rows: int = 9) -> tuple[Quantised, Tensor]:
    x = random(rows, inner, seed=1)
    x[:, :: max(1, inner // 8)] *= outliers
    return quantise(random(out, inner, seed=2) * 0.02, Format.W8A8, x.abs().amax(0)), x


@pytest.mark.parametrize(
    ("inner", "outliers", "limit"), [(768, 1, 0.012), (768, 20, 0.015), (130, 1, 0.012), (64, 1, 0.012)]
)
def test_products_are_close(inner: int, outliers: float, limit: float) -> None:
    stored, x = stored_and_rows(inner, outliers)
    weight = random(96, inner, seed=2) * 0.02
    assert error(W8A8Linear(stored)(x), x @ weight.T) < limit
    assert error(dequantise(stored), weight) < 0.05


def test_squares_have_a_bit_more() -> None:
    x = random(9, 768, seed=1).relu().square()
    weight = random(96, 768, seed=2) * 0.02
    stored = quantise(weight, Format.W8A8, x.amax(0))
    signed, unsigned = W8A8Linear(stored)(x), W8A8Linear(stored, unsigned=True)(x)
    assert error(unsigned, x @ weight.T) < error(signed, x @ weight.T) < 0.02


@pytest.mark.parametrize("unsigned", [False, True])
def test_16_bits_of_inputs_leave_the_weights_error(unsigned: bool) -> None:
    stored, x = stored_and_rows(768, outliers=20)
    x = x.relu().square() if unsigned else x
    exact = x @ dequantise(stored).T
    errors = {}
    for bits in (8, 16):
        errors[bits] = error(W8A8Linear(dataclasses.replace(stored, activation_bits=bits), unsigned)(x), exact)
    assert errors[16] < 1e-4 < 20 * errors[16] < errors[8]


def test_rows_have_the_same_bits_alone_and_in_a_batch() -> None:
    stored, x = stored_and_rows(768, outliers=100)
    together = W8A8Linear(stored)(x)
    assert torch.equal(together, torch.cat([W8A8Linear(stored)(row[None]) for row in x]))
    order = torch.randperm(768, generator=torch.Generator().manual_seed(3))
    codes = w8a8.quantise_rows(x, stored.transform or pytest.fail("no transform"))
    large = w8a8.LARGE_CHANNELS
    shuffled = torch.cat([order[order < large], order[order >= large]])
    moved = w8a8.Codes(codes.codes[:, shuffled], codes.scales, codes.ratios)
    weights = w8a8.Codes(stored.codes[:, shuffled], *stored.in_segments()[1:])
    assert torch.equal(w8a8.product(moved, weights), together)


def test_the_largest_products_fit_32_bits() -> None:
    for unsigned in (False, True):
        v = torch.full((1, 16384), 1e-6)
        v[:, : w8a8.LARGE_CHANNELS] = 1.0
        x = w8a8.quantise(v, w8a8.MAX_UNSIGNED_RATIO if unsigned else w8a8.MAX_RATIO, unsigned)
        w = w8a8.quantise(v, w8a8.MAX_WEIGHT_RATIO)
        sums = w8a8.product(x, w) / (x.scales * w.scales)
        assert float(sums.abs().max()) < 2**31
        assert error(w8a8.product(x, w), v @ v.T) < 0.01


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("channel", [0, 700])
def test_invalid_inputs_stay_invalid_and_alone(value: float, channel: int) -> None:
    stored, x = stored_and_rows(768)
    clean = W8A8Linear(stored)(x)
    x[4, channel] = value
    y = W8A8Linear(stored)(x)
    assert y[4].isnan().all()
    others = [row for row in range(len(x)) if row != 4]
    assert torch.equal(y[others], clean[others])


def test_rows_of_zeros_give_zeros() -> None:
    stored, x = stored_and_rows(768)
    assert torch.equal(W8A8Linear(stored)(x * 0), torch.zeros(9, 96))


def test_invalid_weights_are_refused() -> None:
    weight = random(8, 128)
    weight[3, 5] = torch.nan
    with pytest.raises(ValueError, match="use --dtype fp16"):
        quantise(weight, Format.W8A8, torch.ones(128))


def test_inputs_are_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = open_weights(write_random_model(tmp_path / "tiny.pth", layers=2, width=128))
    measured = MeasuredInputs(weights, CPU)
    names = [name for name in weights.tensors if name.endswith(("ffn.key.weight", "att.output.weight", "head.weight"))]
    first = {name: measured(name) for name in names}
    assert len(first) == 5 and all(bool((x_max > 0).all()) for x_max in first.values())
    monkeypatch.setattr(calibration, "measure", lambda *_: pytest.fail("measured twice"))
    kept = MeasuredInputs(weights, CPU)
    assert all(torch.equal(kept(name), x_max) for name, x_max in first.items())


def test_a_damaged_file_is_measured_again(tmp_path: Path) -> None:
    weights = open_weights(write_random_model(tmp_path / "tiny.pth", layers=1, width=128))
    first = MeasuredInputs(weights, CPU)("head.weight")
    file = next(tmp_path.glob("tiny.int8-*")) / "calibration.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    assert torch.equal(MeasuredInputs(weights, CPU)("head.weight"), first)


def test_a_model_reads_and_writes_int8(tmp_path: Path) -> None:
    weights = open_weights(write_random_model(tmp_path / "tiny.pth", layers=2, width=256))
    logits = {}
    for dtype, bits in (("fp32", 8), ("int8", 8), ("int8", 16)):
        pipeline = Pipeline(weights, ("cpu",), dtype, "naive", activation_bits=bits)
        pipeline.allocate_slots(22)
        name = pipeline.stages[0].precision.weights_name
        prompts = torch.randint(1, 65000, (20, 12), generator=torch.Generator().manual_seed(1)).tolist()
        logits[name] = pipeline.forward(step_inputs(prompts, [0] * 20, list(range(2, 22)), list(range(20))))
    errors = {name: error(logits[name], logits["float32"]) for name in logits}
    assert 0 < errors["int8, 16-bit inputs"] < 0.8 * errors["int8"] < 0.03


def test_older_models_round_no_inputs_on_a_gpu_and_little_on_a_cpu() -> None:
    gpu, cpu = (precision_for(torch.device(name), "int8", "auto", "RWKV-6") for name in ("cuda", "cpu"))
    assert (gpu.activation_bits, cpu.activation_bits) == (NOT_ROUNDED, 16)
    stored, x = stored_and_rows(768)
    linear = plain_quantised("", dataclasses.replace(stored, activation_bits=NOT_ROUNDED))
    assert torch.allclose(linear(x), x @ dequantise(stored).T, atol=1e-5)


def test_16_bits_are_for_int8() -> None:
    with pytest.raises(ValueError, match="--activation-bits 16 is for --dtype int8, not int4; give both or neither"):
        Pipeline(open_weights(ensure_model()), ("cpu",), "int4", activation_bits=16)


def test_squares_with_rare_large_values_are_smoothed_less() -> None:
    x = random(4096, 512, seed=1).relu().square()
    x[torch.arange(64), torch.arange(64)] = 1e4
    weight = random(96, 512, seed=2) * 0.02
    errors = []
    for squares in (False, True):
        linear = W8A8Linear(quantise(weight, Format.W8A8, x.amax(0), squares), unsigned=True)
        errors.append(error(linear(x[64:128]), x[64:128] @ weight.T))
    assert errors[1] < 0.8 * errors[0]
