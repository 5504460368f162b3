"""The choice of a prefill graph for a step. Padding changes only the dummy slot."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from demo.random_weights import random_weights
from rwkv_batch.kernels.cuda.adapters import max_tiles
from rwkv_batch.model.step_inputs import CONTINUES, StepInputs, step_inputs
from rwkv_batch.model.weights import weights_from
from rwkv_batch.runner.graphs.capture import CaptureError
from rwkv_batch.runner.graphs.pieces import PROMPT_TOKENS, GraphPieces
from rwkv_batch.runner.graphs.prefill import ADAPTER_TOKENS, PrefillGraphs
from rwkv_batch.runner.graphs.prefill_inputs import (
    PADDING_DRAFT,
    SIZES,
    VERIFY_SIZES,
    PrefillSize,
    StagedPrompts,
    input_lengths,
    pad,
    smallest_fitting,
    step_of_drafts,
    usable_sizes,
)
from rwkv_batch.runner.pipeline import Pipeline, Stage
from state_pool.layout import DUMMY_SLOT, ZERO_SLOT

VOCAB, SLOTS = 300, 34
STEPS = [
    [1],
    [14],
    [15],
    [16],
    [5, 3],
    [5, 3, 4],
    [1, 1, 1, 1],
    [30, 1, 20],
    [2] * 16,
    [7] * 11,
    [255],
    [60, 190, 2],
    [10] * 30,
    [5] * 31 + [1],
    [511],
    [512],
    [500, 130, 7],
    [512, 512],
]


@pytest.fixture(scope="module")
def stage() -> Stage:
    weights = weights_from(random_weights(2, 128, VOCAB, seed=2, ranks=(20, 24, 12, 40)))
    model = Pipeline(weights, devices=("cpu",), kernels="naive")
    model.allocate_slots(SLOTS)
    return model.stages[0]


def step(lengths: list[int]) -> StepInputs:
    """Return a step with rows that continue a slot and new rows. Every second row has logits."""
    generator = torch.Generator().manual_seed(len(lengths))
    rows = [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]
    slots = list(range(2, 2 + len(rows)))
    return step_inputs(rows, [slot if slot % 3 else 0 for slot in slots], slots, list(range(0, len(rows), 2)))


def size_for(lengths: list[int]) -> PrefillSize:
    return next(size for size in SIZES if size.holds(len(lengths), sum(lengths)))


@torch.inference_mode()
def forward(
    stage: Stage, inputs: StepInputs, pieces: GraphPieces | None = None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return logits and all slots except the dummy, from equal initial states. pieces: run piece by piece."""
    assert stage.state is not None
    kept = [index for index in range(SLOTS) if index != DUMMY_SLOT]
    for tensor in (stage.state.wkv, stage.state.shift):
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))
        tensor[0] = 0
    if pieces is None:
        x, _ = stage.forward(stage.embed(inputs.tokens), None, inputs)
    else:
        *before, last = [pieces.compute(number, inputs.tokens, inputs) for number in range(len(pieces.parts))]
        assert before == [None] * len(before) and last is not None
        x = last
    return stage.logits(x, inputs), [stage.state.wkv[kept], stage.state.shift[kept]]


def staged(inputs: StepInputs, size: PrefillSize) -> dict[str, torch.Tensor]:
    """Return a step's padded arrays."""
    lengths = input_lengths(size.rows + 1, size.tokens) | {"logit_tokens": size.rows}
    arrays = {name: np.full(length, -7) for name, length in lengths.items()}
    pad(arrays, inputs, size)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


@pytest.mark.parametrize("lengths", STEPS, ids=str)
def test_padding_changes_nothing(stage: Stage, lengths: list[int]) -> None:
    inputs, size = step(lengths), size_for(lengths)
    arrays = staged(inputs, size)
    assert len(arrays["tokens"]) == len(arrays["token_rows"]) == size.tokens == arrays["cu_seqlens"][-1]
    assert len(arrays["read_slots"]) == len(arrays["write_slots"]) == size.rows + 1
    behind = arrays["cu_seqlens"].diff()[len(lengths) :]
    assert behind.max() - behind.min() <= 1, "a long row of padding would take longer than the step's own"
    assert torch.equal(arrays["token_rows"].bincount(minlength=size.rows + 1), arrays["cu_seqlens"].diff())
    longest = int(arrays["cu_seqlens"].diff().max())
    expected, actual = forward(stage, inputs), forward(stage, StepInputs(**arrays, max_seqlen=longest))
    torch.testing.assert_close(actual[0][: len(expected[0])], expected[0])
    torch.testing.assert_close(actual[1], expected[1])


