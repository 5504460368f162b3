"""Stages that replay graphs, and the transfer of activations between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from rwkv_batch.model.step_inputs import StepInputs
from rwkv_batch.runner.graphs.capture import Recorder, StagedArrays
from rwkv_batch.runner.links import Link
from rwkv_batch.runner.stage import Stage

EXTRA_LINK_DEPTH = 2
"""Link buffers beyond the steps in flight: one being written, one being read."""


class GraphStage:
    """A stage, its recorder, and the input that the previous stage sends."""

    def __init__(self, stage: Stage, before: GraphStage | None, max_tokens: int, depth: int) -> None:
        """max_tokens: of a step; depth: steps in flight."""
        self.stage = stage
        self.device = stage.precision.device
        self.recorder = Recorder(self.device)
        self._current = torch.cuda.device(self.device)
        self._input: Tensor | None = None
        """[2 * tokens * C]: x, then v_first"""
        self._output: Tensor | None = None
        """the same for the next stage"""
        self._link: Link | None = None
        if before is not None:
            size, dtype = 2 * max_tokens * stage.width, stage.precision.activations
            self._input = torch.empty(size, dtype=dtype, device=self.device)
            before._output = torch.empty(size, dtype=dtype, device=before.device)
            self._link = Link(before.device, self.device, size, dtype, depth + EXTRA_LINK_DEPTH)

    @property
    def link_kind(self) -> str | None:
        """How values come from the previous stage; None for the first."""
        return None if self._link is None else self._link.transport

    def forward(self, inputs: StepInputs, tokens: Tensor | None) -> Tensor:
        """Inside a graph: run the layers over tokens [T] or over the previous stage's output.

        Returns x [T, C], and keeps it for the next stage.
        """
        if tokens is not None:
            x, v_first = self.stage.forward(self.stage.embed(tokens), None, inputs)
        else:
            x, v_first = self.stage.forward(*self._both(self._input, len(inputs.tokens)), inputs)
        if self._output is not None:
            assert v_first is not None
            for target, values in zip(self._both(self._output, len(x)), (x, v_first), strict=True):
                target.copy_(values)
        return x

    def _both(self, memory: Tensor | None, tokens: int) -> tuple[Tensor, Tensor]:
        assert memory is not None
        both = memory[: 2 * tokens * self.stage.width].view(2, tokens, self.stage.width)
        return both[0], both[1]

    def run(self, replay: Callable[[], None], tokens: int, before: GraphStage | None) -> None:
        """Replay a graph over this many tokens after the previous stage, without waiting."""
        if self._link is not None and before is not None:
            assert before._output is not None and self._input is not None
            size = 2 * tokens * self.stage.width
            self._link.receive(self._link.send(before._output, size), self._input, size)
        replay()  # runs on the graph's device, not on the current one

    def current(self) -> AbstractContextManager[None]:
        """Return a context in which the stage's GPU is the current device."""
        return self._current


def make_graph_stages(stages: Sequence[Stage], max_tokens: int, depth: int) -> list[GraphStage]:
    """Create a linked GraphStage for each stage of a pipeline."""
    created: list[GraphStage] = []
    for stage in stages:
        created.append(GraphStage(stage, created[-1] if created else None, max_tokens, depth))
    return created


def run_stages(
    graph_stages: Sequence[GraphStage], graphs: Sequence[torch.cuda.CUDAGraph], tokens: int, staged: StagedArrays
) -> None:
    """Replay a step's graphs, one per stage. They read the arrays in `staged`."""
    before = None
    for graph_stage, graph in zip(graph_stages, graphs, strict=True):
        graph_stage.run(graph.replay, tokens, before)
        before = graph_stage
    staged.mark_used()
