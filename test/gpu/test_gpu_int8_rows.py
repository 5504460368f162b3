"""int8 weights with 5 to 64 rows: the previous kernels write two-byte inputs."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from demo.random_weights import random_weights
from rwkv_batch.kernels.cuda import channel_mix
from rwkv_batch.kernels.cuda import input_projections as cuda_input_projections
from rwkv_batch.kernels.cuda.hopper_gemm import has_hopper_gemm
from rwkv_batch.kernels.cuda.layer import CudaLayer
from rwkv_batch.kernels.cuda.ops import CudaOps
from rwkv_batch.kernels.cuda.quant_linear import CudaQuantLinear, CudaQuantValue, make_quantised
from rwkv_batch.kernels.cuda.quantised_gemm import multiply_to_partials
from rwkv_batch.kernels.cuda.quantised_rows import QuantisedMix, QuantisedRows, sum_partials
from rwkv_batch.kernels.cuda.workspace import MAX_SPARSE_ROWS
from rwkv_batch.model.layer import Projections, Prologue
from rwkv_batch.model.loader import Precision
from rwkv_batch.model.quant.formats import Format, dequantise, quantise
from rwkv_batch.model.state import ModelShape, StateArena, StateFormat
from rwkv_batch.model.step_inputs import StepInputs
from rwkv_batch.model.weights import Weights
from rwkv_batch.runner.pipeline import Stage
from test.model.row_bytes import assert_items_fit, assert_stands_for, meaning

GPU = torch.device("cuda", 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
WIDTH, VOCAB = 4096, 256
RANKS = (128, 128, 96, 480)
ROWS = (5, 9, 16, 31, 32, 33, 64)


@pytest.fixture(scope="module")
def stage() -> Stage:
    """Two layers of 7.2B's shape in int8."""
    if not has_hopper_gemm(GPU):
        pytest.skip("rows in bytes are Hopper's")
    tensors = random_weights(2, WIDTH, VOCAB, ranks=RANKS, first_v=False, dtype=torch.float16, device=GPU)
    weights = Weights(Path("random"), tensors, ModelShape(2, WIDTH, VOCAB, 4 * WIDTH, *RANKS), "")
    return Stage(weights, 0, 2, Precision(GPU, torch.float16, torch.float16, StateFormat.FP16, Format.INT8), CudaOps())


def step(lengths: list[int], halves: bool = False) -> StepInputs:
    """Return the step's inputs. `halves`: rows may have adapters."""
    ends = torch.tensor([0, *lengths], device=GPU).cumsum(0)
    slots = torch.arange(2, 2 + len(lengths), device=GPU)
    inputs = StepInputs(torch.zeros(sum(lengths), dtype=torch.int64, device=GPU), ends, slots, slots, ends[1:] - 1, 1)
    inputs.max_seqlen = max(lengths)
    inputs.adapters = torch.zeros(sum(lengths), dtype=torch.int64) if halves else None
    return inputs


def normal(*size: int) -> Tensor:
    return torch.randn(*size, device=GPU).half()


def poison_memory() -> None:
    """Return a workspace whose tensors hold NaN."""
    held = torch.full((1 << 28,), torch.nan, device=GPU, dtype=torch.float16)
    del held


def error(y: Tensor, reference: Tensor) -> float:
    return float((y.float() - reference).norm() / reference.norm())


def mix(stage: Stage, prologue: Prologue, lengths: list[int], halves: bool) -> tuple[Tensor | QuantisedMix, Tensor]:
    """Return mixed inputs and new shifts of random rows; the same ones at each call."""
    generator = torch.Generator(GPU).manual_seed(sum(lengths))
    sizes = (sum(lengths), WIDTH), (len(lengths) + 2, WIDTH)
    x, shift = (torch.randn(*size, device=GPU, generator=generator).half() for size in sizes)
    _, mixed = stage.ops.shift_mix(x, x.flip(0), prologue, shift, step(lengths, halves))
    return mixed, shift


def same(a: QuantisedRows, b: QuantisedRows, kept: Tensor | slice = slice(None)) -> bool:
    assert a.scales is not None and b.scales is not None
    rows = len(a.codes)
    scales = [m[:, :rows][:, kept].view(torch.int32) for m in (a.scales, b.scales)]
    return torch.equal(a.codes[kept], b.codes[kept]) and torch.equal(*scales)


def spoilt(x: QuantisedRows, kept: Tensor) -> QuantisedRows:
    """Return the inputs with other content in the rows not kept."""
    assert x.scales is not None
    codes, scales = x.codes.clone(), x.scales.clone()
    codes[~kept] = 0x31
    scales[:, : len(kept)][:, ~kept] = 1e30
    return QuantisedRows(codes, scales)


