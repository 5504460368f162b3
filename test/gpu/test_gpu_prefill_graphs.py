"""Graphs of prompts on a GPU. Compares them with the same forwards launched kernel by kernel."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from rwkv_batch.model.step_inputs import StepInputs, step_inputs
from rwkv_batch.runner.graphs.capture import make_graph_stages
from rwkv_batch.runner.graphs.decode import DecodeGraphs
from rwkv_batch.runner.graphs.mixed import MixedGraphs, usable_mixed_sizes
from rwkv_batch.runner.graphs.prefill import PrefillGraphs
from rwkv_batch.runner.graphs.prefill_inputs import LONG_ROWS, SIZES, PrefillSize
from rwkv_batch.runner.pipeline import Stage
from state_pool.layout import DUMMY_SLOT
from test.gpu.random_stage import GPU, VOCAB, random_stage
from test.model.test_prefill_graphs import STEPS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

LAYERS = 3
SLOTS = 60


@pytest.fixture(scope="module")
def stage() -> Stage:
    return random_stage(LAYERS, SLOTS)


@pytest.fixture(scope="module")
def decode(stage: Stage) -> DecodeGraphs:
    return DecodeGraphs(make_graph_stages([stage], 48, 2), 48, logit_rows=LONG_ROWS[-1])


@pytest.fixture(scope="module")
def graphs(stage: Stage, decode: DecodeGraphs) -> PrefillGraphs:
    with patch("rwkv_batch.runner.graphs.prefill.LAYER_SECONDS", 1.0):
        graphs = PrefillGraphs(decode.graph_stages, decode.logits)
    graphs.warm_up()
    return graphs


def prompts(lengths: list[int]) -> StepInputs:
    """Return new random tokens; every second row returns logits."""
    rows = [torch.randint(VOCAB, (length,)).tolist() for length in lengths]
    slots = torch.randperm(SLOTS - 2)[: len(rows)].add(2).tolist()
    return step_inputs(rows, [slot if slot % 3 else 0 for slot in slots], slots, list(range(0, len(rows), 2)))


def randomise(stage: Stage) -> None:
    assert stage.state is not None
    stage.state.wkv.normal_()
    stage.state.shift.normal_()
    stage.state.wkv[0] = 0
    stage.state.shift[0] = 0


def assert_near(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert (actual.float() - expected.float()).norm() / expected.float().norm() < 2e-3


def assert_likeliest(tokens: list[int], logits: Tensor) -> None:
    """The tokens have the largest of the logits [R, V], up to rounding: kernels of other sizes add in another order."""
    chosen = logits.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1)).squeeze(1)
    assert (logits.amax(1) - chosen).max() <= 0.01 * logits.std()


@torch.inference_mode()
@pytest.mark.parametrize("lengths", STEPS, ids=str)
def test_graphs_equal_eager_launches(
    stage: Stage, decode: DecodeGraphs, graphs: PrefillGraphs, lengths: list[int]
) -> None:
    assert stage.state is not None
    state = stage.state
    for _ in range(2):
        randomise(stage)
        inputs = prompts(lengths)
        size = graphs.size_for(inputs)
        assert size is not None
        before = state.wkv.clone(), state.shift.clone()
        here = inputs.to(GPU)
        here.max_seqlen = max(here.max_seqlen, 2)  # graphs read single tokens as prompts too
        x, _ = stage.forward(stage.embed(here.tokens), None, here)
        expected = stage.logits(x, here), state.wkv.clone(), state.shift.clone()
        state.wkv.copy_(before[0])
        state.shift.copy_(before[1])
        decode.logits.fill_(torch.nan)
        actual = graphs.run(inputs, size)
        assert_near(actual, expected[0])
        written = inputs.write_slots
        others = [i for i in range(SLOTS) if i != DUMMY_SLOT and i not in written.tolist()]
        for now, then, was in zip((state.wkv, state.shift), expected[1:], before, strict=True):
            for slot in written:
                assert_near(now[slot], then[slot])
            assert torch.equal(now[others], was[others]), "slots that are not written stay"


@torch.inference_mode()
def test_between_decode_steps(stage: Stage, decode: DecodeGraphs, graphs: PrefillGraphs) -> None:
    """Both kinds use the same work space; only the states pass from one to the other."""
    assert stage.state is not None
    randomise(stage)
    req_slots, slots = [0, 1, 2], [40, 41, 42]
    kept = stage.state.wkv[slots].clone(), stage.state.shift[slots].clone()
    decode.tokens.store(req_slots, [5, 6, 7])
    expected = [decode.run(req_slots, slots, slots).tolist() for _ in range(4)]
    stage.state.wkv[slots], stage.state.shift[slots] = kept
    decode.tokens.store(req_slots, [5, 6, 7])
    actual = []
    for lengths in ([9], [3, 3], [900], [5] * 16):
        inputs = step_inputs([[1] * n for n in lengths], [0] * len(lengths), list(range(2, 2 + len(lengths))), [0])
        size = graphs.size_for(inputs)
        assert size is not None
        graphs.run(inputs, size)
        actual.append(decode.run(req_slots, slots, slots).tolist())
    assert actual == expected


def test_steps_without_a_graph(graphs: PrefillGraphs, stage: Stage, decode: DecodeGraphs) -> None:
    most = max(size.tokens for size in graphs.sizes)
    assert graphs.size_for(prompts([most])) is not None and graphs.size_for(prompts([most + 1])) is None
    assert graphs.size_for(prompts([9]).to(GPU)) is None, "tokens that only the device knows"
    few = PrefillGraphs(decode.graph_stages, decode.logits[:4])
    assert {size.rows for size in few.sizes} == {1, 4} and set(few.sizes) < set(SIZES)
    assert few.size_for(prompts([1] * 5)) is None, "the logits have room for four rows"


@torch.inference_mode()
def test_long_graphs_go(stage: Stage, decode: DecodeGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host launches a step as fast as they run, and padding costs more."""
    monkeypatch.setattr("rwkv_batch.runner.graphs.prefill.LAYER_SECONDS", 0.0)
    graphs = PrefillGraphs(decode.graph_stages, decode.logits, sizes=[PrefillSize(1, 16), PrefillSize(1, 512)])
    graphs.warm_up()
    assert graphs.size_for(prompts([9])) == (1, 16) and graphs.size_for(prompts([200])) is None
    assert {size for _, size, _ in graphs._captured} == {(1, 16)}


