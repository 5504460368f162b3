"""fp8 rows times fp8 weights: shift_mix quantises a layer's inputs; the low-rank products are in the same launch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from demo.random_weights import random_weights
from rwkv_batch.kernels.cuda import input_projections as cuda_input_projections
from rwkv_batch.kernels.cuda.hopper_gemm import has_hopper_gemm
from rwkv_batch.kernels.cuda.layer import CudaLayer
from rwkv_batch.kernels.cuda.ops import CudaOps
from rwkv_batch.kernels.cuda.packed_weights import scaled_mm_dtypes
from rwkv_batch.kernels.cuda.quant_linear import CudaQuantLinear, CudaQuantValue
from rwkv_batch.kernels.cuda.quantised_rows import PartialSums, QuantisedMix, QuantisedRows, quantise_rows, sum_partials
from rwkv_batch.kernels.cuda.workspace import MAX_SPARSE_ROWS
from rwkv_batch.model.layer import Projections, Prologue
from rwkv_batch.model.loader import Precision
from rwkv_batch.model.quant.formats import Format, quantise
from rwkv_batch.model.state import ModelShape, StateArena, StateFormat
from rwkv_batch.model.step_inputs import StepInputs
from rwkv_batch.model.weights import Weights
from rwkv_batch.runner.pipeline import Stage

GPU = torch.device("cuda", 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
WIDTH, VOCAB = 4096, 256
RANKS = (128, 128, 96, 480)
ONE_LAUNCH_ROWS = (65, 96, 128, 200, 257, 320)
"""Row counts whose input projections are one launch on a GPU of 132 SMs."""
TWO_PART_ROWS = (5, 9, 16, 32, 33, 64)
"""Row counts with two-part inputs."""
SAME_PLAN = (5, 9, 33, 64, 65, 130)
"""Row counts with the same tiles for both layouts of a matrix."""
FFN_VALUE_ROWS = (*SAME_PLAN, 257, 320, 400, 600, 800, 1000, 1040, 4100)
ANY_FP8 = 0x31
"""Byte of some fp8 value."""
TWO_PART_ERROR = 6e-3
"""Error that two-part inputs add to a product, or to two products in a row."""


@pytest.fixture(scope="module")
def stage() -> Stage:
    """Two layers of 7.2B's shape in fp8."""
    if not scaled_mm_dtypes(GPU) or not has_hopper_gemm(GPU):
        pytest.skip("this GPU does not use our fp8 GEMMs")
    tensors = random_weights(2, WIDTH, VOCAB, ranks=RANKS, first_v=False, dtype=torch.float16, device=GPU)
    weights = Weights(Path("random"), tensors, ModelShape(2, WIDTH, VOCAB, 4 * WIDTH, *RANKS), "")
    return Stage(weights, 0, 2, Precision(GPU, torch.float16, torch.float16, StateFormat.FP16, Format.FP8), CudaOps())


def step_inputs(lengths: list[int]) -> StepInputs:
    ends = torch.tensor([0, *lengths], device=GPU).cumsum(0)
    slots = torch.arange(2, 2 + len(lengths), device=GPU)
    return StepInputs(torch.zeros_like(ends[1:]), ends, slots, slots, ends[1:] - 1, max(lengths))


def normal(*size: int) -> Tensor:
    return torch.randn(*size, device=GPU).half()


def poison_free_memory(count: int) -> None:
    """Leave NaN in the memory that torch reuses for outputs. Tests then notice unwritten elements."""
    torch.full((count,), torch.nan, device=GPU, dtype=torch.float16)


def in_two_parts(x: Tensor) -> Tensor:
    """Return x [T, C] fp16 as two parts [T, 2, C] e5m2. Their sum, first + second / 8, is near x."""
    first = x.to(torch.float8_e5m2)
    return torch.stack([first, ((x - first.half()) * 8).to(torch.float8_e5m2)], dim=1)


def mix(stage: Stage, prologue: Prologue, lengths: list[int], as_fp16: bool) -> tuple[Tensor | QuantisedMix, Tensor]:
    """Return shift_mix's inputs of linear maps and its new shifts. The rows are random and the same at each call.

    as_fp16: in fp16, as rows with adapters need them; else quantised
    """
    generator = torch.Generator(GPU).manual_seed(sum(lengths))
    sizes = (sum(lengths), WIDTH), (len(lengths) + 2, WIDTH)
    x, shift = (torch.randn(*size, device=GPU, generator=generator).half() for size in sizes)
    inputs = step_inputs(lengths)
    inputs.tokens = torch.zeros(sum(lengths), dtype=torch.int64, device=GPU)
    inputs.adapters = torch.zeros(sum(lengths), dtype=torch.int64) if as_fp16 else None
    _, mixed = stage.ops.shift_mix(x, x.flip(0), prologue, shift, inputs)
    return mixed, shift


