"""The results of a step in pieces, without graphs: each piece runs when it is launched."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from demo.random_weights import random_weights
from rwkv_batch.model.step_inputs import StepInputs, step_inputs
from rwkv_batch.model.weights import weights_from
from rwkv_batch.runner.graphs.pieces import GraphPieces, Pieces
from rwkv_batch.runner.pipeline import Pipeline, Stage

LAYERS, WIDTH, VOCAB = 5, 128, 64
SIZE = 32


def made_stage() -> Stage:
    model = Pipeline(weights_from(random_weights(LAYERS, WIDTH, VOCAB, seed=3)), devices=("cpu",), kernels="naive")
    model.allocate_slots(SIZE + 8)
    return model.stages[0]


class Decode:
    """Replaces `DecodeGraphs`: a step over the slots from 2 on."""

    def __init__(self, stage: Stage) -> None:
        recorder = SimpleNamespace(record=lambda step, _name: SimpleNamespace(replay=step))
        place: Any = SimpleNamespace(stage=stage, device=torch.device("cpu"), recorder=recorder, current=nullcontext)
        self.graph_stages, self.sizes = [place], [8, SIZE]
        self.tokens = torch.randint(VOCAB, (SIZE,))
        self.logits: Tensor | None = None

    def fill_padding(self, size: int, adapters: bool = False) -> None:
        pass

    def inputs(self, number: int, size: int, adapters: bool = False) -> tuple[StepInputs, Tensor]:
        slots = list(range(2, 2 + size))
        fed = self.tokens[:size]
        return step_inputs([[token] for token in fed.tolist()], slots, slots, list(range(size))), fed

    def finish(self, x: Tensor, inputs: StepInputs, sampled: bool) -> None:
        self.logits = self.graph_stages[0].stage.logits_of(x, torch.arange(len(x)))


@torch.inference_mode()
def test_pieces_equal_the_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = made_stage()
    assert stage.state is not None
    state, decode = stage.state, Decode(stage)
    state.wkv.normal_(std=0.1)
    state.shift.normal_()
    before = state.wkv.clone(), state.shift.clone()
    inputs, fed = decode.inputs(0, SIZE)
    x, _ = stage.forward(stage.embed(fed), None, inputs)
    expected = stage.logits_of(x, torch.arange(SIZE)), state.wkv.clone(), state.shift.clone()
    state.wkv.copy_(before[0])
    state.shift.copy_(before[1])

    def launch(_pieces: GraphPieces, graph: Any) -> Callable[[], None]:
        graph.replay()
        return lambda: None

    monkeypatch.setattr(GraphPieces, "launch", launch)
    pieces = GraphPieces(decode, 2).for_rows(20, sampled=True)
    assert pieces is not None and pieces.size == SIZE
    reported = []

    def between() -> None:
        """Run another step over its own slots."""
        with torch.inference_mode():
            apart = step_inputs([[1, 2, 3]], [0], [SIZE + 4], [0])
            stage.forward(stage.embed(apart.tokens), None, apart)
        reported.append(decode.logits is None)

    pieces.run(between, lambda: None)
    assert reported == [True, True], "three pieces of five layers, and the head in the last"
    assert decode.logits is not None and torch.equal(decode.logits, expected[0])
    for actual, one in zip((state.wkv, state.shift), expected[1:], strict=True):
        assert torch.equal(actual[2 : SIZE + 2], one[2 : SIZE + 2])


def test_more_pieces_are_queued_for_a_slow_host() -> None:
    """The device was idle before each step while masks were made."""
    pieces, queued = GraphPieces(Decode(made_stage()), 2), []

    class Steps(Pieces[str]):
        def run(self, between: Callable[[], None], ended: Callable[[], None], queued_pieces: int = 2) -> Any:  # type: ignore[override]
            queued.append(queued_pieces)

    pieces._last = event = Mock()
    for is_idle in (False, True, True, True, True, False):
        event.query.return_value = is_idle
        pieces.run(Steps(SIZE, [], Mock()), lambda: None)
    assert queued == [2, 4, 6, 8, 8, 7]
    for _ in range(400):
        pieces.run(Steps(SIZE, [], Mock()), lambda: None)
    assert queued[-1] == 2


def test_steps_of_few_rows_have_no_pieces() -> None:
    assert GraphPieces(Decode(made_stage()), 2).for_rows(15, sampled=True) is None
