"""Steps in pieces of a few layers.

For one stage on one GPU. The host can launch a prefill between two pieces. Each piece of a decode step is a graph.
Pieces pass activations on in memory of their own. Rows, tokens and logits are those of `DecodeGraphs`, so no other
decode graph may run between two pieces. Short prompts have piece graphs too (`prefill.py`). All other steps are
launched kernel by kernel.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from rwkv_batch.config import WHOLE_STEPS
from rwkv_batch.model.step_inputs import StepInputs
from rwkv_batch.runner.graphs.capture import GraphStage

logger = logging.getLogger(__name__)

Piece = TypeVar("Piece")
MIN_ROWS, SPACING, LARGE, LARGE_SPACING = 32, 16, 512, 128
"""Sizes with pieces: multiples of SPACING, above LARGE of LARGE_SPACING. Smaller steps are short."""
PROMPT_TOKENS = 512
"""A layer over this many prompt tokens takes about as long as in a decode step of many rows.

Without graphs, a piece over more tokens has fewer layers. A piece over fewer tokens does not have more, because the
host needs as long to launch them.
"""

MIN_PARAMETERS = 5 * 10**9
"""Smallest model whose steps have pieces by default.

Steps of smaller models are short: their last two pieces take less time than the host's work between two steps.
"""
MAX_PIECES = 16
"""Pieces of a step by default, at most"""
MIN_QUEUED, MAX_QUEUED, QUEUED_DECAY = 2, 8, 1 / 64
"""Pieces that are queued when `Pieces.run` returns. Two more after a step before which the device was idle, because the
host needed longer (with masks of 320 rows: 2.5 ms); fewer again by QUEUED_DECAY a step."""


def piece_layers(configured: int, graph_stages: Sequence[GraphStage], parameters: int) -> int:
    """Return the layers per piece of a step; 0 for whole steps.

    Only a single stage without streamed layers has pieces. configured: see `EngineConfig.batch_step_layers`.
    parameters: of the model.
    """
    if len(graph_stages) > 1 or graph_stages[0].stage.num_streamed or configured == WHOLE_STEPS:
        return 0
    return configured or (-(-len(graph_stages[0].stage.layers) // MAX_PIECES) if parameters >= MIN_PARAMETERS else 0)


class DecodeSteps(Protocol):
    """The part of `DecodeGraphs` that pieces use."""

    graph_stages: list[GraphStage]
    sizes: list[int]

    def fill_padding(self, size: int, adapters: bool = False) -> None: ...

    def inputs(self, number: int, size: int, adapters: bool = False) -> tuple[StepInputs, Tensor | None]:
        """See DecodeGraphs."""

    def finish(self, x: Tensor, inputs: StepInputs, sampled: bool) -> None:
        """See DecodeGraphs."""


class Pieces(Generic[Piece]):
    def __init__(self, size: int, pieces: Sequence[Piece], launch: Callable[[Piece], Callable[[], None]]) -> None:
        """size: rows or tokens, including padding
        launch: launches a piece; returns a function that waits until the piece is done.
        """
        self.size = size
        self._pieces = pieces
        self._launch = launch

    def run(self, between: Callable[[], None], ended: Callable[[], None], queued: int = 2) -> Callable[[], None]:
        """Launch the pieces, each when the previous one begins. The inputs are already staged.

        `between` runs when a piece is on the device and none is queued behind it. Its launches run before the next
        piece. `ended` waits for the previous step. Returns a function that waits for this step. The last `queued`
        pieces are still to run on return, so the host stays ahead of the device.
        """
        num_waiting = max(1, len(self._pieces) - queued + 1)
        for piece in self._pieces[:num_waiting]:
            before, ended = ended, self._launch(piece)
            before()
            with torch.inference_mode(False):  # Tensors of `between` may outlive this step.
                between()
        for piece in self._pieces[num_waiting:]:
            ended = self._launch(piece)
        return ended


class GraphPieces:
    """Captures the pieces of decode steps, and runs pieces of all steps. Engine thread only."""

    def __init__(self, decode: DecodeSteps, piece_layers: int) -> None:
        """The last piece may have fewer layers."""
        self._decode = decode
        self.graph_stage = graph_stage = decode.graph_stages[0]
        layers = len(graph_stage.stage.layers)
        self._piece_layers = piece_layers
        self.parts = _parts(layers, piece_layers)
        self.sizes = [size for size in decode.sizes if _has_pieces(size) or size == decode.sizes[-1]]
        shape = 2, max(decode.sizes[-1], PROMPT_TOKENS), graph_stage.stage.width
        self._carry = torch.empty(shape, dtype=graph_stage.stage.precision.activations, device=graph_stage.device)
        """[2, tokens, C]: x after the last piece, and v_first. Only one step at a time is in pieces."""
        self._captured: dict[tuple[int, int, bool], torch.cuda.CUDAGraph] = {}
        """by size, piece, and whether it samples (last piece only)"""
        self._ended: Callable[[], None] = lambda: None
        """waits until the last step in pieces is done"""
        self._last: torch.cuda.Event | None = None
        """of the last launch"""
        self._queued: float = MIN_QUEUED

    def for_rows(self, rows: int, sampled: bool) -> Pieces[torch.cuda.CUDAGraph] | None:
        """Return the pieces of a step. None for few rows. Raises CaptureError."""
        if rows < MIN_ROWS // 2:
            return None
        size = next(size for size in self.sizes if size >= rows)
        return Pieces(size, self._graphs(size, sampled), self.launch)

    def run(self, pieces: Pieces[Piece], between: Callable[[], None]) -> None:
        was_idle = self._last is not None and self._last.query()
        queued = self._queued + 2 if was_idle else self._queued - QUEUED_DECAY
        self._queued = min(max(queued, MIN_QUEUED), MAX_QUEUED)
        self._ended = pieces.run(between, self._ended, int(self._queued))

    @torch.inference_mode()
    def run_layers(self, inputs: StepInputs, between: Callable[[], None]) -> tuple[Tensor, StepInputs]:
        """Run `Pipeline.run_layers` in pieces, for rows without an adapter.

        Returns the residual stream [T, C] and the inputs on the device.
        """
        stage, tokens = self.graph_stage.stage, len(inputs.tokens)
        here = inputs.to(self.graph_stage.device)
        x, v_first = stage.embed(here.tokens), None

        def launch(part: range) -> Callable[[], None]:
            nonlocal x, v_first
            x, v_first = stage.run_part(part, x, v_first, here)
            return self._record_event()

        piece_layers = max(1, self._piece_layers * PROMPT_TOKENS // max(PROMPT_TOKENS, tokens))
        self.run(Pieces(tokens, _parts(len(stage.layers), piece_layers), launch), between)
        return x, here

    def warm_up(self) -> None:
        """Capture all pieces, largest size first."""
        started = time.perf_counter()
        for size in reversed(self.sizes):
            for sampled in (True, False):
                self._graphs(size, sampled)
        logger.info("captured %d pieces of decode graphs in %.1f s", len(self._captured), time.perf_counter() - started)

    def launch(self, graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
        """Returns a function that waits until the piece is done."""
        with self.graph_stage.current():
            graph.replay()
        return self._record_event()

    def _record_event(self) -> Callable[[], None]:
        """Returns a function that waits for everything launched so far."""
        self._last = torch.cuda.current_stream(self.graph_stage.device).record_event()
        wait: Callable[[], None] = self._last.synchronize
        return wait

    def _graphs(self, size: int, sampled: bool) -> list[torch.cuda.CUDAGraph]:
        return [self._graph(size, number, sampled) for number in range(len(self.parts))]

    def _graph(self, size: int, number: int, sampled: bool) -> torch.cuda.CUDAGraph:
        key = (size, number, sampled and number == len(self.parts) - 1)
        if key not in self._captured:
            with self.graph_stage.current():
                self._decode.fill_padding(size)
                name = f"piece {number} of a decode graph of {size} rows on {self.graph_stage.device}"
                self._captured[key] = self.graph_stage.recorder.record(lambda: self._step(*key), name)
        return self._captured[key]

    def _step(self, size: int, number: int, sampled: bool) -> None:
        inputs, input_tokens = self._decode.inputs(0, size)
        assert input_tokens is not None
        x = self.compute(number, input_tokens, inputs)
        if x is not None:
            self._decode.finish(x, inputs, sampled)

    def compute(self, number: int, tokens: Tensor, inputs: StepInputs) -> Tensor | None:
        """Inside a graph: run one piece over tokens [T]. The last one returns x [T, C]."""
        stage, part = self.graph_stage.stage, self.parts[number]
        x, v_first = self._carry[0, : len(tokens)], self._carry[1, : len(tokens)]
        after, first = stage.run_part(part, x if number else stage.embed(tokens), v_first if number else None, inputs)
        if number == len(self.parts) - 1:
            return after
        x.copy_(after)
        if not number:
            v_first.copy_(first)
        return None


def _parts(layers: int, piece_layers: int) -> list[range]:
    return [range(start, min(start + piece_layers, layers)) for start in range(0, layers, piece_layers)]


def _has_pieces(size: int) -> bool:
    return size >= MIN_ROWS and size % (SPACING if size <= LARGE else LARGE_SPACING) == 0