@pytest.mark.parametrize("lengths", [[1] * 65, [1] * 132, [1] * 133, [1] * 960, [100], [3, 70, 1, 500, 33]], ids=str)
def test_quantised_inputs_are_those_of_the_fp16_inputs(stage: Stage, lengths: list[int]) -> None:
    layer = stage.layers[1]
    assert isinstance(layer, CudaLayer)
    for prologue, count in ((layer.time_mix_prologue, 3), (layer.channel_mix_prologue, 1)):
        plain, shift = mix(stage, prologue, lengths, as_fp16=True)
        mixed, shift_too = mix(stage, prologue, lengths, as_fp16=False)
        assert isinstance(plain, Tensor) and isinstance(mixed, QuantisedMix)
        assert torch.equal(shift, shift_too)
        assert count == 1 or torch.equal(mixed.fp16, plain[2:])  # v, w, a, g: v is quantised too, for its own map
        for i in range(count):
            expected = quantise_rows(plain[i])
            assert torch.equal(mixed[i].codes.view(torch.uint8), expected.codes.view(torch.uint8))
            assert torch.equal(mixed[i].scales, expected.scales)


@pytest.mark.parametrize("rows", ONE_LAUNCH_ROWS)
@pytest.mark.parametrize("index", [0, 1])
def test_low_ranks_in_the_launch_of_r_k_v(stage: Stage, rows: int, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Near separate launches; the same bits at each call, and for any content of the other rows."""
    layer = stage.layers[index]
    assert isinstance(layer, CudaLayer)
    mixed, _ = mix(stage, layer.time_mix_prologue, [1] * rows, as_fp16=False)
    assert isinstance(mixed, QuantisedMix)
    names = list("rkvwag") + ["v_gate"] * (index > 0)
    poison_free_memory(1 << 28)
    actual = stage.ops.project(layer, mixed)
    with monkeypatch.context() as context:
        context.setattr(cuda_input_projections, "_fits_one_quantised_launch", lambda layer, tokens: False)
        apart = stage.ops.project(layer, mixed)
    for name in names:
        y, z = getattr(actual, name).float(), getattr(apart, name).float()
        assert ((y - z).norm() / z.norm()).item() < 1e-3, name
    for _ in range(20):
        again = stage.ops.project(layer, mixed)
        assert all(torch.equal(getattr(again, name), getattr(actual, name)) for name in names)
    kept = torch.arange(rows, device=GPU) % 3 == 0
    mixed.fp16[:, ~kept] = normal(*mixed.fp16[:, ~kept].shape)
    mixed.codes.view(torch.uint8)[:, ~kept] = ANY_FP8
    other_rows = stage.ops.project(layer, mixed)
    assert all(torch.equal(getattr(other_rows, name)[kept], getattr(actual, name)[kept]) for name in names)


@pytest.mark.parametrize("lengths", [[1] * 5, [1] * 9, [1] * 64, [40], [3, 1, 30]], ids=str)
def test_parts_add_up_to_the_fp16_inputs(stage: Stage, lengths: list[int]) -> None:
    layer = stage.layers[1]
    assert isinstance(layer, CudaLayer)
    for prologue, count in ((layer.time_mix_prologue, 3), (layer.channel_mix_prologue, 1)):
        plain, shift = mix(stage, prologue, lengths, as_fp16=True)
        mixed, shift_too = mix(stage, prologue, lengths, as_fp16=False)
        assert isinstance(plain, Tensor) and isinstance(mixed, QuantisedMix)
        assert torch.equal(shift, shift_too)
        assert count == 1 or torch.equal(mixed.fp16, plain[2:])  # v, w, a, g: v is quantised too, for its own map
        for i in range(count):
            assert mixed[i].scales is None
            assert torch.equal(mixed[i].codes.view(torch.uint8), in_two_parts(plain[i]).view(torch.uint8))


@pytest.mark.parametrize("rows", TWO_PART_ROWS)
@pytest.mark.parametrize("index", [0, 1])
def test_products_of_two_part_rows(stage: Stage, rows: int, index: int) -> None:
    """Near the fp16 products, within the rounding of two parts; the same bits at each call, for any other rows."""
    layer = stage.layers[index]
    assert isinstance(layer, CudaLayer)
    kept = torch.arange(rows, device=GPU) % 3 == 0
    poison_free_memory(1 << 28)
    plain, _ = mix(stage, layer.time_mix_prologue, [1] * rows, as_fp16=True)
    mixed, _ = mix(stage, layer.time_mix_prologue, [1] * rows, as_fp16=False)
    assert isinstance(plain, Tensor) and isinstance(mixed, QuantisedMix)
    names = list("rkvwag") + ["v_gate"] * (index > 0)
    actual, expected = stage.ops.project(layer, mixed), stage.ops.project(layer, plain)
    for name in names:
        y, z = getattr(actual, name).float(), getattr(expected, name).float()
        assert ((y - z).norm() / z.norm()).item() < TWO_PART_ERROR, name
    for _ in range(20):
        again = stage.ops.project(layer, mixed)
        assert all(torch.equal(getattr(again, name), getattr(actual, name)) for name in names)
    mixed.fp16[:, ~kept] = normal(*mixed.fp16[:, ~kept].shape)
    mixed.codes.view(torch.uint8)[:, ~kept] = ANY_FP8
    other_rows = stage.ops.project(layer, mixed)
    assert all(torch.equal(getattr(other_rows, name)[kept], getattr(actual, name)[kept]) for name in names)

    x = normal(rows, WIDTH)
    parts = in_two_parts(x)
    others = torch.where(kept[:, None, None], parts.view(torch.uint8), ANY_FP8).view(torch.float8_e5m2)
    y, z = layer.output(QuantisedRows(parts, None)), layer.output(x).float()
    assert ((y.float() - z).norm() / z.norm()).item() < TWO_PART_ERROR
    assert torch.equal(layer.output(QuantisedRows(others, None))[kept], y[kept])
    partials = stage.ops.output(layer, QuantisedRows(parts, None))
    assert isinstance(partials, PartialSums)
    assert torch.equal(sum_partials(partials), y), "the kernel of y adds its partial sums in this order"
    y, z = (
        sum_partials(stage.ops.channel_mix(layer, QuantisedRows(parts, None))),
        sum_partials(stage.ops.channel_mix(layer, x)).float(),
    )
    assert ((y.float() - z).norm() / z.norm()).item() < TWO_PART_ERROR
    if rows > MAX_SPARSE_ROWS:  # with fewer rows, sums depend on the inputs that are zero in all rows
        assert torch.equal(sum_partials(stage.ops.channel_mix(layer, QuantisedRows(others, None)))[kept], y[kept])


@pytest.mark.parametrize("rows", FFN_VALUE_ROWS)
@pytest.mark.parametrize("n", [WIDTH, 1056])
def test_transposed_ffn_value(rows: int, n: int) -> None:
    """ffn.value stored as [k, n] gives the results of [n, k].

    They are bit-identical where the tiles are the same, and do not depend on other rows.
    """
    if not scaled_mm_dtypes(GPU) or not has_hopper_gemm(GPU):
        pytest.skip("this GPU stores the matrix in both layouts")
    stored = quantise(torch.randn(n, 4096, device=GPU) / 64, Format.FP8)
    value, output_major = CudaQuantValue(stored), CudaQuantLinear(stored)
    assert value.num_bytes == output_major.num_bytes, "the matrix is stored once"
    hidden = torch.relu(normal(rows, 4096))
    poison_free_memory(1 << 24)
    y, expected = value(hidden), output_major(hidden)
    same = torch.equal(y, expected) if rows in SAME_PLAN else True
    assert same and ((y.float() - expected.float()).norm() / expected.float().norm()).item() < 1e-3
    kept = torch.arange(rows, device=GPU) % 3 == 0
    others = torch.where(kept[:, None], hidden, torch.relu(normal(rows, 4096)))
    assert all(torch.equal(value(others)[kept], y[kept]) for _ in range(20))


@pytest.mark.parametrize("rows", TWO_PART_ROWS)
@pytest.mark.parametrize("form", [StateFormat.INT8, StateFormat.FP16, StateFormat.FP32])
def test_wkv_writes_two_part_output(stage: Stage, rows: int, form: StateFormat) -> None:
    """The parts equal those of the fp16 output that adapters read."""
    layer = stage.layers[1]
    projections = Projections(*normal(7, rows, WIDTH).unbind())
    v_first, inputs, outputs = normal(rows, WIDTH), step_inputs([1] * rows), []
    for has_adapters in (True, False):
        inputs.adapters = torch.zeros(rows, dtype=torch.int64) if has_adapters else None
        state = StateArena(rows + 2, 1, stage.shape, GPU, form, torch.float16).layer_wkv(0)
        outputs.append(stage.ops.time_mix(layer, projections, v_first, state, inputs)[0])
    assert isinstance(outputs[1], QuantisedRows)
    assert torch.equal(outputs[1].codes.view(torch.uint8), in_two_parts(outputs[0]).view(torch.uint8))
