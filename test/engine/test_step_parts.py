"""Steps in two parts, as on a GPU: a graph for rows that decode, and a forward for rows that read.

The graph is a fake.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rwkv_batch.core.scheduler import ScheduledRow
from rwkv_batch.core.sequence import Phase
from rwkv_batch.core.shares import MAX_ROWS_IN_PIECES, MAX_TOKENS_IN_PIECES
from rwkv_batch.engine import Engine
from rwkv_batch.errors import ErrorKind
from rwkv_batch.model.adapter_table import AdapterTable
from rwkv_batch.model.step_inputs import StepInputs, step_inputs
from rwkv_batch.request import GenerateRequest, Priority, PromptLogprobs
from rwkv_batch.runner.graphs.capture import CaptureError
from rwkv_batch.runner.links import LastTokens
from rwkv_batch.runner.model_runner import ModelRunner
from rwkv_batch.runner.step_sampling import InFlightStep, Step
from sampling.grammar.constraint import Constraint, Form
from sampling.params import SamplingParams
from state_pool.config import PoolConfig
from test.adapter_files import random_experts, write_adapter
from test.harness import (
    RunningJob,
    call,
    free_slots,
    make_request,
    paused_engine,
    run,
    started_engine,
    submit,
    tiny_model,
    turn,
)
from test.serving import wait_for
from test.state_files import random_state, write_state

pytestmark = pytest.mark.slow

BOTH = [("poet", 1.0), ("", 1.0)]
"""A mixture of two states."""


class FakeGraphs:
    """Replaces `DecodeGraphs` without a GPU: one step over rows that read their last sampled token.

    Every launch overwrites its logits, as on a GPU.
    """

    def __init__(self, model_runner: ModelRunner) -> None:
        self._model_runner = model_runner
        model_runner._tokens = LastTokens(
            model_runner.limits.num_req_slots, model_runner.device, model_runner.device, model_runner.steps_in_flight
        )
        model_runner.drafts._last_tokens = model_runner._tokens
        model_runner.drafts.are_logits_shared = True
        self.graph_stages: list[Any] = []
        self.pieces: PromptPieces | None = None
        """pieces per step; decode steps have one between every two of them"""
        self.max_rows = model_runner.limits.rows_in_step
        self.logits = model_runner._logits = torch.empty(2 * self.max_rows, model_runner.vocab)
        self.steps: list[int] = []
        """rows of each step"""
        self.fails = False

    def run_logits(
        self,
        req_slots: Sequence[int],
        read_slots: Sequence[int],
        write_slots: Sequence[int],
        adapters: Sequence[int] | None = None,
        between: Callable[[], None] | None = None,
    ) -> Tensor:
        if between is not None:
            assert self.pieces is not None, "this step has no pieces"
            between()
        if self.fails:
            raise CaptureError("a decode graph could not be captured: OutOfMemoryError")
        assert 0 < len(req_slots) <= self.max_rows and adapters is None
        self.steps.append(len(req_slots))
        tokens = self._model_runner._tokens.input_tokens[list(req_slots)].tolist()
        rows = list(range(len(req_slots)))
        inputs = step_inputs([[token] for token in tokens], list(read_slots), list(write_slots), rows)
        return self._model_runner.pipeline.forward(inputs, self.logits)

    def run(
        self,
        req_slots: Sequence[int],
        read_slots: Sequence[int],
        write_slots: Sequence[int],
        deferred: Sequence[int] = (),
        adapters: Sequence[int] | None = None,
        between: Callable[[], None] | None = None,
    ) -> Tensor:
        logits = self.run_logits(req_slots, read_slots, write_slots, adapters, between)
        rows = [row for row in range(len(req_slots)) if row not in deferred]
        tokens = torch.zeros(len(req_slots), dtype=torch.int64)
        tokens[rows] = (
            self._model_runner.step_sampler.sampler("").sample(logits[rows], [req_slots[row] for row in rows]).token_ids
        )
        sampled_tokens = [req_slots[row] for row in rows]
        self._model_runner._tokens.sampled_tokens[sampled_tokens] = tokens[rows]
        return tokens


class PromptPieces:
    """Replaces `runner.PromptPieces` without a GPU: calls its callback before it computes the step."""

    def __init__(self, model_runner: ModelRunner) -> None:
        self._model_runner = model_runner
        self.steps: list[tuple[int, int]] = []
        """rows and tokens of each step"""

    def size_for(self, inputs: StepInputs) -> int:
        return len(inputs.tokens)

    def run(self, inputs: StepInputs, size: int, between: Callable[[], None]) -> Tensor:
        self.steps.append((len(inputs.read_slots), size))
        between()
        return self._model_runner.pipeline.forward(inputs)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_state(folder / "poet.pth", random_state(1, width=64))
    return tiny_model(folder)


def poet(model: Path) -> tuple[str, ...]:
    return (f"poet={model.parent / 'poet.pth'}",)


@pytest.fixture(scope="module")
def whole(model: Path) -> Iterator[Engine]:
    """An engine with one part per step. Its answers are the reference."""
    with started_engine(model, states=poet(model)) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected_mixture(whole: Engine) -> list[bytes]:
    return run(whole, *mixed_requests()).all_texts


@pytest.fixture(params=["plain", "overlapped"])
def engine(model: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    pool = PoolConfig(state_db="", l1_sessions=4, l2_sessions=4)
    overlaps = request.param == "overlapped"
    with started_engine(model, pool, overlap_on_cpu=overlaps, states=poet(model)) as engine:
        engine.model_runner.graphs.decode = FakeGraphs(engine.model_runner)  # type: ignore[assignment]
        yield engine


def graphs(engine: Engine) -> FakeGraphs:
    found = engine.model_runner.graphs.decode
    assert isinstance(found, FakeGraphs)
    return found


def mixed_requests() -> list[GenerateRequest]:
    """Return rows of many lengths and kinds. Some have log-probabilities, some have shared prompts."""
    rows = [
        make_request("x" * (1 + 7 * i % 90), max_tokens=1 + i % 30, sampling=SamplingParams(seed=i, top_k=20))
        for i in range(90)
    ]
    rows += [
        make_request("logprobs", sampling=SamplingParams(temperature=0.0, top_logprobs=2)),
        make_request("many", n=5),
    ]
    return rows


def submit_bulk(engine: Engine, max_tokens: int) -> list[RunningJob]:
    """20 interactive rows that decode. Batch rows would skip steps during prefill."""
    jobs = [submit(engine, *[make_request("bulk", max_tokens=max_tokens, ignore_eos=True)] * 5) for _ in range(4)]
    assert all(job.answered.wait(60) for job in jobs)
    return jobs


def cancel(engine: Engine, jobs: list[RunningJob]) -> None:
    for job in jobs:
        engine.cancel(job.job.job_id)
        job.wait()


def test_two_parts_sample_the_same_tokens_as_one(expected_mixture: list[bytes], engine: Engine) -> None:
    assert run(engine, *mixed_requests()).all_texts == expected_mixture
    assert graphs(engine).steps


def test_constrained_rows_sample_outside_the_graph(
    whole: Engine, expected_mixture: list[bytes], engine: Engine
) -> None:
    """Together with rows that the graph samples for, and alone."""
    words = Constraint(form=Form.CHOICE, source='["yes, certainly", "no, never at all", "perhaps tomorrow"]')
    digits = Constraint(form=Form.REGEX, source="[0-9]{8}")
    held = [
        make_request(f"x{i}", constraint=words if i % 2 else digits, sampling=SamplingParams(seed=i, top_k=20))
        for i in range(9)
    ]
    alone = run(whole, *held).all_texts
    assert run(engine, *mixed_requests(), *held).all_texts == [*expected_mixture, *alone]
    assert run(engine, *held).all_texts == alone


def test_rows_decode_by_graph_while_prompts_are_read(engine: Engine) -> None:
    bulk = submit_bulk(engine, max_tokens=10**6)
    wait_for(lambda: graphs(engine).steps[-1:] == [20], 30, "all of them decode")
    graphs(engine).steps.clear()
    run(engine, make_request("a long prompt " * 60, max_tokens=3))
    assert graphs(engine).steps[:4] == [20] * 4, "the prompt's chunks do not stop the decoding rows"
    cancel(engine, bulk)


def test_prefill_runs_before_decoding_rows(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a new row's first token precedes the others' next tokens."""
    launch, parts = engine.model_runner.launch, []

    def launching(rows: list[ScheduledRow], *after: Any) -> InFlightStep:
        parts.append("read" if rows[0].num_tokens > 1 else "decode")
        return launch(rows, *after)

    monkeypatch.setattr(engine.model_runner, "launch", launching)
    bulk = submit_bulk(engine, max_tokens=10**6)
    run(engine, make_request("a long prompt " * 60, max_tokens=3))
    cancel(engine, bulk)
    first = parts.index("decode")
    assert "read" in parts[first:]
    assert all(parts[i + 1] == "decode" for i in range(first, len(parts) - 1) if parts[i] == "read")


