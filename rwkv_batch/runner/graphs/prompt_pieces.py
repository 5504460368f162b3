"""Prefill of batch rows in pieces of a few layers, as CUDA graphs.

Launched kernel by kernel, such a step takes the host three times as long as the GPU, and a new interactive request
waits for it. While interactive requests arrive, the batch's prefill per step is limited to
`shares.MAX_TOKENS_IN_PIECES`, so that it fits these graphs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch
from torch import Tensor

from rwkv_batch.core.shares import MAX_ROWS_IN_PIECES, MAX_TOKENS_IN_PIECES
from rwkv_batch.model.step_inputs import StepInputs
from rwkv_batch.runner.graphs.pieces import PROMPT_TOKENS, GraphPieces, Pieces
from rwkv_batch.runner.graphs.prefill import PrefillSize, StagedPrompts, smallest_fitting

logger = logging.getLogger(__name__)

TOKENS = tuple(PROMPT_TOKENS * part // 4 for part in (1, 2, 3, 4))
assert PrefillSize(MAX_ROWS_IN_PIECES, TOKENS[-1]).holds(1, MAX_TOKENS_IN_PIECES), "each padding row takes a token"


class PromptPieces:
    """Captures and replays pieces of prefill steps. Engine thread only."""

    def __init__(self, pieces: GraphPieces, logits: Tensor, depth: int = 2) -> None:
        """logits [rows, V] fp32: output of the steps; depth: steps in flight."""
        self.sizes = tuple(PrefillSize(min(MAX_ROWS_IN_PIECES, len(logits)), tokens) for tokens in TOKENS)
        self._pieces = pieces
        self._logits = logits
        self._staged = StagedPrompts(self.sizes[-1], [pieces.graph_stage.device], depth)
        self._captured: dict[tuple[PrefillSize, int], torch.cuda.CUDAGraph] = {}

    def size_for(self, inputs: StepInputs) -> PrefillSize | None:
        """Return the smallest size for a step; None if none fits."""
        return smallest_fitting(self.sizes, inputs)

    def warm_up(self) -> None:
        """Capture every size, largest first."""
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
