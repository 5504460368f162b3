"""Stages whose steps are graphs: what each is given by the one before, and how a step passes through all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from rwkv_batch.model.step_inputs import StepInputs
from rwkv_batch.runner.graph_capture import Recorder, StagedArrays
from rwkv_batch.runner.links import Link
from rwkv_batch.runner.stage import Stage

EXTRA_LINK_DEPTH = 2
"""Places of a link beyond the steps in flight: one that is being written, one that is being read."""


class GraphStage:
    """A stage, its recorder, and the memory in which graphs find what the stage before has left."""

    def __init__(self, stage: Stage, before: GraphStage | None, max_tokens: int, depth: int) -> None:
        """`max_tokens`: of a step that is a graph; `depth`: steps on their way at once."""
        self.stage = stage
        self.device = stage.precision.device
        self.recorder = Recorder(self.device)
        self._current = torch.cuda.device(self.device)
        self._input: Tensor | None = None
        """[2 * tokens * C]: x and v_first of a step, one behind the other"""
        self._output: Tensor | None = None
        """the same for the stage behind, which makes it"""
        self._link: Link | None = None
        if before is not None:
            size, dtype = 2 * max_tokens * stage.width, stage.precision.activations
            self._input = torch.empty(size, dtype=dtype, device=self.device)
            before._output = torch.empty(size, dtype=dtype, device=before.device)
            self._link = Link(before.device, self.device, size, dtype, depth + EXTRA_LINK_DEPTH)

    @property
    def link_kind(self) -> str | None:
        """How values come from the stage before; None for the first."""
        return None if self._link is None else self._link.transport

    def forward(self, inputs: StepInputs, tokens: Tensor | None) -> Tensor:
        """Inside a graph: run the layers over `tokens` [T], or over what was given; [T, C], left for the next stage."""
        if tokens is not None:
            x, v_first = self.stage.forward(self.stage.embed(tokens), None, inputs)
        else:
            x, v_first = self.stage.forward(*self._both(self._input, len(inputs.tokens)), inputs)
        if self._output is not None:
            assert v_first is not None
            for place, values in zip(self._both(self._output, len(x)), (x, v_first), strict=True):
                place.copy_(values)
        return x

    def _both(self, memory: Tensor | None, tokens: int) -> tuple[Tensor, Tensor]:
        assert memory is not None
        both = memory[: 2 * tokens * self.stage.width].view(2, tokens, self.stage.width)
        return both[0], both[1]

    def run(self, replay: Callable[[], None], tokens: int, before: GraphStage | None) -> None:
        """Replay a graph over so many tokens behind the stage before, without waiting for either."""
        if self._link is not None and before is not None:
            assert before._output is not None and self._input is not None
            size = 2 * tokens * self.stage.width
            self._link.receive(self._link.send(before._output, size), self._input, size)
        replay()  # on its own device, whichever is the current one

    def current(self) -> AbstractContextManager[None]:
        """While entered, the stage's GPU is the current one."""
        return self._current


def make_graph_stages(stages: Sequence[Stage], max_tokens: int, depth: int) -> list[GraphStage]:
    """All stages of a pipeline, each linked to the one before."""
    made: list[GraphStage] = []
    for stage in stages:
        made.append(GraphStage(stage, made[-1] if made else None, max_tokens, depth))
    return made


def run_stages(
    places: Sequence[GraphStage], graphs: Sequence[torch.cuda.CUDAGraph], tokens: int, staged: StagedArrays
) -> None:
    """Replay a step's graphs, one for each stage, over so many tokens; they read what `staged` was filled with."""
    before = None
    for place, graph in zip(places, graphs, strict=True):
        place.run(graph.replay, tokens, before)
        before = place
    staged.mark_used()