def test_mixtures_too_large_for_a_graph_decode_during_prefill(whole: Engine, engine: Engine) -> None:
    graphs(engine).max_rows = 8
    plain = [make_request(f"plain {i}", max_tokens=60, ignore_eos=True) for i in range(4)]
    mixed = [make_request(f"mixed {i}", mixture=BOTH, max_tokens=60, ignore_eos=True) for i in range(3)]
    late = make_request("it comes later", mixture=BOTH, max_tokens=4, ignore_eos=True)
    expected = [run(whole, *rows).all_texts for rows in (plain, mixed, [late])]
    jobs = [submit(engine, *plain), submit(engine, *mixed)]
    assert all(job.answered.wait(60) for job in jobs)
    jobs.append(submit(engine, late))
    assert [job.wait().all_texts for job in jobs] == expected


def test_logits_waiting_for_a_mask_belong_to_their_rows(whole: Engine, engine: Engine) -> None:
    """A constrained row waits for its last token.

    Meanwhile, prompts of mixtures, long prompts and scored prompts are read.
    """
    form = Constraint(form=Form.REGEX, source="[a-z0-9]{80}")
    held = [
        make_request(f"x{i}", constraint=form, max_tokens=90, sampling=SamplingParams(seed=i, top_k=50))
        for i in range(3)
    ]
    late = [make_request(f"one more {i}", mixture=BOTH, max_tokens=3, ignore_eos=True) for i in range(6)]
    late += [
        make_request("how likely is this text " * 4, max_tokens=2, prompt_logprobs=PromptLogprobs()) for _ in range(2)
    ]
    expected = run(whole, *held).all_texts
    job = submit(engine, *held)
    assert job.answered.wait(60)
    for row in late:
        assert run(engine, row).finishes[0].error is None
    assert job.wait().all_texts == expected


