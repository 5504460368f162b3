"""Steps that are launched a few layers at a time, so that the host may launch something else between two pieces.

One stage on one GPU. Decode steps are graphs of some layers each; what a piece leaves for the next lies in memory of
its own. All else is that of `DecodeGraphs`, rows, tokens and logits too: a step that is launched between two pieces
must not be one of those. So are steps that read short prompts (`prompt_pieces.py`); others are launched kernel by
kernel.
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
from rwkv_batch.runner.stage_graphs import GraphStage

logger = logging.getLogger(__name__)

Piece = TypeVar("Piece")
MIN_ROWS, SPACING, LARGE, LARGE_SPACING = 32, 16, 512, 128
"""Sizes that have pieces: multiples of SPACING, beyond LARGE of LARGE_SPACING. With fewer rows a step is short."""
PROMPT_TOKENS = 512
"""Prompt tokens over which as many layers take about as long as in a step of many rows that decode. Without graphs, a
piece has fewer layers over more; over less it does not have more, since the host takes as long to launch them."""

MIN_PARAMETERS = 5 * 10**9
"""Of a model whose steps have pieces unless told otherwise: with fewer, a step of many rows is short, and the last two
pieces do not last as long as what the host does between two steps."""
MAX_PIECES = 16
"""Of a step, unless told otherwise."""


def piece_layers(configured: int, places: Sequence[GraphStage], parameters: int) -> int:
    """Layers in a piece of a step over these stages, 0 for whole steps: one stage can, whose layers stay on the device.

    `configured`: see `EngineConfig.batch_step_layers`; `parameters` of the model.
    """
    if len(places) > 1 or places[0].stage.num_streamed or configured == WHOLE_STEPS:
        return 0
    return configured or (-(-len(places[0].stage.layers) // MAX_PIECES) if parameters >= MIN_PARAMETERS else 0)


class DecodeSteps(Protocol):
    """What `DecodeGraphs` is for its pieces."""

    places: list[GraphStage]
    sizes: list[int]

    def fill_padding(self, size: int, adapters: bool = False) -> None:
        """See DecodeGraphs."""

    def inputs(self, number: int, size: int, adapters: bool = False) -> tuple[StepInputs, Tensor | None]:
        """See DecodeGraphs."""

    def finish(self, x: Tensor, inputs: StepInputs, sampled: bool) -> None:
        """See DecodeGraphs."""


class Pieces(Generic[Piece]):
    """Of one step."""

    def __init__(
        self,
        size: int,
        pieces: Sequence[Piece],
        launch: Callable[[Piece], Callable[[], None]],
    ) -> None:
        """`size`: rows or tokens, padding included; `launch` returns what waits until the piece has run."""
        self.size = size
        self._pieces = pieces
        self._launch = launch

    def run(self, between: Callable[[], None], ended: Callable[[], None]) -> Callable[[], None]:
        """Launch the step, whose rows were filled in: each piece when the one before begins. `ended` waits until the
        step before is done; returns what waits until this one is.

        `between` is called when a piece is on the device and none waits behind it; what it launches runs before the
        next. At the end there are two pieces left to do, so that the host is ahead of the device.
        """
        for piece in self._pieces[:-1]:
            before, ended = ended, self._launch(piece)
            before()
            with torch.inference_mode(False):  # what it makes may be kept for longer than this step
                between()
        return self._launch(self._pieces[-1])


class GraphPieces:
    """Captures those of decode steps, and runs all. Engine thread only."""

    def __init__(self, decode: DecodeSteps, piece_layers: int) -> None:
        """`piece_layers`: in each but the last, which may have fewer."""
        self._decode = decode
        self.graph_stage = graph_stage = decode.places[0]
        layers = len(graph_stage.stage.layers)
        self._piece_layers = piece_layers
        self.parts = _parts(layers, piece_layers)
        self.sizes = [size for size in decode.sizes if _has_pieces(size) or size == decode.sizes[-1]]
        shape = 2, max(decode.sizes[-1], PROMPT_TOKENS), graph_stage.stage.width
        self._carry = torch.empty(shape, dtype=graph_stage.stage.precision.activations, device=graph_stage.device)
        """[2, tokens, C]: x behind the last piece, v_first; of one step, since two in pieces are never under way"""
        self._captured: dict[tuple[int, int, bool], torch.cuda.CUDAGraph] = {}
        """by size, piece, and whether it draws (the last one's only)"""
        self._ended: Callable[[], None] = lambda: None
        """waits until the last step in pieces is done"""

    def for_rows(self, rows: int, sampled: bool) -> Pieces[torch.cuda.CUDAGraph] | None:
        """The pieces of a step of so many rows; None: they are too few. Raises CaptureError."""
        if rows < MIN_ROWS // 2:
            return None
        size = next(size for size in self.sizes if size >= rows)
        return Pieces(size, self._graphs(size, sampled), self.launch)

    def run(self, pieces: Pieces[Piece], between: Callable[[], None]) -> None:
        """See `Pieces.run`."""
        self._ended = pieces.run(between, self._ended)

    @torch.inference_mode()
    def hidden(self, inputs: StepInputs, between: Callable[[], None]) -> tuple[Tensor, StepInputs]:
        """`Pipeline.hidden` in pieces, for rows without an adapter: the residual stream [T, C] and the inputs there."""
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
        """Capture all of them now, those of the largest size first."""
        started = time.perf_counter()
        for size in reversed(self.sizes):
            for sampled in (True, False):
                self._graphs(size, sampled)
        logger.info("captured %d pieces of decode graphs in %.1f s", len(self._captured), time.perf_counter() - started)

    def launch(self, graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
        """Launch a piece; returns what waits until it is done."""
        with self.graph_stage.current():
            graph.replay()
        return self._record_event()

    def _record_event(self) -> Callable[[], None]:
        """What waits until all that was launched so far is done."""
        wait: Callable[[], None] = torch.cuda.current_stream(self.graph_stage.device).record_event().synchronize
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
        """What a graph holds."""
        inputs, input_tokens = self._decode.inputs(0, size)
        assert input_tokens is not None
        x = self.compute(number, input_tokens, inputs)
        if x is not None:
            self._decode.finish(x, inputs, sampled)

    def compute(self, number: int, tokens: Tensor, inputs: StepInputs) -> Tensor | None:
        """Inside a graph: the piece of this number, of a step over `tokens` [T]. Returns x [T, C] behind the last."""
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
    return [range(at, min(at + piece_layers, layers)) for at in range(0, layers, piece_layers)]


def _has_pieces(size: int) -> bool:
    return size >= MIN_ROWS and size % (SPACING if size <= LARGE else LARGE_SPACING) == 0
