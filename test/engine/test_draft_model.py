"""The draft model of speculative decoding: its states follow the accepted text, with and without graphs."""

from __future__ import annotations

import gc
import operator
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from rwkv_batch.config import EngineConfig
from rwkv_batch.core.drafters import CHUNK, MAX_DRAFT_TOKENS, MAX_ROWS, Joined, ModelDrafter, Wanted
from rwkv_batch.engine import Engine
from rwkv_batch.errors import StartupError
from rwkv_batch.model.state import ModelShape
from rwkv_batch.model.step_inputs import StepInputs, step_inputs
from rwkv_batch.runner.draft_steps import READ_SIZES, DraftSteps, fastest_dtypes, groups_to_read
from rwkv_batch.runner.graphs.guess import CHOSEN, Verified
from rwkv_batch.runner.graphs.prefill_inputs import PrefillSize, smallest_fitting
from rwkv_batch.runner.links import DeviceGuesses
from rwkv_batch.runner.model_files import load_pipeline
from sampling.params import SamplingParams
from test.engine.test_speculation import rows_of
from test.guess_table import fill_table
from test.harness import eventually_holds, make_request, run, started_engine, tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


class FakeDraftGraphs:
    """Replaces the draft model's `GuessGraphs` without a GPU."""

    def __init__(self, model: DraftSteps) -> None:
        self._pipeline = model._pipeline
        self._table = torch.zeros(MAX_DRAFT_TOKENS + 1, 3, MAX_ROWS, dtype=torch.int64)
        self._guesses = torch.zeros(MAX_DRAFT_TOKENS + 1, MAX_ROWS, dtype=torch.int64)
        self._step = self.num_runs = self.num_ahead = 0

    def seconds(self, num_rows: int) -> float:
        return 0.0

    def run(self, steps: list[tuple[list[int], list[int], list[int]]]) -> Tensor:
        self._step, rows = 0, len(steps[0][0])
        self.num_runs += 1
        self._table[: len(steps), :, :rows] = torch.tensor(steps)
        return self.replay(rows, len(steps))

    def fill_ahead(self, rows: list[Verified], last: Tensor, after: Tensor, num_slots: int, num_steps: int) -> None:
        self._step = 0
        self.num_ahead += 1
        fill_table(self._table[:num_steps, :, : len(rows)], rows, last, after, num_slots)

    def replay(self, num_rows: int, num_steps: int) -> Tensor:
        for number in range(self._step, self._step + num_steps):
            reads, writes, given = self._table[number, :, :num_rows].tolist()
            chosen = self._guesses[number - 1].tolist()
            tokens = [[last if one == CHOSEN else one] for one, last in zip(given, chosen, strict=False)]
            inputs = step_inputs(tokens, reads, writes, list(range(num_rows)))
            self._guesses[number, :num_rows] = self._pipeline.forward(inputs).argmax(-1)
        self._step += num_steps
        return self._guesses


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with started_engine(model, speculate="model", draft_model=str(model)) as started:
        yield started


@pytest.mark.parametrize("has_graphs", [False, True])
def test_a_draft_model_reads_no_token_again(engine: Engine, has_graphs: bool) -> None:
    """The model is its own draft: all its guesses for greedy rows are right, after rejected ones too."""
    greedy = SamplingParams(temperature=0.0)
    prompts = ["row 1", "row 2", "a long text " * 60]
    rows = [make_request(one, max_tokens=30 - i, ignore_eos=True, sampling=greedy) for i, one in enumerate(prompts)]
    plain = [msgspec.structs.replace(one, speculation="off") for one in rows]
    expected = rows_of(run(engine, *plain, return_token_ids=True))
    steps = engine.model_runner.draft_model
    assert steps is not None
    graphs = reading = None
    if has_graphs:  # as on a GPU
        steps._graphs = graphs = FakeDraftGraphs(steps)  # type: ignore[assignment]
        steps._reading = reading = FakeReadingGraphs(steps)  # type: ignore[assignment]
        engine.model_runner.drafts.may_sample_ahead = engine.model_runner._tokens.is_read = True
    for share in (1.0, 0.7):
        engine.speculation.model = faulty = Faulty(steps, share)
        before = engine.speculation.totals["model"]
        assert rows_of(run(engine, *rows, return_token_ids=True)) == expected
        drafted, accepted = map(operator.sub, engine.speculation.totals["model"], before)
        assert accepted == drafted > 60 if share == 1.0 else 20 < accepted < drafted
        assert (faulty.num_early > 0) == has_graphs, "guesses come before the text is processed"
    assert graphs is None or graphs.num_ahead > graphs.num_runs > 0, "most guesses do not wait for the host"
    assert reading is None or reading.lengths, "prompts are read by graphs"
    assert eventually_holds(engine, lambda: len(steps._free) == MAX_ROWS), "rows that ended free their rings"


