"""Streamed layers: the same results as with all layers on the device. On a GPU: test/gpu."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rwkv_batch.model.layer import linears_of
from rwkv_batch.model.step_inputs import StepInputs
from rwkv_batch.model.weights import open_weights
from rwkv_batch.runner.layer_stream import NUM_BUFFERS, StreamedLayers
from rwkv_batch.runner.pipeline import Pipeline
from test.harness import tiny_model

pytestmark = pytest.mark.slow


def pipeline_of(model: Path, dtype: str, **fields: object) -> Pipeline:
    """Plain torch on the CPU."""
    pipeline = Pipeline(open_weights(model), ("cpu",), dtype, "naive", **fields)  # type: ignore[arg-type]
    pipeline.allocate_slots(4)
    return pipeline


def two_steps(pipeline: Pipeline) -> list[torch.Tensor]:
    """Return the logits of a prompt and of a token after it."""
    slots = torch.tensor([2])
    prompt = StepInputs(torch.arange(5), torch.tensor([0, 5]), torch.tensor([0]), slots, torch.tensor([4]), 5)
    token = StepInputs(torch.tensor([7]), torch.tensor([0, 1]), slots, slots, torch.tensor([0]), 1)
    return [pipeline.forward(prompt).clone(), pipeline.forward(token).clone()]


@pytest.fixture(scope="module")
def six_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), layers=6)


@pytest.fixture(scope="module", params=["fp32", "int8", "int4"])
def plain(six_layers: Path, request: pytest.FixtureRequest) -> tuple[Path, str, list[Any]]:
    """A model, its storage, and its results with all layers on the device."""
    return six_layers, request.param, two_steps(pipeline_of(six_layers, request.param))


@pytest.mark.parametrize("resident", [0, 2, 3, 9])
def test_streamed_layers_compute_the_same(plain: tuple[Path, str, list[Any]], resident: int) -> None:
    model, dtype, expected = plain
    streamed = pipeline_of(model, dtype)
    stage = streamed.stages[0]
    stage.layers = StreamedLayers(iter(stage.layers), resident, torch.device("cpu"))
    stays = min(6, max(1, resident))  # layer 0 has no twin
    assert (len(stage.layers), stage.num_streamed) == (6, 6 - stays)
    assert len(stage.layers.on_device) == stays + min(NUM_BUFFERS, 6 - stays)
    for logits, actual in zip(expected, two_steps(streamed), strict=True):
        assert torch.equal(logits, actual)


def test_a_buffer_shares_no_memory_with_its_layers(six_layers: Path) -> None:
    pipeline = pipeline_of(six_layers, "fp32")
    layers = list(pipeline.stages[0].layers)
    streamed = StreamedLayers(iter(layers), 1, torch.device("cpu"))
    held = {linear.weight.data_ptr() for layer in layers[1:] for linear in linears_of(layer)}
    turns = [layer.output.weight.data_ptr() for layer in streamed]
    assert turns[1:3] == turns[3:5] and turns[1] != turns[2] and not held & set(turns)


def test_on_a_cpu_all_layers_stay(model: Path) -> None:
    pipeline = pipeline_of(model, "fp32", resident=(1,))
    assert pipeline.stages[0].num_streamed == 0
    with pytest.raises(ValueError, match="--pp-resident has 2 values for"):
        pipeline_of(model, "fp32", resident=(1, 1))
