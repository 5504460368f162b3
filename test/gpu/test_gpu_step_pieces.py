"""Decode steps launched in pieces on a GPU equal whole steps. Prefill runs between the pieces."""

from __future__ import annotations

import pytest
import torch

from demo.files import ensure_model
from rwkv_batch.engine import Engine
from rwkv_batch.model.step_inputs import StepInputs, step_inputs
from rwkv_batch.runner.graphs import pieces as step_pieces
from rwkv_batch.runner.graphs.capture import make_graph_stages
from rwkv_batch.runner.graphs.decode import DecodeGraphs
from rwkv_batch.runner.graphs.prefill import PrefillGraphs, PromptPieces
from rwkv_batch.runner.pipeline import Stage
from test.gpu.random_stage import GPU, VOCAB, random_stage
from test.harness import eventually_holds, make_request, run, started_engine, submit
from test.model.test_prefill_graphs import staged

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

LAYERS = 5
SLOTS, ROWS = 80, 48


@pytest.fixture(autouse=True)
def two_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that waits for a test must not raise how many pieces are queued: these tests count the others."""
    monkeypatch.setattr(step_pieces, "MAX_QUEUED", step_pieces.MIN_QUEUED)


@pytest.fixture(scope="module")
def stage() -> Stage:
    return random_stage(LAYERS, SLOTS)


@pytest.mark.parametrize("rows", [16, 33, ROWS])
def test_pieces_sample_the_tokens_of_the_whole_step(stage: Stage, rows: int) -> None:
    """The prompt between two pieces writes its own slots, logits and tokens."""
    assert stage.state is not None
    graphs = DecodeGraphs(make_graph_stages([stage], 512, 2), ROWS, piece_layers=2)
    prompts = PrefillGraphs(graphs.graph_stages, graphs.logits)
    state, slots, req_slots = stage.state, list(range(2, 2 + rows)), list(range(rows))
    state.wkv.normal_(std=0.1)
    state.shift.normal_()
    state.wkv[0] = state.shift[0] = 0
    before = state.wkv.clone(), state.shift.clone()
    graphs.tokens.sampled_tokens[:rows] = torch.randint(VOCAB, (rows,), device=GPU)
    fed = graphs.tokens.sampled_tokens.clone()
    expected, wanted_logits = graphs.run(req_slots, slots, slots).clone(), graphs.logits[:rows].clone()
    after = state.wkv[2 : 2 + rows].clone(), state.shift[2 : 2 + rows].clone()
    calls: list[int] = []

    def between() -> None:
        calls.append(1)
        inputs = step_inputs([[7] * 20, [9] * 5], [0, 0], [70, 71], [0, 1])
        size = prompts.size_for(inputs)
        assert size is not None
        with torch.inference_mode():
            logits = prompts.run(inputs, size)
            graphs.tokens.store([ROWS - 1], logits[:1].argmax(-1)) if rows < ROWS else None

    for _ in range(2):
        state.wkv.copy_(before[0])
        state.shift.copy_(before[1])
        graphs.tokens.sampled_tokens.copy_(fed)
        calls.clear()
        sampled_tokens = graphs.run(req_slots, slots, slots, between=between).clone()
        torch.cuda.synchronize()
        assert len(calls) == 2, "three pieces of five layers"
        assert (graphs.logits[:rows] - wanted_logits).norm() / wanted_logits.norm() < 2e-3
        assert torch.equal(graphs.tokens.sampled_tokens[:rows], sampled_tokens)
        assert (sampled_tokens == expected).float().mean() > 0.9
        for actual, one in zip((state.wkv, state.shift), after, strict=True):
            assert (actual[2 : 2 + rows].float() - one.float()).norm() / one.float().norm() < 2e-3
        graphs.run(req_slots, slots, slots)  # whole steps and pieces take turns


def test_steps_of_few_rows_are_whole(stage: Stage) -> None:
    graphs = DecodeGraphs(make_graph_stages([stage], 512, 2), ROWS, piece_layers=2)

    def between() -> None:
        raise AssertionError("nothing is let in")

    graphs.run(list(range(8)), list(range(2, 10)), list(range(2, 10)), between=between)
    torch.cuda.synchronize()


def test_prefill_in_pieces_equals_whole_prefill(stage: Stage) -> None:
    """The prompt between two pieces writes its own slots; the pieces of a decode step follow."""
    assert stage.state is not None
    graphs = DecodeGraphs(make_graph_stages([stage], 512, 2), ROWS, piece_layers=2)
    assert graphs.pieces is not None
    prompts = PrefillGraphs(graphs.graph_stages, graphs.logits)
    state = stage.state
    state.wkv[0] = state.shift[0] = 0
    inputs = step_inputs([[3] * 400, [5] * 300], [0, 0], [2, 3], [0, 1])
    here = inputs.to(GPU)
    with torch.inference_mode():
        expected, _ = stage.forward(stage.embed(here.tokens), None, here)
    states = state.wkv[2:4].clone()
    calls: list[int] = []

    def between() -> None:
        calls.append(1)
        other = step_inputs([[7] * 20], [0], [70], [0])
        size = prompts.size_for(other)
        assert size is not None
        with torch.inference_mode():
            prompts.run(other, size)

    for _ in range(2):
        calls.clear()
        state.wkv[2:4] = 0
        x, _ = graphs.pieces.run_layers(inputs, between)
        torch.cuda.synchronize()
        assert len(calls) == LAYERS - 1, "700 tokens: pieces of one layer"
        assert (x - expected).norm() / expected.norm() < 2e-3
        assert (state.wkv[2:4].float() - states.float()).norm() / states.float().norm() < 2e-3
        graphs.run(list(range(ROWS)), list(range(4, 4 + ROWS)), list(range(4, 4 + ROWS)), between=lambda: None)
    torch.cuda.synchronize()


@pytest.mark.parametrize("lengths", [[5, 60], [26] * 18, [480], [9] * 30])
@torch.inference_mode()
def test_prefill_graphs_in_pieces_equal_the_eager_steps(stage: Stage, lengths: list[int]) -> None:
    """To the bit, padding included. The prompt between two pieces writes its own slots; a decode step follows."""
    assert stage.state is not None
    graphs = DecodeGraphs(make_graph_stages([stage], 512, 2), ROWS, piece_layers=2)
    assert graphs.pieces is not None
    prompts, pieces = PrefillGraphs(graphs.graph_stages, graphs.logits), PromptPieces(graphs.pieces, graphs.logits)
    state, rows = stage.state, len(lengths)
    slots = list(range(2, 2 + rows))
    decoding = list(range(2 + rows, 2 + rows + 16))
    calls: list[int] = []

    def between() -> None:
        calls.append(1)
        other = step_inputs([[7] * 20, [9] * 5], [0, 0], [70, 71], [0, 1])
        size = prompts.size_for(other)
        assert size is not None
        with torch.inference_mode():
            prompts.run(other, size)

    for _ in range(2):
        state.wkv.normal_(std=0.1)
        state.shift.normal_()
        state.wkv[0] = state.shift[0] = 0
        before = state.wkv.clone(), state.shift.clone()
        ids = [torch.randint(VOCAB, (length,)).tolist() for length in lengths]
        inputs = step_inputs(ids, [slot if slot % 3 else 0 for slot in slots], slots, list(range(0, rows, 2)))
        size = pieces.size_for(inputs)
        assert size is not None
        here = StepInputs(**staged(inputs, size), max_seqlen=size.tokens).to(GPU)
        x, v_first = stage.embed(here.tokens), None
        for part in graphs.pieces.parts:
            x, v_first = stage.run_part(part, x, v_first, here)
        expected = stage.logits(x, here)[: len(inputs.logit_tokens)].clone()
        after = state.wkv[slots].clone(), state.shift[slots].clone()
        state.wkv.copy_(before[0])
        state.shift.copy_(before[1])
        graphs.logits.fill_(torch.nan)
        calls.clear()
        actual = pieces.run(inputs, size, between).clone()
        graphs.run(list(range(16)), decoding, decoding, between=between)
        torch.cuda.synchronize()
        assert len(calls) == 4, "twice between three pieces of five layers"
        assert torch.equal(actual, expected)
        for now, then, was in zip((state.wkv, state.shift), after, before, strict=True):
            assert torch.equal(now[slots], then)
            others = [slot for slot in range(2, SLOTS) if slot not in (*slots, *decoding, 70, 71)]
            assert torch.equal(now[others], was[others]), "slots that are not written stay"


def questions(rows: int) -> list[str]:
    return [f"English: He has {number} apples and a dog.\n\nChinese:" for number in range(rows)]


def test_interactive_rows_during_a_batch_give_the_text_of_one_row() -> None:
    rows = [make_request(text, max_tokens=24, stop_ids=[261]) for text in questions(40)]
    with started_engine(
        ensure_model(), devices=("cuda:0",), max_running=256, batch_step_layers=2, samplers=("rapid",)
    ) as engine:
        assert engine.model_runner.has_pieces
        alone = [run(engine, row).all_texts[0] for row in rows]
        batch = submit(engine, *(make_request(text, max_tokens=8000, ignore_eos=True) for text in questions(200)))
        assert eventually_holds(engine, lambda: engine.scheduler.running_rows == 200)
        within = _count_let_in(engine)
        other_rows = [run(engine, row).all_texts[0] for row in rows]
        assert within, "none of them came within a step"
        assert sum(one == other for one, other in zip(alone, other_rows, strict=True)) >= 36
        assert engine.scheduler.running_rows == 200
        engine.cancel(batch.job.job_id)
        batch.wait()


def test_batch_prompts_read_during_interactive_rows_give_the_text_of_one_row() -> None:
    rows = [make_request(text, max_tokens=24, stop_ids=[261]) for text in questions(200)]
    with started_engine(
        ensure_model(), devices=("cuda:0",), max_running=96, batch_step_layers=2, samplers=("rapid",)
    ) as engine:
        alone = run(engine, *rows).all_texts
        pieces, read = engine.model_runner.graphs.prompt_pieces, []
        assert pieces is not None
        plain = pieces.run
        pieces.run = lambda *given: read.append(1) or plain(*given)  # type: ignore[func-returns-value, method-assign]
        chat = make_request("English: A cat.\n\nChinese:", max_tokens=2)
        run(engine, chat)
        batch = submit(engine, *rows)
        while not batch.done.is_set():
            run(engine, chat)
        assert read, "no prompts were read in pieces"
        same = sum(one == other for one, other in zip(alone, batch.all_texts, strict=True))
        assert same >= 180, same


def _count_let_in(engine: Engine) -> list[int]:
    within: list[int] = []
    launch = engine._interleaver._launch
    engine._interleaver._launch = lambda rows: within.append(len(rows)) or launch(rows)  # type: ignore[func-returns-value]
    return within