def test_pieces_equal_the_whole_step(stage: Stage) -> None:
    """Each piece reads the previous one's output. A decode step between them has fewer rows."""
    place = SimpleNamespace(stage=stage, device=torch.device("cpu"))
    decode: Any = SimpleNamespace(graph_stages=[place], sizes=[8])
    pieces, size = GraphPieces(decode, 1), PrefillSize(4, PROMPT_TOKENS)
    inputs = step([200, 3, 250])
    assert smallest_fitting([PrefillSize(4, 128), size], inputs) == size and len(pieces.parts) == 2
    arrays = staged(inputs, size)
    padded_inputs = StepInputs(**arrays, max_seqlen=250)
    expected, actual = forward(stage, padded_inputs), forward(stage, padded_inputs, pieces)
    torch.testing.assert_close(actual[0], expected[0])
    torch.testing.assert_close(actual[1], expected[1])


def test_the_smallest_fitting_size_comes_first() -> None:
    assert PrefillSize(1, 16).holds(1, 16) and not PrefillSize(1, 16).holds(1, 17)
    assert PrefillSize(4, 16).holds(2, 16), "rows of padding may have no token"
    assert not PrefillSize(4, 64).holds(5, 20)
    assert PrefillSize(16, 16).holds(9, 9) and not PrefillSize(16, 16).holds(9, 10), "each row of drafts has one token"
    found = [size_for(lengths)[:2] for lengths in ([15], [16], [17], [1, 1], [2] * 16, [2] * 17, [256], [512, 512])]
    assert found == [(1, 16), (1, 16), (1, 32), (4, 16), (16, 32), (32, 64), (1, 256), (8, 1024)]
    assert not any(size.holds(1, 2049) or size.holds(129, 129) for size in SIZES)
    assert not set(SIZES) & set(VERIFY_SIZES), "timed as steps of prompts"


class TimedGraphs(PrefillGraphs):
    """Graphs of 32 layers that take a time per token. Captures of `failing` tokens find no memory."""

    failing_with_adapters = 0

    def __init__(self, token_us: float, failing: int = 0) -> None:
        self._all_sizes, self._max_seconds, self._size_of = usable_sizes(128), 0.032, {}
        self.seconds, self._captured, self._graph_stages, self._adapter_sizes = {}, {}, [Mock()], []
        self.token_us, self.failing, self.tried = token_us, failing, list[int]()

    def _graph(self, number: int, size: PrefillSize, adapters: bool) -> Any:
        if size not in self.seconds:
            self.tried.append(size.tokens)
            if size.tokens == self.failing:
                raise CaptureError("out of memory")
            self.seconds[size] = 1e-6 * self.token_us * size.tokens
        if adapters and size.tokens == self.failing_with_adapters:
            raise CaptureError("out of memory")
        return self._captured.setdefault((number, size, adapters), Mock())


@pytest.mark.parametrize(("token_us", "longest", "captured"), [(14, 2048, 2048), (26, 1024, 1536), (200, 256, 256)])
def test_long_graphs_are_left_out(token_us: float, longest: int, captured: int) -> None:
    """The host launches a step as fast as they run, and padding costs more. Far too long ones are not even captured."""
    graphs = TimedGraphs(token_us)
    graphs.warm_up()
    assert max(size.tokens for size in graphs.sizes) == longest and max(graphs.tried) == captured
    assert {size for _, size, _ in graphs._captured} == set(graphs.sizes) == set(graphs.seconds)


def test_rows_with_adapters_have_graphs_of_their_own() -> None:
    """Fewer sizes. Those without memory, other steps with adapters, and drafts are launched kernel by kernel."""
    graphs = TimedGraphs(14)
    graphs.failing_with_adapters = 512
    with_adapter = replace(step([300, 90]), adapters=torch.tensor([1] * 300 + [0] * 90))
    graphs.warm_up()
    assert graphs.size_for(step([300, 90])) is not None and graphs.size_for(with_adapter) is None
    graphs.warm_up(adapters=True)
    assert graphs.size_for(with_adapter) == (8, 1024) and graphs.size_for(step([300, 90])) == (8, 448)
    assert {size.tokens for _, size, adapters in graphs._captured if adapters} == {*ADAPTER_TOKENS} - {512}
    drafts = step_inputs([[5], [6]], [2, CONTINUES], [3, 4], [0, 1])
    assert graphs.size_for(replace(drafts, adapters=torch.tensor([1, 1]))) is None


