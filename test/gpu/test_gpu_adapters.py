"""Adapters on a GPU against plain torch in fp32: every matrix, ragged steps, graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from demo import files
from rwkv_batch.kernels.cuda.linear import MAX_SKINNY_ROWS
from rwkv_batch.kernels.cuda.ops import CudaOps
from rwkv_batch.kernels.cuda.workspace import MAX_SPARSE_ROWS
from rwkv_batch.kernels.naive import NaiveOps
from rwkv_batch.model.loader import Precision
from rwkv_batch.model.low_rank import Experts, LayerPairs, Pair, Target
from rwkv_batch.model.quant.formats import Format
from rwkv_batch.model.state import StateFormat
from rwkv_batch.model.step_inputs import StepInputs, step_inputs
from rwkv_batch.model.weights import open_weights
from rwkv_batch.runner.calibration import MeasuredInputs
from rwkv_batch.runner.graphs.capture import make_graph_stages
from rwkv_batch.runner.graphs.decode import DecodeGraphs
from rwkv_batch.runner.graphs.prefill import PrefillGraphs
from rwkv_batch.runner.graphs.prefill_inputs import PrefillSize
from rwkv_batch.runner.pipeline import Stage
from test.adapter_files import random_experts, write_adapter
from test.gpu.test_gpu_forward import SLOTS, fast_stage, make_weights, true_stage
from test.harness import call, make_request, run, started_engine

GPU = torch.device("cuda", 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

RANKS = (4, 16, 40, 128, 64)
"""Ranks of the adapters, numbered from 1."""


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty returns NaN: an output that is not written is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def pairs(layers: int, width: int, rank: int, seed: int) -> dict[int, LayerPairs]:
    """Return pairs for every matrix; the third adapter has pairs for some."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[int, dict[Target, Pair]] = {}
    for i, target in product(range(layers), Target):
        if rank == RANKS[2] and (i + target) % 3 == 0:
            continue
        out, inputs = width * (4 if target is Target.FFN_KEY else 1), width * (4 if target is Target.FFN_VALUE else 1)
        a = torch.randn(rank, inputs, generator=generator) / inputs**0.5
        b = torch.randn(out, rank, generator=generator) / rank**0.5 * 0.3
        made.setdefault(i, {})[target] = Pair(a.half().float(), b.half().float())
    return {i: LayerPairs(found) for i, found in made.items()}


@pytest.fixture(scope="module", params=["small", "odd", "wide"])
def stages(request: pytest.FixtureRequest) -> tuple[Stage, Stage]:
    weights = make_weights(request.param)
    both = fast_stage(weights), true_stage(weights)
    for number, rank in enumerate(RANKS, 1):
        held = pairs(weights.shape.layers, weights.shape.width, rank, number)
        for stage in both:
            stage.adapters.put(number, held)
    return both


def ragged(lengths: list[int], numbers: list[int] | None) -> StepInputs:
    generator = torch.Generator().manual_seed(sum(lengths))
    rows = [torch.randint(512, (n,), generator=generator).tolist() for n in lengths]
    count = len(lengths)
    inputs = step_inputs(rows, [0] * count, list(range(2, 2 + count)), list(range(count)))
    if numbers is not None:
        inputs.adapters = torch.tensor(numbers).repeat_interleave(torch.tensor(lengths))
    return inputs


def logits(stage: Stage, inputs: StepInputs) -> Tensor:
    assert stage.state is not None
    stage.state.wkv.zero_(), stage.state.shift.zero_()
    here = inputs.to(GPU)
    x, _ = stage.forward(stage.embed(here.tokens), None, here)
    return stage.logits(x, here).clone()


