"""The forward on a GPU against plain torch in fp32: every path, on poisoned memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from demo.random_weights import random_weights
from rwkv_batch.kernels.naive import NaiveOps
from rwkv_batch.model.loader import Precision
from rwkv_batch.model.state import ModelShape, StateFormat
from rwkv_batch.model.step_inputs import StepInputs, step_inputs
from rwkv_batch.model.weights import Weights
from rwkv_batch.runner.graphs.capture import make_graph_stages
from rwkv_batch.runner.graphs.decode import DecodeGraphs
from rwkv_batch.runner.links import HostCopy
from rwkv_batch.runner.pipeline import Stage

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

GPU = torch.device("cuda", 0)
SLOTS = 80
VOCAB = 512
SIZES = {
    "small": (3, 256, (64, 64, 32, 128)),
    "odd": (2, 768, (64, 64, 32, 128)),
    "wide": (2, 4096, (128, 128, 96, 480)),
}


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty returns NaN: an output that is not written is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def make_weights(size: str) -> Weights:
    layers, width, ranks = SIZES[size]
    tensors = random_weights(layers, width, VOCAB, seed=layers, ranks=ranks, first_v=False, device=GPU)
    return Weights(Path("random"), tensors, ModelShape(layers, width, VOCAB, 4 * width, *ranks), "")


@pytest.fixture(scope="module", params=list(SIZES))
def weights(request: pytest.FixtureRequest) -> Weights:
    return make_weights(request.param)


def fast_stage(weights: Weights, wkv: StateFormat = StateFormat.FP32) -> Stage:
    from rwkv_batch.kernels.cuda.ops import CudaOps

    stage = Stage(weights, 0, weights.shape.layers, Precision(GPU, torch.float16, torch.float16, wkv), CudaOps())
    stage.allocate_slots(SLOTS)
    return stage


def true_stage(weights: Weights) -> Stage:
    stage = Stage(weights, 0, weights.shape.layers, Precision(GPU, *[torch.float32] * 2, StateFormat.FP32), NaiveOps())
    stage.allocate_slots(SLOTS)
    return stage


@pytest.fixture(scope="module", params=list(StateFormat), ids=lambda form: f"{form}-state")
def stages(weights: Weights, request: pytest.FixtureRequest) -> tuple[Stage, Stage]:
    return fast_stage(weights, request.param), true_stage(weights)


@torch.inference_mode()
def forward(stage: Stage, inputs: StepInputs) -> Tensor:
    inputs = inputs.to(GPU)
    x, _ = stage.forward(stage.embed(inputs.tokens), None, inputs)
    return stage.logits(x, inputs)


def random_rows(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]


def assert_same(fast: Tensor, reference: Tensor, minimum: float = 0.9999) -> None:
    assert torch.isfinite(fast).all()
    cosine = torch.nn.functional.cosine_similarity(fast.double(), reference.double(), dim=-1)
    assert cosine.min().item() > minimum, cosine.min().item()
    error = (fast - reference).norm() / reference.norm()
    assert error.item() < 2e-2, error.item()


@pytest.mark.parametrize("lengths", [[1], [2], [17], [40, 1, 7, 33], [100, 64, 1, 1], [5] * 40, [150], [300, 12]])
def test_ragged_prefill(stages: tuple[Stage, Stage], lengths: list[int]) -> None:
    rows = random_rows(lengths, seed=1)
    slots = list(range(2, 2 + len(rows)))
    inputs = step_inputs(rows, [0] * len(rows), slots, list(range(len(rows))))
    fast, reference = (forward(stage, inputs) for stage in stages)
    assert_same(fast, reference)


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 8, 9, 16, 17, 40, 78])
def test_decode_after_prefill(stages: tuple[Stage, Stage], batch: int) -> None:
    slots = list(range(2, 2 + batch))
    prefill = step_inputs(random_rows([11] * batch), [0] * batch, slots, [])
    for stage in stages:
        forward(stage, prefill)
    for step in range(3):
        inputs = step_inputs(random_rows([1] * batch, seed=step + 1), slots, slots, list(range(batch)))
        fast, reference = (forward(stage, inputs) for stage in stages)
        assert_same(fast, reference, 0.9995 if stages[0].precision.wkv_state is StateFormat.INT8 else 0.9999)


def test_chunked_equals_whole_and_decode(stages: tuple[Stage, Stage]) -> None:
    stage = stages[0]
    (row,) = random_rows([48])
    whole = forward(stage, step_inputs([row], [0], [2], [0]))
    forward(stage, step_inputs([row[:19]], [0], [3], [0]))
    chunked = forward(stage, step_inputs([row[19:]], [3], [3], [0]))
    assert_same(chunked, whole)
    for i, token in enumerate(row):
        decoded = forward(stage, step_inputs([[token]], [4 if i else 0], [4], [0]))
    assert_same(decoded, whole, 0.999)


def test_read_and_write_slots_may_differ(stages: tuple[Stage, Stage]) -> None:
    """A row may leave its read slot untouched; only its write slot changes."""
    stage = stages[0]
    assert stage.state is not None
    rows = random_rows([9, 23])
    forward(stage, step_inputs(rows, [0, 0], [2, 3], []))
    before = stage.state.wkv.clone(), stage.state.shift.clone()
    for lengths in ([1, 1], [1, 30]):
        news = random_rows(lengths, seed=5)
        apart = forward(stage, step_inputs(news, [2, 3], [10, 11], [0, 1]))
        untouched = [slot for slot in range(SLOTS) if slot not in (10, 11)]
        assert torch.equal(stage.state.wkv[untouched], before[0][untouched])
        assert torch.equal(stage.state.shift[untouched], before[1][untouched])
        stage.state.wkv[12:14], stage.state.shift[12:14] = before[0][2:4], before[1][2:4]
        together = forward(stage, step_inputs(news, [12, 13], [12, 13], [0, 1]))
        assert torch.equal(apart, together)
        assert torch.equal(stage.state.wkv[10:12], stage.state.wkv[12:14])
        stage.state.wkv[12:14], stage.state.shift[12:14] = before[0][12:14], before[1][12:14]
    assert not stage.state.wkv[0].any() and not stage.state.shift[0].any()


def test_rows_do_not_see_each_other(stages: tuple[Stage, Stage]) -> None:
    stage = stages[0]
    row, *others = random_rows([30, 7, 50, 30])
    inputs = step_inputs([row, *others], [0] * 4, [2, 3, 4, 5], [0])
    first = forward(stage, inputs)
    changed = step_inputs([row, *random_rows([7, 50, 30], seed=9)], [0] * 4, [2, 3, 4, 5], [0])
    assert torch.equal(first, forward(stage, changed))


@pytest.mark.parametrize("batch", [1, 3, 8, 11, 30])
def test_graph_equals_eager(stages: tuple[Stage, Stage], batch: int) -> None:
    """Padded, replayed, fed back on the device: the tokens of eager steps. Padding writes only slot 1."""
    stage = stages[0]
    assert stage.state is not None
    graphs = DecodeGraphs(make_graph_stages([stage], 40, 2), 40)
    size = next(size for size in graphs.sizes if size >= batch)
    slots = list(range(2, 2 + batch))
    forward(stage, step_inputs(random_rows([6] * batch), [0] * batch, slots, []))
    wkv, shift = stage.state.wkv.clone(), stage.state.shift.clone()
    req_slots = [(7 * i) % 40 for i in range(batch)]
    tokens = [row[0] for row in random_rows([1] * batch, seed=3)]
    graphs.tokens.store(req_slots, tokens)
    sampled = [HostCopy(graphs.run(req_slots, slots, slots)) for _ in range(3)]
    graphed = [copy.read()[0].tolist() for copy in sampled]
    after = stage.state.wkv.clone()
    stage.state.wkv.copy_(wkv)
    stage.state.shift.copy_(shift)
    pad = size - batch
    for step in range(3):
        rows = [[token] for token in tokens] + [[0]] * pad
        logits = forward(stage, step_inputs(rows, slots + [0] * pad, slots + [1] * pad, list(range(batch))))
        tokens = logits.argmax(-1).tolist()
        assert tokens == graphed[step]
    others = [slot for slot in range(SLOTS) if slot != 1]
    assert torch.equal(after[others], stage.state.wkv[others])


def test_rows_may_change_between_replays(stages: tuple[Stage, Stage]) -> None:
    """Another order of the same rows gives the same tokens: they are fed back by request slot."""
    stage = stages[0]
    results = []
    for order in ([0, 1, 2], [2, 0, 1]):
        graphs = DecodeGraphs(make_graph_stages([stage], 8, 2), 8)
        forward(stage, step_inputs(random_rows([6] * 3), [0] * 3, [2, 3, 4], []))
        graphs.tokens.store([5, 6, 7], [1, 2, 3])
        graphs.run([5, 6, 7], [2, 3, 4], [2, 3, 4])
        slots = [2 + i for i in order]
        logits = graphs.run_logits([5 + i for i in order], slots, slots)
        results.append(logits[torch.tensor([order.index(i) for i in range(3)])].clone())
    assert torch.equal(results[0], results[1])
