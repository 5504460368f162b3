"""Layers that are copied in while others run, on a GPU: in plain steps and inside a graph, bit for bit the same."""

from __future__ import annotations

import pytest
import torch

from bench.tools.gpu_model import VOCAB, random_stage
from rwkv_batch.model.state import StateFormat
from rwkv_batch.model.step_inputs import StepInputs
from rwkv_batch.runner.layer_stream import StreamedLayers
from rwkv_batch.runner.pipeline import Stage

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
GPU = torch.device("cuda", 0)
ROWS = 3


@torch.inference_mode()
def logits(stage: Stage, graphed: bool) -> torch.Tensor:
    """Return the logits of the last of five steps."""
    stage.allocate_slots(ROWS + 2)
    slots, ends = torch.arange(2, ROWS + 2, device=GPU), torch.arange(ROWS + 1, device=GPU)
    tokens = torch.randint(VOCAB, (ROWS,), device=GPU, generator=torch.Generator(GPU).manual_seed(1))
    inputs = StepInputs(tokens, ends, slots, slots, ends[:-1], 1)

    def step() -> torch.Tensor:
        x, _ = stage.forward(stage.embed(tokens), None, inputs)
        return stage.logits(x, inputs)

    out = step()
    if graphed:
        stage.allocate_slots(ROWS + 2)
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.graph(graph, stream=side):
            out = step()
        for _ in range(5):
            graph.replay()
    else:
        for _ in range(4):
            out = step()
    torch.cuda.synchronize()
    return out.clone()


@pytest.mark.parametrize("dtype", ["fp16", "int8"])
@pytest.mark.parametrize("graphed", [False, True])
def test_streamed_layers_compute_the_same(dtype: str, graphed: bool) -> None:
    stage = random_stage("0.1b", GPU, StateFormat.FP32, dtype=dtype)
    expected = logits(stage, graphed)
    whole = stage.weight_bytes
    stage.layers = StreamedLayers(iter(stage.layers), 4, GPU)
    assert stage.weight_bytes < whole and stage.num_streamed == 8
    assert torch.equal(logits(stage, graphed), expected)