def test_guesses_outlive_the_next_call(model: Path) -> None:
    """A row that waits keeps its one guess while others get theirs: one row of memory is contiguous if transposed."""
    steps = DraftSteps(EngineConfig(model_path=str(model), draft_model=str(model)), torch.device("cpu"))
    steps._graphs = FakeDraftGraphs(steps)  # type: ignore[assignment]
    first, other = ModelDrafter(), ModelDrafter()
    guesses = steps.guess([Wanted(first, [5], 1, 1)])
    assert guesses is not None
    before = guesses.tokens.tolist()
    for token in (3, 4):
        steps.guess([Wanted(other, [token] * (other.num_read + 1), other.num_read + 1, 3)])
    assert guesses.tokens.tolist() == before and first.pending is guesses


def test_a_row_that_ends_with_unread_guesses_frees_its_ring(model: Path) -> None:
    """At once: the garbage collector runs rarely, and without a ring no other row's guesses begin early."""
    steps = DraftSteps(EngineConfig(model_path=str(model), draft_model=str(model)), torch.device("cpu"))
    drafter = ModelDrafter()
    guesses = steps.guess([Wanted(drafter, [7, 7, 7], 3, 4)])
    assert guesses is not None and drafter.pending is guesses and len(steps._free) == MAX_ROWS - 1
    gc.disable()
    try:
        del drafter
        assert len(steps._free) == MAX_ROWS
    finally:
        gc.enable()


@pytest.mark.parametrize("mode", ["model", "auto"])
def test_an_idle_engine_keeps_no_ring(model: Path, mode: str) -> None:
    """Nor the rows of its last step with drafts."""
    greedy = SamplingParams(temperature=0.0)
    rows = [make_request(f"row {i}", max_tokens=40, ignore_eos=True, sampling=greedy) for i in range(4)]
    with started_engine(model, speculate=mode, draft_model=str(model)) as engine:
        steps = engine.model_runner.draft_model
        assert steps is not None
        steps._graphs, steps._reading = FakeDraftGraphs(steps), FakeReadingGraphs(steps)  # type: ignore[assignment]
        engine.model_runner.drafts.may_sample_ahead = engine.model_runner._tokens.is_read = True
        gc.disable()
        try:
            run(engine, *rows)
            assert eventually_holds(engine, lambda: len(steps._free) == MAX_ROWS)
        finally:
            gc.enable()
        assert engine.speculation.totals["model"].accepted > 0


def test_steps_are_begun_for_the_rows_of_one_step(model: Path) -> None:
    """Other rows' steps would replace them, and both would run twice."""
    steps = DraftSteps(EngineConfig(model_path=str(model), draft_model=str(model)), torch.device("cpu"))
    steps._graphs = graphs = FakeDraftGraphs(steps)  # type: ignore[assignment]
    for drafter in (first := ModelDrafter(), other := ModelDrafter()):
        assert steps.guess([Wanted(drafter, [7, 7, 7], 3, 4)]) is not None
        drafter.read()
    for drafter in (first, other):
        last = torch.tensor(drafter.guesses[:1])
        steps.guess_ahead([(drafter, 0, drafter.guesses[:3])], 4, last, torch.ones(3, dtype=torch.int64))
    text, num_runs = [7, 7, 7, first.guesses[0], 1], graphs.num_runs
    steps.guess([Wanted(first, text, len(text), 5)])
    assert graphs.num_ahead == 1 and graphs.num_runs == num_runs + 1, "they are for four guesses, not for five"
    ones = torch.ones(1, dtype=torch.int64)
    steps.guess_ahead([(first, 0, first.guesses[:1])], 4, ones, ones)
    assert graphs.num_ahead == 2