@pytest.mark.parametrize("lengths", [[1] * 5, [1] * 9, [1] * 21, [1] * 64, [40], [3, 1, 30]], ids=str)
def test_two_byte_inputs_equal_the_fp16_inputs(stage: Stage, lengths: list[int]) -> None:
    """A separate kernel makes the same bits from the fp16 inputs. Adapters read the fp16 inputs."""
    layer = stage.layers[1]
    assert isinstance(layer, CudaLayer)
    for prologue, count in ((layer.time_mix_prologue, 3), (layer.channel_mix_prologue, 1)):
        plain, shift = mix(stage, prologue, lengths, halves=True)
        mixed, shift_too = mix(stage, prologue, lengths, halves=False)
        assert (
            isinstance(plain, Tensor)
            and isinstance(mixed, QuantisedMix)
            and isinstance(prologue.consumer, CudaQuantLinear)
        )
        assert torch.equal(shift, shift_too)
        assert count == 1 or torch.equal(mixed.fp16, plain[2:])
        for i in range(count):
            assert same(mixed[i], prologue.consumer.to_two_part_rows(plain[i]))
            codes, scales = mixed[i]
            assert scales is not None
            assert_stands_for(codes, scales, plain[i])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("index", [0, 1])
def test_input_projections(stage: Stage, rows: int, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits with or without the low ranks in the launch. Also at each call, and for any other rows."""
    layer = stage.layers[index]
    assert isinstance(layer, CudaLayer)
    kept = torch.arange(rows, device=GPU) % 3 == 0
    poison_memory()
    plain, _ = mix(stage, layer.time_mix_prologue, [1] * rows, halves=True)
    mixed, _ = mix(stage, layer.time_mix_prologue, [1] * rows, halves=False)
    assert isinstance(plain, Tensor) and isinstance(mixed, QuantisedMix)
    names = list("rkvwag") + ["v_gate"] * (index > 0)
    actual, expected = stage.ops.project(layer, mixed), stage.ops.project(layer, plain)
    assert all(torch.equal(getattr(actual, name), getattr(expected, name)) for name in names)
    with monkeypatch.context() as context:
        context.setattr(cuda_input_projections, "_fits_one_quantised_launch", lambda layer, tokens: False)
        apart = stage.ops.project(layer, mixed)
    for name in names:
        assert error(getattr(actual, name), getattr(apart, name).float()) < 1e-3, name
    for _ in range(20):
        again = stage.ops.project(layer, mixed)
        assert all(torch.equal(getattr(again, name), getattr(actual, name)) for name in names)
    mixed.fp16[:, ~kept] = normal(*mixed.fp16[:, ~kept].shape)
    assert mixed.scales is not None
    mixed.codes[:, ~kept] = 0x31
    mixed.scales[:, :, :rows][:, :, ~kept] = 1e30
    other_rows = stage.ops.project(layer, mixed)
    assert all(torch.equal(getattr(other_rows, name)[kept], getattr(actual, name)[kept]) for name in names)


@pytest.mark.parametrize("rows", ROWS)
def test_output_and_channel_mix(stage: Stage, rows: int) -> None:
    """Equal to fp16 inputs that a separate kernel quantises; for any content of the other rows."""
    layer = stage.layers[1]
    assert isinstance(layer, CudaLayer) and isinstance(layer.ffn_key, CudaQuantLinear)
    assert isinstance(layer.output, CudaQuantLinear)
    kept = torch.arange(rows, device=GPU) % 3 == 0
    x = normal(rows, WIDTH)
    given = layer.output.to_two_part_rows(x)
    others = spoilt(given, kept)
    poison_memory()
    y = layer.output(given)
    assert torch.equal(layer.output(x), y)
    assert torch.equal(layer.output(others)[kept], y[kept])
    assert torch.equal(sum_partials(stage.ops.output(layer, given)), y)
    poison_memory()
    given = layer.ffn_key.to_two_part_rows(x)
    y, z = sum_partials(stage.ops.channel_mix(layer, given)), sum_partials(stage.ops.channel_mix(layer, x))
    assert torch.equal(y, z)
    if rows > MAX_SPARSE_ROWS:  # fewer add up the inputs that are not zero in any row
        assert torch.equal(sum_partials(stage.ops.channel_mix(layer, spoilt(given, kept)))[kept], y[kept])


@pytest.mark.parametrize("n, k", [(4096, 4096), (16384, 4096), (4096, 16384), (768, 768), (3072, 768), (2560, 2560)])
@pytest.mark.parametrize("rows", [1, 9, 16, 17, 32, 64])
@pytest.mark.parametrize("name", ["att.output", "ffn.key"])
def test_products(stage: Stage, name: str, rows: int, n: int, k: int) -> None:
    """Against fp32, with the dequantised inputs."""
    stored = quantise(torch.randn(n, k, device=GPU) / k**0.5, Format.INT8)
    linear = make_quantised(f"blocks.0.{name}.weight", stored)
    assert isinstance(linear, CudaQuantLinear)
    assert linear.group == (64 if name == "att.output" else 128)
    x = normal(rows, k) * 10.0 ** torch.randint(-1, 2, (rows, k), device=GPU).half()
    given = linear.to_two_part_rows(x)
    assert given.scales is not None
    assert error(meaning(*given), x.float()) < 3e-4
    poison_memory()
    assert error(linear(given), meaning(*given) @ dequantise(stored).T) < 3e-4


@pytest.mark.parametrize("n, k", [(4096, 16384), (1056, 4096), (768, 3072)])
@pytest.mark.parametrize("rows", [1, *ROWS])
def test_transposed_value(stage: Stage, rows: int, n: int, k: int) -> None:
    """Equal to the row-major matrix to the bit. Also at each call, and for any content of the other rows."""
    stored = quantise(torch.randn(n, k, device=GPU) / k**0.5, Format.INT8)
    value, output_major = CudaQuantValue(stored), CudaQuantLinear(stored)
    assert value.num_bytes == output_major.num_bytes, "it is held once"
    hidden = torch.relu(normal(rows, k)) * 10.0 ** torch.randint(-1, 2, (rows, k), device=GPU).half()
    given = value.to_two_part_rows(hidden)
    poison_memory()
    y, shares = value(given), multiply_to_partials(value, given)
    assert error(y, hidden.float() @ dequantise(stored).T) < 1e-3
    assert torch.equal(y, output_major(given)) and torch.equal(sum_partials(shares), y)
    kept = torch.arange(rows, device=GPU) % 3 == 0
    others = spoilt(given, kept)
    assert all(torch.equal(value(others)[kept], y[kept]) for _ in range(20))


@pytest.mark.parametrize("rows", [5, 9, 32, 64])
def test_logits_of_two_byte_inputs(stage: Stage, rows: int) -> None:
    """fp32 logits against fp32; a row has the same bits in every tile."""
    stored = quantise(torch.randn(1 << 15, WIDTH, device=GPU) / WIDTH**0.5, Format.INT8)
    head = make_quantised("head.weight", stored)
    assert isinstance(head, CudaQuantLinear) and head.returns_fp32(rows)
    x = normal(rows, WIDTH)
    given = head.to_two_part_rows(x)
    poison_memory()
    logits = head.to_fp32(x)
    assert logits.dtype == torch.float32
    assert error(logits, meaning(*given) @ dequantise(stored).T) < 1e-5
    assert torch.equal(head.to_fp32(x[:9].contiguous()), logits[:9])


@pytest.mark.parametrize("rows", [9, 32, 64])
def test_two_byte_hidden_values(stage: Stage, rows: int) -> None:
    """The two-byte output of ffn.key equals its fp16 output."""
    layer = stage.layers[1]
    assert isinstance(layer, CudaLayer) and isinstance(layer.ffn_value, CudaQuantValue)
    assert isinstance(layer.ffn_key, CudaQuantLinear)
    x = normal(rows, WIDTH)
    hidden, _ = channel_mix.hidden_quantised(layer, layer.ffn_value, x, None)
    with mock.patch.object(channel_mix, "multiply_to_partials", wraps=channel_mix.multiply_to_partials) as multiply:
        stage.ops.channel_mix(layer, layer.ffn_key.to_two_part_rows(x))
    given = multiply.call_args.args[1]
    assert_items_fit(given.codes, given.scales)
    assert same(given, layer.ffn_value.to_two_part_rows(hidden))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("form", [StateFormat.INT8, StateFormat.FP16, StateFormat.FP32])
def test_wkv_writes_two_byte_output(stage: Stage, rows: int, form: StateFormat) -> None:
    """Those of the halves that it gives to adapters."""
    layer = stage.layers[1]
    assert isinstance(layer.output, CudaQuantLinear)
    parts = Projections(*normal(7, rows, WIDTH).unbind())
    first, outputs = normal(rows, WIDTH), []
    for halves in (True, False):
        state = StateArena(rows + 2, 1, stage.shape, GPU, form, torch.float16).layer_wkv(0)
        outputs.append(stage.ops.time_mix(layer, parts, first, state, step([1] * rows, halves))[0])
    assert isinstance(outputs[1], QuantisedRows)
    assert same(outputs[1], layer.output.to_two_part_rows(outputs[0]))