def test_tokens_of_adapters_are_staged() -> None:
    """Padding tokens have no adapter."""
    size, numbers = PrefillSize(4, 32), torch.tensor([2] * 17 + [0] * 3)
    staging = StagedPrompts.__new__(StagedPrompts)
    staging._max_adapters, tiles = 4, max_tiles(32, 4)
    host = {name: np.zeros(length, dtype=np.int64) for name, length in input_lengths(5, 32).items()}
    host |= {"tile_tokens": np.zeros(16 * tiles, dtype=np.int32), "tile_numbers": np.zeros(tiles, dtype=np.int32)}
    staging.arrays = SimpleNamespace(filling=lambda: nullcontext(host), on_device=[{}])  # type: ignore[assignment]
    staging.fill(replace(step([17, 3]), adapters=numbers), size)
    tokens = host["tile_tokens"].reshape(tiles, 16)
    for number in (0, 2):
        of_number = tokens[host["tile_numbers"] == number]
        assert sorted(of_number[of_number >= 0]) == torch.nonzero(numbers == number).flatten().tolist()
    assert (host["tile_numbers"] == -1).sum() == tiles - 3


def test_a_long_graph_without_memory_is_left_out() -> None:
    graphs = TimedGraphs(14, failing=1024)
    graphs.warm_up()
    assert {size.tokens for size in usable_sizes(128)} - {size.tokens for size in graphs.sizes} == {1024}
    with pytest.raises(CaptureError):
        TimedGraphs(14, failing=64).warm_up()


def test_sizes_are_those_that_steps_have() -> None:
    assert max(size.tokens for size in usable_sizes(128, max_tokens=700)) == 768
    assert max(size.rows for size in usable_sizes(32)) == 32
    assert set(usable_sizes(32, verifies=True)) == {*usable_sizes(32), *VERIFY_SIZES}


@pytest.mark.parametrize(("known", "drafted", "rows", "tokens"), [(1, 4, 5, 5), (1, 16, 17, 17), (30, 4, 8, 64)])
def test_a_step_with_a_draft_has_a_row_for_each_drafted_token(known: int, drafted: int, rows: int, tokens: int) -> None:
    """Its known tokens may be the last ones of a prompt."""
    count = 1 + drafted
    inputs = step_inputs([[5] * known, *[[6]] * drafted], [2] * count, [*range(3, 3 + count)], [*range(count)])
    size = smallest_fitting(usable_sizes(64, verifies=True), inputs)
    assert size == (rows, tokens)
    padding = [tokens - 1] * (rows - count)
    assert staged(inputs, size)["logit_tokens"].tolist() == [*range(known - 1, known + drafted), *padding]


@pytest.mark.parametrize("size", VERIFY_SIZES, ids=str)
def test_graphs_of_drafts_are_timed_with_rows_that_continue_others(size: PrefillSize) -> None:
    inputs = step_of_drafts(size)
    assert smallest_fitting([size], inputs) == size
    assert np.diff(staged(inputs, size)["cu_seqlens"]).tolist() == [1] * size.rows + [0], "an empty row of padding"
    assert inputs.read_slots.unique().tolist() == [CONTINUES, ZERO_SLOT] and inputs.read_slots[0] == ZERO_SLOT
    assert (inputs.read_slots == ZERO_SLOT).sum() == size.num_drafts


def test_padding_of_drafts_continues_as_drafts_do() -> None:
    """Else each row of it would be as much work as a draft."""
    size = PrefillSize(48, 48)
    arrays = staged(step_inputs([[5]] * 30, [2] * 30, [3] * 30, []), size)
    assert np.diff(arrays["cu_seqlens"]).tolist() == [1] * 48 + [0]
    assert (arrays["read_slots"][30:] == ZERO_SLOT).tolist() == [i % PADDING_DRAFT == 0 for i in range(19)]
    assert set(arrays["write_slots"][30:].tolist()) == {DUMMY_SLOT}


def test_an_empty_step_is_all_padding() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    arrays = staged(
        StepInputs(nothing, torch.zeros(1, dtype=torch.int64), nothing, nothing, nothing, 1), PrefillSize(4, 16)
    )
    assert arrays["cu_seqlens"].tolist() == [0, 4, 7, 10, 13, 16]
    assert set(arrays["write_slots"].tolist()) == {DUMMY_SLOT}
