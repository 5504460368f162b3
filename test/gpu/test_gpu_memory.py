"""GPU memory of a stage: weights once, without gaps; none for side streams; one logits buffer."""

from __future__ import annotations

import gc
import multiprocessing
from pathlib import Path

import pytest
import torch

from demo.random_weights import random_weights
from rwkv_batch.model.loader import Precision
from rwkv_batch.model.state import ModelShape, StateFormat
from rwkv_batch.model.step_inputs import StepInputs, step_inputs
from rwkv_batch.model.weights import Weights
from rwkv_batch.runner.graphs.capture import make_graph_stages
from rwkv_batch.runner.graphs.decode import DecodeGraphs
from rwkv_batch.runner.pipeline import Stage

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

GPU = torch.device("cuda", 0)
LAYERS, WIDTH, VOCAB, RANKS = 8, 2048, 512, (128, 128, 64, 192)
ROWS = 320
"""More rows than our kernels take at once, so that side streams work too."""
MIB = 1 << 20


def make_weights() -> Weights:
    """Return weights in host memory, like those of a file."""
    made = random_weights(LAYERS, WIDTH, VOCAB, ranks=RANKS, first_v=False, dtype=torch.float16, device=GPU)
    tensors = {name: tensor.cpu() for name, tensor in made.items()}
    return Weights(Path("random"), tensors, ModelShape(LAYERS, WIDTH, VOCAB, 4 * WIDTH, *RANKS), "")


@pytest.fixture(scope="module")
def weights() -> Weights:
    return make_weights()


def make_stage(weights: Weights) -> Stage:
    from rwkv_batch.kernels.cuda.ops import CudaOps

    half = torch.float16
    return Stage(weights, 0, LAYERS, Precision(GPU, half, half, StateFormat.FP16), CudaOps())


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Free all memory of earlier tests."""
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def stage(weights: Weights) -> Stage:
    stage = make_stage(weights)
    stage.allocate_slots(ROWS + 2)
    return stage


def decode() -> StepInputs:
    slots = list(range(2, ROWS + 2))
    return step_inputs([[i % VOCAB] for i in range(ROWS)], slots, slots, list(range(ROWS))).to(GPU)


def test_loading_takes_the_memory_of_the_weights(weights: Weights) -> None:
    make_stage(weights)  # what is there once per device: kernels, their work space
    torch.cuda.empty_cache()
    before, reserved = torch.cuda.memory_allocated(GPU), torch.cuda.memory_reserved(GPU)
    torch.cuda.reset_peak_memory_stats(GPU)
    stage = make_stage(weights)
    kept, peak = torch.cuda.memory_allocated(GPU) - before, torch.cuda.max_memory_allocated(GPU) - before
    torch.cuda.empty_cache()
    assert stage.layers
    assert kept < 1.04 * 2 * weights.num_parameters, "every weight once"
    assert peak < kept + 16 * MIB, "a slice of one at most twice"
    assert torch.cuda.memory_reserved(GPU) - reserved < kept + 48 * MIB, "no gaps"


@torch.inference_mode()
def idle_after_steps() -> tuple[dict[str, int], dict[str, int]]:
    """Return unused bytes per pool after eager and graphed steps.

    The first result has the pools of other streams, the second those of graphs.
    """
    stage = make_stage(make_weights())
    stage.allocate_slots(ROWS + 2)
    graphs = DecodeGraphs(make_graph_stages([stage], ROWS, 2), ROWS)
    inputs = decode()
    for _ in range(2):
        stage.forward(stage.embed(inputs.tokens), None, inputs)
    slots = list(range(2, ROWS + 2))
    graphs.run(list(range(ROWS)), slots, slots)
    torch.cuda.synchronize(GPU)
    main = torch.cuda.current_stream(GPU).cuda_stream
    plain: dict[str, int] = {}
    graphed: dict[str, int] = {}
    for segment in torch.cuda.memory_snapshot():
        pool, stream = str(segment["segment_pool_id"]), segment["stream"]
        found, key = (plain, str(stream)) if pool == "(0, 0)" else (graphed, f"{pool} {stream}")
        if found is graphed or stream != main:
            found[key] = found.get(key, 0) + segment["total_size"] - segment["allocated_size"]
    return plain, graphed


def test_side_streams_keep_no_memory() -> None:
    """Graphs have no pools for them either. Runs in a process: torch reuses streams."""
    with multiprocessing.get_context("spawn").Pool(1) as process:
        plain, graphed = process.apply(idle_after_steps)
    assert all(free <= 2 * MIB for free in plain.values()), plain
    assert sum(free > 2 * MIB for free in graphed.values()) == 1, graphed


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 16, ROWS])
def test_logits_are_written_to_the_given_buffer(stage: Stage, rows: int) -> None:
    slots = list(range(2, rows + 2))
    inputs = step_inputs([[i % VOCAB] for i in range(rows)], slots, slots, list(range(rows))).to(GPU)
    x = torch.randn(rows, WIDTH, device=GPU, dtype=torch.float16)
    out = torch.full((ROWS, VOCAB), 7.0, device=GPU)
    found = stage.logits(x, inputs, out)
    assert found.data_ptr() == out.data_ptr() and torch.equal(found, stage.logits(x, inputs))
    assert (out[rows:] == 7.0).all()