@pytest.mark.parametrize(
    ("decoding", "lengths"), [(1, [20]), (8, [5, 11]), (13, [1, 30, 7]), (40, [90]), (48, [3] * 16)]
)
def test_decoding_rows_and_prompts_in_one_graph(stage: Stage, decoding: int, lengths: list[int]) -> None:
    """Equal to the two parts run separately; fresh prompts and states, unread slots poisoned."""
    graphs = DecodeGraphs(make_graph_stages([stage], 400, 2), 48, logit_rows=80)
    mixed = MixedGraphs(graphs, usable_mixed_sizes(48))
    size = mixed.size_for(decoding, len(lengths), sum(lengths))
    assert size is not None and stage.state is not None
    randomise(stage)
    slots = torch.randperm(SLOTS - 2)[: decoding + len(lengths)].add(2).tolist()
    mine, theirs = slots[:decoding], slots[decoding:]
    tokens = torch.randint(VOCAB, (decoding,)).tolist()
    rows = [torch.randint(VOCAB, (length,)).tolist() for length in lengths]
    samples = [i for i in range(len(lengths)) if i != 1]
    wkv, shift = stage.state.wkv.clone(), stage.state.shift.clone()
    one = stage.logits(*apart(stage, step_inputs([[t] for t in tokens], mine, mine, list(range(decoding))))).clone()
    other = stage.logits(*apart(stage, step_inputs(rows, [0] * len(rows), theirs, samples)))
    expected = stage.state.wkv.clone()
    stage.state.wkv.copy_(wkv), stage.state.shift.copy_(shift)
    req_slots = list(range(48))
    graphs.tokens.store(req_slots[:decoding], tokens)
    graphs.logits.fill_(float("nan"))
    prompt_req_slots = [req_slots[-1 - i] for i in samples]
    prompts_ = step_inputs(rows, [0] * len(rows), theirs, samples)
    named = {"req_slots": req_slots[:decoding], "read_slots": mine, "write_slots": mine}
    if decoding + len(samples) <= 48:
        sampled_tokens = mixed.run(size, named, prompts_, prompt_req_slots).tolist()
        assert_likeliest(sampled_tokens[:decoding] + sampled_tokens[size.decoding :], torch.cat([one, other]))
        assert graphs.tokens.sampled_tokens[req_slots[:decoding]].tolist() == sampled_tokens[:decoding]
        torch.testing.assert_close(stage.state.wkv[slots].float(), expected[slots].float(), rtol=0.02, atol=0.02)
        untouched = [slot for slot in range(2, SLOTS) if slot not in slots]
        assert torch.equal(stage.state.wkv[untouched], wkv[untouched])


def apart(stage: Stage, inputs: StepInputs) -> tuple[torch.Tensor, StepInputs]:
    """Run the eager forward of one part."""
    here = inputs.to(GPU)
    x, _ = stage.forward(stage.embed(here.tokens), None, here)
    return x, here