def test_rows_that_no_graph_supports_run_separately(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with an expert adapter, some of them constrained, and mixtures. A graph runs the other rows."""
    monkeypatch.setattr(AdapterTable, "is_routed", lambda _table, number: number == 1)
    write_adapter(model.parent / "experts.pth", random_experts(3, layers=3, width=64))
    own: Any = {"served_adapters": (f"experts={model.parent / 'experts.pth'}:2.0",), "states": poet(model)}
    form = Constraint(form=Form.REGEX, source="[a-z0-9]{30}")
    rows = [make_request(f"plain {i}", max_tokens=25, ignore_eos=True) for i in range(4)]
    rows += [make_request(f"routed {i}", adapter="experts", max_tokens=25, ignore_eos=True) for i in range(3)]
    rows += [
        make_request(f"held {i}", adapter="experts", constraint=form, sampling=SamplingParams(seed=i)) for i in range(2)
    ]
    rows += [
        make_request("held as well", constraint=form),
        make_request("both", mixture=BOTH, adapter="experts", max_tokens=9),
    ]
    rows += [make_request("how likely", adapter="experts", max_tokens=2, prompt_logprobs=PromptLogprobs())]
    with started_engine(model, **own) as whole:
        expected, without = (
            run(whole, *rows).all_texts,
            run(whole, make_request("routed 0", max_tokens=25, ignore_eos=True)),
        )
    assert expected[4] != without.all_texts[0]
    with started_engine(model, overlap_on_cpu=True, **own) as engine:
        engine.model_runner.graphs.decode = FakeGraphs(engine.model_runner)  # type: ignore[assignment]
        assert run(engine, *rows).all_texts == expected
        assert max(graphs(engine).steps) == 5, "the rows without an adapter"


def test_jump_forward_text_of_any_length_is_read(model: Path, whole: Engine) -> None:
    """Chunks of four tokens leave some runs with one token. This token is not in the row's request slot."""
    forms = [Constraint(form=Form.REGEX, source="[a-z]" + "-certain" * n + "[0-9]{6}") for n in range(1, 9)]
    rows = [
        make_request("x", constraint=form, max_tokens=60, sampling=SamplingParams(seed=3, top_k=50)) for form in forms
    ]
    expected = [run(whole, row).all_texts for row in rows]
    for overlaps in (False, True):
        with started_engine(model, prefill_chunk=4, overlap_on_cpu=overlaps) as engine:
            engine.model_runner.graphs.decode = FakeGraphs(engine.model_runner)  # type: ignore[assignment]
            assert [run(engine, row).all_texts for row in rows] == expected
            assert engine.jobs.jump_forward.num_tokens > 0


def test_sessions_continue(model: Path, engine: Engine) -> None:
    with started_engine(model, PoolConfig(state_db="", l1_sessions=4, l2_sessions=4)) as whole:
        expected = [run(whole, turn(f"s{i % 5}", f"\n\nUser: {i}", max_tokens=9)).all_texts for i in range(15)]
    background = submit(engine, *[make_request("bulk", max_tokens=300, ignore_eos=True)] * 10)
    assert [run(engine, turn(f"s{i % 5}", f"\n\nUser: {i}", max_tokens=9)).all_texts for i in range(15)] == expected
    engine.cancel(background.job.job_id)
    background.wait()


def test_a_failed_graph_capture_is_not_fatal(expected_mixture: list[bytes], engine: Engine) -> None:
    graphs(engine).fails = True
    assert run(engine, *mixed_requests()).all_texts == expected_mixture
    assert "could not be captured" in call(engine, "status")["decode_graphs"]


def test_prompts_of_a_batch_are_read_in_pieces_by_graphs_while_interactive_requests_come(
    expected_mixture: list[bytes], whole: Engine, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows give the same text as alone, with any overtaking prefill."""
    chat = make_request("x" * 200, max_tokens=3)
    expected = run(whole, chat).all_texts
    model_runner = engine.model_runner
    pieces = graphs(engine).pieces = model_runner.graphs.prompt_pieces = PromptPieces(model_runner)  # type: ignore[assignment]
    monkeypatch.setattr(engine.scheduler._batch_throttle, "_has_pieces", True)
    interleaved, launch = [], engine._interleaver._launch
    engine._interleaver._launch = lambda rows: interleaved.append(len(rows)) or launch(rows)  # type: ignore[func-returns-value]
    run(engine, chat)
    for _ in range(20):  # on a busy machine, every chat may arrive between steps
        bulk = submit(engine, *mixed_requests())
        while not bulk.done.is_set():
            assert run(engine, chat).all_texts == expected
        assert bulk.all_texts == expected_mixture
        if interleaved:
            break
    assert isinstance(pieces, PromptPieces) and pieces.steps and interleaved
    rows, tokens = (max(sizes) for sizes in zip(*pieces.steps, strict=True))
    assert rows <= MAX_ROWS_IN_PIECES + 1 and tokens <= MAX_TOKENS_IN_PIECES + 200, (
        "and an interactive prompt, one step in four"
    )


def test_a_failed_capture_of_prompt_pieces_is_not_fatal(
    expected_mixture: list[bytes], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that decode keep their graphs."""

    def run_pieces(*_: Any) -> Tensor:
        raise CaptureError("a piece could not be captured: OutOfMemoryError")

    model_runner = engine.model_runner
    pieces = model_runner.graphs.prompt_pieces = PromptPieces(model_runner)  # type: ignore[assignment]
    monkeypatch.setattr(pieces, "run", run_pieces)
    run_layers = model_runner.pipeline.run_layers
    graphs(engine).pieces = SimpleNamespace(run_layers=lambda inputs, between: (between(), run_layers(inputs))[1])  # type: ignore[assignment]
    monkeypatch.setattr(engine.scheduler._batch_throttle, "_has_pieces", True)
    run(engine, make_request("x", max_tokens=2))
    assert run(engine, *mixed_requests()).all_texts == expected_mixture
    assert model_runner.graphs.prompt_pieces is None and model_runner.graphs.decode is not None


def test_overtaking_prefill_preserves_logits_that_wait_for_a_mask(model: Path, whole: Engine) -> None:
    """It arrives when the first part of a step is read. Rows of the next step then wait for the second part."""
    form = Constraint(form=Form.REGEX, source="[a-z0-9]{80}")
    held = [
        make_request(f"x{i}", constraint=form, max_tokens=90, sampling=SamplingParams(seed=i, top_k=50))
        for i in range(3)
    ]
    expected = run(whole, *held).all_texts
    chats = [[make_request(f"{k} and {i} are numbers", max_tokens=2) for i in range(4)] for k in range(4)]
    bulk = [make_request("bulk " * (1 + i % 5), max_tokens=60, ignore_eos=True) for i in range(6)]
    prompts = [make_request(f"read {k} " * 600, max_tokens=2) for k in range(12)]
    with started_engine(model, overlap_on_cpu=True, max_running=96) as engine:
        model_runner = engine.model_runner
        model_runner.graphs.decode = FakeGraphs(model_runner)  # type: ignore[assignment]
        graphs(engine).pieces = model_runner.graphs.prompt_pieces = PromptPieces(model_runner)  # type: ignore[assignment]
        engine.scheduler._batch_throttle._has_pieces = True
        run(engine, chats[0][0])
        jobs: list[RunningJob] = []
        conclude, read = engine._process_outputs, model_runner.read
        concluded: list[Step] = []

        def remembering(step: Step, *look: Any) -> None:
            concluded.append(step)
            conclude(step, *look)
            concluded.pop()

        def reading(part: InFlightStep) -> Any:
            sampled_tokens = read(part)
            parts = concluded[-1].parts if concluded else []
            at = next((number for number, other in enumerate(parts) if other is part), len(parts))  # or a step let in
            later = {row.sequence for other in parts[at + 1 :] for row in other.rows}
            waiting = {
                row.sequence for step in engine._in_flight for other in step.parts for row in other.deferred_rows
            }
            if later & waiting and len(jobs) < 80:
                jobs.extend(submit(engine, *chat) for chat in chats)  # more than one, since places of logits differ
            return sampled_tokens

        engine._process_outputs, model_runner.read = remembering, reading  # type: ignore[method-assign]
        job = submit(engine, *held)
        assert job.answered.wait(60)
        batch = submit(engine, *bulk, *prompts, priority=Priority.BATCH)
        assert job.wait().all_texts == expected
        batch.wait()
        assert jobs and all(not chat.wait().finishes[0].error for chat in jobs)


def test_out_of_memory_during_prefill_ends_only_those_jobs(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    free = free_slots(engine)
    forward = engine.model_runner.pipeline.forward

    def refusing(inputs: StepInputs, out: Tensor | None = None) -> Tensor:
        if inputs.max_seqlen > 20:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(inputs, out)

    bulk = submit(engine, *[make_request("bulk", max_tokens=60, ignore_eos=True)] * 5)
    monkeypatch.setattr(engine.model_runner.pipeline, "forward", refusing)
    large = submit(engine, make_request("a long prompt " * 30), make_request("short")).wait()
    error = large.events[-1].error
    assert error is not None and error.kind is ErrorKind.OVERLOADED and error.retry_after_s
    assert all(finish.completion_tokens == 60 for finish in bulk.wait().finishes.values())
    assert run(engine, make_request("short")).finishes[0].completion_tokens == 16
    assert call(engine, "status")["free_slots"] == free


def test_a_failed_part_ends_a_job_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One job has rows in both parts. Some sessions close, and the prompts of others are read."""
    free = free_slots(engine)
    launch, failing = engine.model_runner.launch, threading.Event()

    def sometimes(rows: list[ScheduledRow], *after: Any) -> InFlightStep:
        if any(row.sequence.phase is Phase.CLOSING for row in rows):
            failing.set()  # while the long prompt is read, and those of some sessions
        if failing.is_set() and any(row.num_tokens > 1 for row in rows):
            raise RuntimeError("broken")
        return launch(rows, *after)

    monkeypatch.setattr(engine.model_runner, "launch", sometimes)
    with paused_engine(engine):
        both = submit(
            engine, make_request("x", max_tokens=10**6, ignore_eos=True), make_request("y " * 5000, max_tokens=2)
        )
        prompts = ["hello " * count for count in (40, 40, 400, 1000)]
        jobs = [submit(engine, turn(f"c{i}", prompt, max_tokens=4)) for i, prompt in enumerate(prompts)]
    assert both.wait().events[-1].error is not None
    for job in jobs:
        job.wait()
    assert [job.events[-1].error is None for job in jobs] == [True, True, False, False]
    monkeypatch.setattr(engine.model_runner, "launch", launch)
    run(engine, make_request("x", max_tokens=2))
    call(engine, "session_delete", session_id="c", delete_prefix=True)
    assert call(engine, "status")["free_slots"] == free


def test_rows_ended_by_a_failed_mask_are_in_no_later_part(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling a job's constrained prompt fails before its decoding rows are launched."""
    launch, sample = engine.model_runner.launch, engine.model_runner.sample_constrained
    ended: list[ScheduledRow] = []

    def watched(rows: list[ScheduledRow], *after: Any) -> InFlightStep:
        ended.extend(row for row in rows if not row.sequence.is_in_steps)
        return launch(rows, *after)

    def failing(step: InFlightStep) -> Any:
        if any(row.num_tokens > 1 for row in step.rows):
            raise RuntimeError("no mask")
        return sample(step)

    free = free_slots(engine)
    monkeypatch.setattr(engine.model_runner, "launch", watched)
    monkeypatch.setattr(engine.model_runner, "sample_constrained", failing)
    words = Constraint(form=Form.CHOICE, source='["yes", "no"]')
    long = make_request("y " * 1500, max_tokens=8, constraint=words)
    job = submit(engine, *[make_request("x", max_tokens=10**5, ignore_eos=True)] * 3, long).wait()
    assert job.events[-1].error is not None and not ended
    assert run(engine, make_request("short")).finishes[0].completion_tokens == 16
    assert call(engine, "status")["free_slots"] == free