def test_texts_are_read_in_groups_that_fit_a_graph() -> None:
    rows: list[Any] = [SimpleNamespace(known=[0] * length) for length in (*[CHUNK] * 9, *[1] * (MAX_ROWS - 9))]
    groups = groups_to_read(rows)
    assert [row for group in groups for row in group] == rows
    assert all(READ_SIZES[-1].holds(len(group), sum(len(row.known) for row in group)) for group in groups)
    assert len(groups) == 3 and not groups_to_read([])


class FakeReadingGraphs:
    """Replaces the draft model's `PrefillGraphs` without a GPU."""

    def __init__(self, model: DraftSteps) -> None:
        self._pipeline = model._pipeline
        self.lengths: list[int] = []

    def size_for(self, inputs: StepInputs) -> PrefillSize | None:
        return smallest_fitting(READ_SIZES, inputs)

    def run(self, inputs: StepInputs, size: PrefillSize) -> None:
        self.lengths.append(len(inputs.tokens))
        self._pipeline.run_layers(inputs)


class Faulty:
    """A draft model that replaces some guesses."""

    def __init__(self, model: DraftSteps, share: float) -> None:
        self._model, self._share, self._rng = model, share, random.Random(0)
        self.num_early = 0

    def guess(self, wanted: list[Wanted]) -> DeviceGuesses | None:
        self.num_early += sum(isinstance(one.ids, Joined) for one in wanted)
        guesses = self._model.guess(wanted)
        for one in wanted if self._share < 1 else ():
            one.drafter.read()
            for i in range(len(one.drafter.guesses)):
                if self._rng.random() > self._share:
                    # The state after a replaced guess is wrong, as is that guess: it is never accepted.
                    one.drafter.guesses[i:] = [self._rng.randrange(1, 60000)] * (len(one.drafter.guesses) - i)
                    break
        return guesses

    def graph_s(self, num_rows: int) -> float:
        return self._model.graph_s(num_rows)


def test_a_draft_model_takes_the_fastest_type_with_kernels(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    asked = []

    class Backend:
        fits = False

        def fits_draft_step(self, shape: ModelShape, device: torch.device) -> bool:
            return self.fits

        def make_draft_step(self, *_: object) -> None: ...

    def choose(kernels: str, device: torch.device, version: str) -> tuple[Any, dict[str, str]]:
        asked.append(kernels)
        return Backend(), {}

    monkeypatch.setattr("rwkv_batch.runner.draft_steps.choose_ops", choose)
    draft = EngineConfig(model_path=str(model), kernels="naive")
    assert fastest_dtypes("fp16", draft, gpu) == fastest_dtypes("int8", draft, cpu) == ("auto",)
    assert not asked, "no backend is chosen where the type does not depend on it"
    assert fastest_dtypes("int8", draft, gpu) == ("fp8", "auto")
    Backend.fits = True
    assert fastest_dtypes("int8", draft, gpu) == ("auto",)
    assert asked == ["naive", "naive"]

    def load(config: EngineConfig) -> Any:
        if config.dtype == "fp8":
            raise StartupError("fp8 needs other sizes")
        return load_pipeline(config)

    monkeypatch.setattr("rwkv_batch.runner.draft_steps.load_pipeline", load)
    config = EngineConfig(model_path=str(model), draft_model=str(model), speculate="model")
    steps = DraftSteps(config, cpu, ("fp8", "auto"))
    assert steps._pipeline.stages[0].precision.weights_name == "float32"
    assert [one.message for one in caplog.records if one.levelname == "WARNING"] == [
        "the draft model does not run in fp8, so it runs in another type: fp8 needs other sizes"
    ]
    with pytest.raises(StartupError, match="other sizes"):
        DraftSteps(config, cpu, ("fp8",))


def test_speculation_by_a_model_needs_one(model: Path) -> None:
    with (
        pytest.raises(StartupError, match="give its file: --draft-model FILE"),
        started_engine(model, speculate="model"),
    ):
        pass
