"""Prefill as CUDA graphs.

A graph is launched at once. Kernel by kernel, up to some 2,000 tokens of 7.2B take the host longer than the GPU.

Steps with adapters have graphs of their own, in fewer sizes. They are captured if the configuration names adapters.

A graph reads up to as many rows and tokens as its size says. The remaining tokens are padding. Padding rows read them,
from the zero state into the dummy slot; there is always one such row. A padding row may have no token.

Prompts of batch rows also run in pieces of a few layers. Launched kernel by kernel, such a step takes the host three
times as long as the GPU. A new interactive request would wait for it. While interactive requests arrive, the batch's
prefill per step is limited to `shares.MAX_TOKENS_IN_PIECES`, so that it fits these graphs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rwkv_batch.core.draft_costs import Shape
from rwkv_batch.core.shares import MAX_ROWS_IN_PIECES, MAX_TOKENS_IN_PIECES
from rwkv_batch.model.step_inputs import CONTINUES, StepInputs
from rwkv_batch.runner.graphs.capture import CaptureError, GraphStage, run_stages
from rwkv_batch.runner.graphs.pieces import PROMPT_TOKENS, GraphPieces, Pieces
from rwkv_batch.runner.graphs.prefill_inputs import (
    PrefillSize,
    StagedPrompts,
    shape_of,
    smallest_fitting,
    usable_sizes,
)

logger = logging.getLogger(__name__)

MAX_SHAPES = 4096
"""Steps whose graphs are remembered."""
LAYER_SECONDS = 0.001
"""The host launches a layer in 0.8 to 1.4 ms (H200, 24 and 32 layers). A long graph that is slower loses by padding."""
ADAPTER_TOKENS = (32, 128, 512, 1024, 2048)
"""Tokens of graphs that add adapters."""
PROBE_TOKENS, MAX_ESTIMATE = 256, 1.5
"""The time of a graph of about 256 tokens shows which longer ones would take 1.5 times their limit. Slow GPUs do not
capture those. Graphs of up to 256 tokens are always kept: their padding costs little."""
NO_SIZE = PrefillSize(0, 0)


class PrefillGraphs:
    """Captures and replays prefill over all stages. Engine thread only."""

    def __init__(
        self,
        graph_stages: Sequence[GraphStage],
        logits: Tensor,
        depth: int = 2,
        sizes: Sequence[PrefillSize] = (),
        max_adapters: int = 0,
    ) -> None:
        """logits [rows, V] fp32: output of the steps
        depth: steps in flight
        max_adapters: different adapters in one step; 0: no graph adds adapters
        sizes: smallest first; default: `usable_sizes`. Long ones are used after `warm_up`, which may drop some
        """
        self._all_sizes = sizes or usable_sizes(len(logits))
        self.sizes = [size for size in self._all_sizes if size.tokens <= PROBE_TOKENS]
        self._max_seconds = LAYER_SECONDS * sum(len(one.stage.layers) for one in graph_stages)
        self._graph_stages = list(graph_stages)
        self._logits = logits
        self._captured: dict[tuple[int, PrefillSize, bool], torch.cuda.CUDAGraph] = {}
        """by stage, size, and whether it adds adapters"""
        self._adapter_sizes: list[PrefillSize] = []
        """of captured graphs that add adapters"""
        self.seconds: dict[PrefillSize, float] = {}
        """of captured graphs without adapters, on all stages"""
        self._size_of: dict[tuple[int, int], PrefillSize] = {}
        largest = PrefillSize(*map(max, zip(*self._all_sizes, strict=True)))
        self._staged = StagedPrompts(largest, graph_stages, depth, max_adapters)

    def size_for(self, inputs: StepInputs) -> PrefillSize | None:
        """Return the smallest graph for a step. None: no size fits, or the tokens are on the device."""
        if inputs.tokens.is_cuda:
            return None
        if inputs.adapters is not None:
            if not self._adapter_sizes or bool((inputs.read_slots == CONTINUES).any()):  # drafts
                return None
            return next((size for size in self._adapter_sizes if size.holds(*shape_of(inputs))), None)
        size = self._smallest(*shape_of(inputs))
        return None if size is NO_SIZE else size

    def _smallest(self, rows: int, tokens: int) -> PrefillSize:
        size = self._size_of.get((rows, tokens))
        if size is None:
            size = next((one for one in self.sizes if one.holds(rows, tokens)), NO_SIZE)
            if len(self._size_of) > MAX_SHAPES:
                self._size_of.clear()
            self._size_of[rows, tokens] = size
        return size

    def seconds_of(self, shape: Shape) -> float:
        """Return the seconds of the smallest graph for a step. 0: no graph fits.

        A graph that is not captured yet counts as the slowest smaller one.
        """
        size = self._smallest(shape.rows, shape.tokens)
        if size in self.seconds or size is NO_SIZE:
            return self.seconds.get(size, 0.0)
        return max((seconds for one, seconds in self.seconds.items() if one.tokens <= size.tokens), default=1e-6)

    def warm_up(self, adapters: bool = False) -> None:
        """Capture every size: one that shows which others are too long, then the largest first.

        adapters: also graphs that add adapters

        Drops long sizes that are too slow or do not fit into memory. Raises CaptureError for a short one.
        """
        started = time.perf_counter()
        probe = min(self._all_sizes, key=lambda size: abs(size.tokens - PROBE_TOKENS))
        most = max(PROBE_TOKENS, MAX_ESTIMATE * self._max_seconds / self._capture(probe) * probe.tokens)
        self.sizes = [size for size in self._all_sizes if size.tokens <= most]
        for size in self.sizes[::-1]:
            try:
                is_slow = self._capture(size) > self._max_seconds
            except CaptureError as error:
                if size.tokens <= PROBE_TOKENS:
                    raise
                logger.warning("prompts of %d tokens are launched kernel by kernel: %s", size.tokens, error)
                is_slow = True
            if is_slow and size.tokens > PROBE_TOKENS:
                self._drop(size)
        self._size_of.clear()
        for size in self.sizes[::-1] if adapters else ():
            if size.tokens in ADAPTER_TOKENS and not size.num_drafts:
                try:
                    self._capture(size, adapters)
                    self._adapter_sizes.insert(0, size)
                except CaptureError as error:
                    logger.warning("%d tokens with adapters are launched kernel by kernel: %s", size.tokens, error)
        logger.info("captured %d graphs of prompts in %.1f s", len(self._captured), time.perf_counter() - started)

    def _capture(self, size: PrefillSize, adapters: bool = False) -> float:
        """Capture a size on all stages, if it is not yet. Returns its seconds without adapters."""
        for number in range(len(self._graph_stages)):
            self._graph(number, size, adapters)
        return self.seconds[size]

    def _drop(self, size: PrefillSize) -> None:
        self.sizes.remove(size)
        self.seconds.pop(size, None)
        for number in range(len(self._graph_stages)):
            self._captured.pop((number, size, False), None)

    @torch.inference_mode()
    def run(self, inputs: StepInputs, size: PrefillSize) -> Tensor:
        """Launch a step that fits: inputs on the CPU -> logits [R, V] fp32. The next run overwrites them."""
        has_adapters = inputs.adapters is not None
        graphs = [self._graph(number, size, has_adapters) for number in range(len(self._graph_stages))]
        self._staged.fill(inputs, size)
        run_stages(self._graph_stages, graphs, size.tokens, self._staged.arrays)
        return self._logits[: len(inputs.logit_tokens)]

    def _graph(self, number: int, size: PrefillSize, adapters: bool) -> torch.cuda.CUDAGraph:
        key = (number, size, adapters)
        if key not in self._captured:
            graph_stage = self._graph_stages[number]
            with graph_stage.current():
                self._staged.fill_padding(size, adapters)
                name = f"a graph of {size.tokens} tokens in {size.rows} rows on {graph_stage.device}"
                self._captured[key] = graph_stage.recorder.record(lambda: self._step(number, size, adapters), name)
            if not adapters:
                self.seconds[size] = self.seconds.get(size, 0.0) + graph_stage.recorder.seconds
        return self._captured[key]

    def _step(self, number: int, size: PrefillSize, adapters: bool) -> None:
        """Run one step of a stage. Allocates nothing that survives: all graphs share one memory pool."""
        graph_stage, inputs = self._graph_stages[number], self._staged.inputs(number, size, adapters)
        x = graph_stage.forward(inputs, inputs.tokens if number == 0 else None)
        if number == len(self._graph_stages) - 1:
            graph_stage.stage.logits(x, inputs, self._logits)


PIECE_TOKENS = tuple(PROMPT_TOKENS * part // 4 for part in (1, 2, 3, 4))
assert PrefillSize(MAX_ROWS_IN_PIECES, PIECE_TOKENS[-1]).holds(1, MAX_TOKENS_IN_PIECES)


class PromptPieces:
    """Captures and replays pieces of prefill steps. Engine thread only."""

    def __init__(self, pieces: GraphPieces, logits: Tensor, depth: int = 2) -> None:
        """logits [rows, V] fp32: output of the steps; depth: steps in flight."""
        self.sizes = tuple(PrefillSize(min(MAX_ROWS_IN_PIECES, len(logits)), tokens) for tokens in PIECE_TOKENS)
        self._pieces = pieces
        self._logits = logits
        self._staged = StagedPrompts(self.sizes[-1], [pieces.graph_stage], depth)
        self._captured: dict[tuple[PrefillSize, int], torch.cuda.CUDAGraph] = {}

    def size_for(self, inputs: StepInputs) -> PrefillSize | None:
        """Return the smallest size for a step. None: no size fits."""
        return smallest_fitting(self.sizes, inputs)

    def warm_up(self) -> None:
        """Capture every size, largest size first."""
        started = time.perf_counter()
        for size in reversed(self.sizes):
            self._graphs(size)
        logger.info("captured %d pieces of prompts in %.1f s", len(self._captured), time.perf_counter() - started)

    @torch.inference_mode()
    def run(self, inputs: StepInputs, size: PrefillSize, between: Callable[[], None]) -> Tensor:
        """Launch a step that fits: inputs on the CPU -> logits [R, V] fp32. The next run overwrites them.

        between: see `Pieces.run`; its steps must not be in pieces.
        """
        graphs = self._graphs(size)
        self._staged.fill(inputs, size)
        self._pieces.run(Pieces(size.tokens, graphs, self._pieces.launch), between)
        return self._logits[: len(inputs.logit_tokens)]

    def _graphs(self, size: PrefillSize) -> list[torch.cuda.CUDAGraph]:
        return [self._graph(size, number) for number in range(len(self._pieces.parts))]

    def _graph(self, size: PrefillSize, number: int) -> torch.cuda.CUDAGraph:
        key = (size, number)
        if key not in self._captured:
            graph_stage = self._pieces.graph_stage
            with graph_stage.current():
                self._staged.fill_padding(size)
                name = f"piece {number} of a graph of {size.tokens} tokens in {size.rows} rows on {graph_stage.device}"
                self._captured[key] = graph_stage.recorder.record(lambda: self._step(size, number), name)
        return self._captured[key]

    def _step(self, size: PrefillSize, number: int) -> None:
        inputs = self._staged.inputs(0, size)
        x = self._pieces.compute(number, inputs.tokens, inputs)
        if x is not None:
            self._pieces.graph_stage.stage.logits(x, inputs, self._logits)