def dealt(count: int) -> list[int]:
    """Return adapter numbers per row: none, several, in no order."""
    return [(i * 7 + i // 5) % 6 for i in range(count)]


STEPS = {
    "one row": ([1], [2]),
    "few": ([1] * 5, [0, 3, 3, 2, 0]),
    "skinny": ([1] * MAX_SKINNY_ROWS, dealt(MAX_SKINNY_ROWS)),
    "wide": ([1] * 70, dealt(70)),
    "ragged": ([5, 1, 33, 2, 1, 90, 3], [1, 0, 4, 5, 2, 3, 0]),
    "cublas": ([1] * 70 + [40] * 8, dealt(78)),
    "long": ([700, 1, 900], [1, 2, 0]),
}


@pytest.mark.parametrize("kind", STEPS)
def test_as_plain_torch(stages: tuple[Stage, Stage], kind: str) -> None:
    lengths, numbers = STEPS[kind]
    if len(lengths) > 76:
        lengths, numbers = lengths[-76:], numbers[-76:]
    fast, reference = stages
    inputs = ragged(lengths, numbers)
    expected, actual, plain = logits(reference, inputs), logits(fast, inputs), logits(fast, ragged(lengths, None))
    assert torch.isfinite(actual).all()
    for row, number in enumerate(numbers):
        error = (actual[row] - expected[row]).norm() / expected[row].norm()
        assert error < 0.03, (row, number)
        if number == 0 and len(inputs.tokens) > MAX_SPARSE_ROWS:
            assert torch.equal(actual[row], plain[row])
        elif number == 0:  # ffn.value of few rows is read as sparse as all of them together are
            assert (actual[row] - plain[row]).norm() < 1e-3 * plain[row].norm()
        else:
            assert (plain[row] - expected[row]).norm() > 0.05 * expected[row].norm()


@pytest.mark.parametrize("rows", [1, 7, 16, 40, 76])
def test_a_graph_does_the_same(stages: tuple[Stage, Stage], rows: int) -> None:
    """A replayed graph samples as the eager forward does. It is replayed with other adapters per row, and with none."""
    fast, _ = stages
    assert fast.state is not None
    graphs = DecodeGraphs(make_graph_stages([fast], 96, 2), 76, None)
    fed = torch.arange(rows) + 3
    slots = list(range(2, 2 + rows))
    for numbers in (dealt(rows), dealt(rows)[::-1], None):
        inputs = dataclasses.replace(
            step_inputs([[int(t)] for t in fed], [0] * rows, slots, list(range(rows))),
            adapters=None if numbers is None else torch.tensor(numbers),
        )
        expected = logits(fast, inputs)
        graphs.tokens.store(list(range(rows)), fed)
        actual = graphs.run_logits(list(range(rows)), [0] * rows, slots, numbers)
        error = (actual - expected).norm(dim=1) / expected.norm(dim=1)
        assert error.max() < 1e-2


@torch.inference_mode()
def test_graphs_of_prompts_add_adapters(stages: tuple[Stage, Stage]) -> None:
    """As kernel by kernel. A graph is replayed with other adapters per row, and those without keep their own graphs."""
    fast, reference = stages
    assert fast.state is not None
    graph_stages = make_graph_stages([fast], 512, 2)
    vocab = fast.head.linear.weight.shape[0] if fast.head is not None else 0
    made = torch.empty(48, vocab, dtype=torch.float32, device=GPU)
    sizes = [PrefillSize(4, 32), PrefillSize(8, 128), PrefillSize(8, 512)]
    graphs = PrefillGraphs(graph_stages, made, sizes=sizes, max_adapters=8)
    graphs.warm_up(adapters=True)
    for lengths in ([5], [20, 3], [5, 1, 33, 2, 1, 40, 3], [300, 100, 1]):
        for numbers in (dealt(len(lengths)), dealt(len(lengths) + 3)[3:], None):
            inputs = ragged(lengths, numbers)
            size = graphs.size_for(inputs)
            assert size is not None
            expected = logits(reference, inputs)
            fast.state.wkv.zero_(), fast.state.shift.zero_()
            made.fill_(torch.nan)
            actual = graphs.run(inputs, size)
            error = (actual - expected).norm(dim=1) / expected.norm(dim=1)
            assert error.max() < 0.03, (lengths, numbers)


def test_an_adapter_slot_may_be_reused(stages: tuple[Stage, Stage]) -> None:
    """When a graph runs, it uses the slot's current adapter."""
    fast, reference = stages
    graphs = DecodeGraphs(make_graph_stages([fast], 16, 2), 4, None)
    weights = len(fast.layers), fast.width
    for seed in (50, 51):
        fast.adapters.drop(9), reference.adapters.drop(9)
        held = pairs(*weights, 16, seed)
        fast.adapters.put(9, held), reference.adapters.put(9, held)
        inputs = dataclasses.replace(step_inputs([[7], [8]], [0, 0], [2, 3], [0, 1]), adapters=torch.tensor([9, 0]))
        expected = logits(reference, inputs)
        logits(fast, inputs)
        graphs.tokens.store([0, 1], [7, 8])
        actual = graphs.run_logits([0, 1], [0, 0], [2, 3], [9, 0])
        assert ((actual - expected).norm(dim=1) / expected.norm(dim=1)).max() < 0.03


def test_the_engine_serves_them_in_graphs() -> None:
    """One adapter from the start, one loaded later, and rows without; long texts are decoded by graphs."""
    tuned = files.MODEL.parent / "tuned"
    entry = f"french={tuned / 'french.safetensors'}:1"
    settings: dict[str, Any] = {"devices": ("cuda:0",), "max_running": 64, "models_dir": str(tuned)}
    prompts = {name: f"English: Thank you very much.\n\n{name}:" for name in ("French", "Spanish", "Chinese")}
    with started_engine(files.ensure_model(), served_adapters=(entry,), **settings) as engine:
        call(engine, "adapter_add", name="spanish", file="spanish.safetensors", scale=1.0)
        adapters = {"French": "french", "Spanish": "spanish"}
        rows = [make_request(prompts[name], adapter=adapters.get(name, ""), stop_ids=[261]) for name in prompts] * 12
        texts = [text.strip().decode() for text in run(engine, *rows).all_texts]
        assert call(engine, "status")["decode_graphs"] == "used"
        assert set(texts[::3]) == {"Merci beaucoup."} and set(texts[1::3]) == {"Muchas gracias."}
        without = run(engine, make_request(prompts["Chinese"], stop_ids=[261])).all_texts[0].strip().decode()
        assert set(texts[2::3]) == {without}
        call(engine, "adapter_remove", name="french")
        assert run(engine, rows[1]).all_texts[0].strip() == b"Muchas gracias."


def with_experts(layers: int, width: int, seed: int) -> dict[int, LayerPairs]:
    """Return four experts per channel mix, and a pair for att.key. Each token uses two experts."""
    generator = torch.Generator().manual_seed(seed)

    def pair(out: int, inputs: int) -> Pair:
        a = torch.randn(8, inputs, generator=generator) / inputs**0.5
        return Pair(a, torch.randn(out, 8, generator=generator) * 0.2)

    found = {}
    for i in range(layers):
        each = tuple(
            {Target.FFN_KEY: pair(4 * width, width), Target.FFN_VALUE: pair(width, 4 * width)} for _ in range(4)
        )
        router = torch.randn(3, width, generator=generator) / width**0.5 * 3
        found[i] = LayerPairs({Target.KEY: pair(width, width)}, Experts(router, each, 2))
    return found


@pytest.mark.parametrize("kind", STEPS)
def test_experts_as_plain_torch(stages: tuple[Stage, Stage], kind: str) -> None:
    """Mixtures of experts and other adapters in one step. On a near-tie a token may use another expert."""
    lengths, numbers = STEPS[kind]
    lengths, numbers = lengths[-76:], [12 if number == 2 else number for number in numbers[-76:]]
    fast, reference = stages
    for stage in stages:
        stage.adapters.drop(12)
        stage.adapters.put(12, with_experts(len(stage.layers), stage.width, 12))
    expected, actual = logits(reference, ragged(lengths, numbers)), logits(fast, ragged(lengths, numbers))
    plain = logits(fast, ragged(lengths, None))
    errors = torch.stack([(a - b).norm() / b.norm() for a, b in zip(actual, expected, strict=True)])
    routed = torch.tensor([number == 12 for number in numbers])
    assert torch.isfinite(actual).all() and errors[~routed.to(errors.device)].lt(0.03).all()
    assert errors[routed.to(errors.device)].median() < 0.05
    for row, number in enumerate(numbers):
        if number == 0 and sum(lengths) > MAX_SPARSE_ROWS:
            assert torch.equal(actual[row], plain[row])
        elif number == 12:
            assert (plain[row] - expected[row]).norm() > 0.02 * expected[row].norm()


def test_the_engine_serves_experts_while_graphs_decode(tmp_path: Path) -> None:
    """Greedy texts equal those of one row at a time. Meanwhile, graphs decode the rows without an adapter."""
    model = files.ensure_model()
    shape = open_weights(model).shape
    write_adapter(tmp_path / "experts.pth", random_experts(1, shape.layers, shape.width, scale=0.03))
    entry = f"experts={tmp_path / 'experts.pth'}:1"
    with started_engine(model, served_adapters=(entry,), devices=("cuda:0",), max_running=64) as engine:
        prompts = [f"English: I have {i} books.\n\nFrench:" for i in range(8)]
        rows = [
            make_request(text, adapter="experts" * (i % 2), max_tokens=24, ignore_eos=True)
            for i, text in enumerate(prompts)
        ]
        alone = [run(engine, row).all_texts[0] for row in rows]
        together = run(engine, *rows).all_texts
        assert call(engine, "status")["decode_graphs"] == "used"
        same = sum(a == b for a, b in zip(alone, together, strict=True))
        assert same >= 6, "two logits that nearly tie may change places with the number of rows"


@pytest.mark.parametrize("dtype", [Format.W8A8, Format.FP8, Format.INT4], ids=str)
def test_with_quantised_weights(dtype: Format) -> None:
    """Rows without an adapter keep their bits at any row count; others change as much as in plain torch."""
    weights = make_weights("wide")
    limit = 0.5 if dtype is Format.FP8 else 0.3  # of more than a few rows fp8 products round their inputs to e4m3, too
    half, full, largest = torch.float16, torch.float32, MeasuredInputs(weights, GPU)
    of_half, of_full = (Precision(GPU, type_, type_, StateFormat.FP32, dtype) for type_ in (half, full))
    fast = Stage(weights, 0, 2, of_half, CudaOps(), largest_inputs=largest)
    reference = Stage(weights, 0, 2, of_full, NaiveOps(), largest_inputs=largest)
    for stage in (fast, reference):
        stage.allocate_slots(SLOTS)
        stage.adapters.put(1, pairs(2, 4096, 16, 1))
    for rows in (12, 40, 76):
        numbers = [i % 2 for i in range(rows)]
        for lengths in ([1] * rows, [5] * rows):
            plain, actual = logits(fast, ragged(lengths, None)), logits(fast, ragged(lengths, numbers))
            assert torch.isfinite(actual).all() and torch.equal(actual[::2], plain[::2])
            added = (logits(reference, ragged(lengths, numbers)) - logits(reference, ragged(lengths, None)))[1::2]
            assert ((actual - plain)[1::2] - added).norm() < limit * added.norm()
