"""Prefill as CUDA graphs.

A graph is launched at once. Kernel by kernel, up to some 2,000 tokens of 7.2B take the host longer than the GPU.

A graph reads up to as many rows and tokens as its size says. The remaining tokens are padding. Padding rows read them,
from the zero state into the dummy slot; there is always one such row. A padding row may have no token.

Prompts of batch rows also run in pieces of a few layers. Launched kernel by kernel, such a step takes the host three
times as long as the GPU. A new interactive request would wait for it. While interactive requests arrive, the batch's
prefill per step is limited to `shares.MAX_TOKENS_IN_PIECES`, so that it fits these graphs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from rwkv_batch.core.draft_costs import Shape
from rwkv_batch.core.drafters import MAX_DRAFT_TOKENS, MAX_ROWS
from rwkv_batch.core.shares import MAX_ROWS_IN_PIECES, MAX_TOKENS_IN_PIECES
from rwkv_batch.model.ops import HasLateTokens
from rwkv_batch.model.step_inputs import CONTINUES, StepInputs, step_inputs
from rwkv_batch.runner.graphs.capture import Array, CaptureError, GraphStage, StagedArrays, run_stages
from rwkv_batch.runner.graphs.pieces import PROMPT_TOKENS, GraphPieces, Pieces
from state_pool.layout import DUMMY_SLOT, ZERO_SLOT

logger = logging.getLogger(__name__)

ROWS, TOKENS = (1, 4, 8, 16, 32, 48), (16, 32, 64, 80, 96, 112, 128, 160, 192)
"""Of short steps: sizes that fill a tile of our own GEMMs (`kernels.cuda.hopper_gemm.TILE_ROWS`)."""
LONG_ROWS, LONG_TOKENS = (1, 8, 32, 64, 128), (256, 320, 384, 448, 512, 640, 768, 1024, 1280, 1536, 2048)
"""Of longer ones. The head of fp8 is less exact for more than 64 rows."""
LONG_ROW = 6
"""Tokens of a long graph's rows on average, padding included: fewer are read token by token (`kernels.cuda.ops`)."""
PADDING_DRAFT = 6
"""In a graph of drafts: a row of padding and those that continue it, as a row with a draft of five tokens."""
MAX_SHAPES = 4096
"""Steps whose graphs are remembered."""
LAYER_SECONDS = 0.001
"""The host launches a layer in 0.8 to 1.4 ms (H200, 24 and 32 layers). A long graph that is slower loses by padding."""
PROBE_TOKENS, MAX_ESTIMATE = 256, 1.5
"""The time of a graph of about 256 tokens shows which longer ones would take 1.5 times their limit. Slow GPUs do not
capture those. Graphs of up to 256 tokens are always kept: their padding costs little."""


class PrefillSize(NamedTuple):
    """Capacity of a graph, including padding."""

    rows: int
    """rows that it serves; it has one more, of padding"""
    tokens: int

    @property
    def num_drafts(self) -> int:
        """About the number of drafts in its steps, by which kernels choose their launch.

        A graph with no more tokens than the longest draft's step is taken to have one. Others: drafts of three tokens.
        """
        if self not in VERIFY_SIZES:
            return 0
        return 1 if self.tokens <= 1 + MAX_DRAFT_TOKENS else self.rows // 4

    def holds(self, rows: int, tokens: int) -> bool:
        """Return whether a step fits. In a graph of drafts, each row has one token."""
        return rows <= self.rows and tokens <= self.tokens and (self.rows < self.tokens or rows == tokens)


NO_SIZE = PrefillSize(0, 0)
VERIFY_TOKENS = (3, 4, 5, 6, 7, 8, 9, 13, 17, 20, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192)
VERIFY_SIZES = tuple(PrefillSize(tokens, tokens) for tokens in VERIFY_TOKENS)
"""Of steps that verify drafts: each row has one token."""
SIZES = (
    *(PrefillSize(rows, tokens) for rows in ROWS for tokens in TOKENS if rows < tokens),
    *(PrefillSize(rows, tokens) for rows in LONG_ROWS for tokens in LONG_TOKENS if LONG_ROW * rows <= tokens),
)
MAX_LATE_TOKENS = MAX_ROWS * MAX_DRAFT_TOKENS
"""Drafted tokens of a step."""


def input_lengths(rows: int, tokens: int) -> dict[str, int]:
    """Return the array lengths of a step's inputs."""
    per_token = dict.fromkeys(("tokens", "token_rows"), tokens)
    per_row = dict.fromkeys(("read_slots", "write_slots"), rows)
    return {**per_token, **per_row, "cu_seqlens": rows + 1, "logit_tokens": rows}


def empty_step() -> StepInputs:
    nothing = torch.zeros(0, dtype=torch.int64)
    return StepInputs(nothing, torch.zeros(1, dtype=torch.int64), nothing, nothing, nothing, 1)


def step_of_drafts(size: PrefillSize) -> StepInputs:
    """Return a step that fills a graph with drafts."""
    reads = [ZERO_SLOT if i * size.num_drafts % size.rows < size.num_drafts else CONTINUES for i in range(size.rows)]
    return step_inputs([[0]] * size.rows, reads, [DUMMY_SLOT] * size.rows, [])


class StagedPrompts:
    """The staged inputs of prefill graphs, on each device."""

    def __init__(self, size: PrefillSize, graph_stages: Sequence[GraphStage], depth: int) -> None:
        """size: the largest step; depth: steps in flight."""
        devices = [graph_stage.device for graph_stage in graph_stages]
        self._ops = cast(HasLateTokens, graph_stages[0].stage.ops)  # graphs need the cuda kernels
        late = dict.fromkeys(("late_places", "late_sources"), MAX_LATE_TOKENS)
        self.arrays = StagedArrays(input_lengths(size.rows + 1, size.tokens) | late, devices, depth)

    def fill(self, inputs: StepInputs, size: PrefillSize) -> None:
        """Stage a step's inputs on all devices. Stages the padding too."""
        with self.arrays.filling() as host:
            pad(host, inputs, size)
            end = 0
            for late in inputs.late_tokens:
                first, end = end, end + len(late.places)
                host["late_places"][first:end], host["late_sources"][first:end] = late.places, late.sources
        staged, end = self.arrays.on_device[0], 0
        for late in inputs.late_tokens:
            first, end = end, end + len(late.places)
            places, sources = staged["late_places"][first:end], staged["late_sources"][first:end]
            self._ops.place_tokens(staged["tokens"], places, late.tokens, sources)

    def fill_padding(self, size: PrefillSize) -> None:
        """Stage a step of padding only, for the capture of a graph. Drafts are rows that continue others, as later."""
        self.fill(step_of_drafts(size) if size.num_drafts else empty_step(), size)

    def inputs(self, number: int, size: PrefillSize) -> StepInputs:
        """Inside a graph: return the inputs of a stage."""
        staged, rows = self.arrays.on_device[number], size.rows + 1
        return StepInputs(
            tokens=staged["tokens"][: size.tokens],
            cu_seqlens=staged["cu_seqlens"][: rows + 1],
            read_slots=staged["read_slots"][:rows],
            write_slots=staged["write_slots"][:rows],
            logit_tokens=staged["logit_tokens"][: size.rows],
            max_seqlen=size.tokens,  # an upper bound; kernels only test for 1
            continuing_rows=size.rows - size.num_drafts if size.num_drafts else 0,  # most graphs of drafts are full
            token_rows=staged["token_rows"][: size.tokens],
        )


class PrefillGraphs:
    """Captures and replays prefill over all stages. Engine thread only."""

    def __init__(
        self,
        graph_stages: Sequence[GraphStage],
        logits: Tensor,
        depth: int = 2,
        sizes: Sequence[PrefillSize] = (),
    ) -> None:
        """logits [rows, V] fp32: output of the steps
        depth: steps in flight
        sizes: smallest first; default: `usable_sizes`. Long ones are used after `warm_up`, which may drop some
        """
        self._all_sizes = sizes or usable_sizes(len(logits))
        self.sizes = [size for size in self._all_sizes if size.tokens <= PROBE_TOKENS]
        self._max_seconds = LAYER_SECONDS * sum(len(one.stage.layers) for one in graph_stages)
        self._graph_stages = list(graph_stages)
        self._logits = logits
        self._captured: dict[tuple[int, PrefillSize], torch.cuda.CUDAGraph] = {}
        self.seconds: dict[PrefillSize, float] = {}
        """of captured graphs, on all stages"""
        self._size_of: dict[tuple[int, int], PrefillSize] = {}
        largest = PrefillSize(*map(max, zip(*self._all_sizes, strict=True)))
        self._staged = StagedPrompts(largest, graph_stages, depth)

    def size_for(self, inputs: StepInputs) -> PrefillSize | None:
        """Return the smallest graph for a step. None: see `smallest_fitting`."""
        size = NO_SIZE if inputs.tokens.is_cuda or inputs.adapters is not None else self._smallest(*shape_of(inputs))
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

    def warm_up(self) -> None:
        """Capture every size: one that shows which others are too long, then the largest first.

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
        logger.info("captured %d graphs of prompts in %.1f s", len(self._captured), time.perf_counter() - started)

    def _capture(self, size: PrefillSize) -> float:
        """Capture a size on all stages, if it is not yet. Returns its seconds."""
        for number in range(len(self._graph_stages)):
            self._graph(number, size)
        return self.seconds[size]

    def _drop(self, size: PrefillSize) -> None:
        self.sizes.remove(size)
        self.seconds.pop(size, None)
        for number in range(len(self._graph_stages)):
            self._captured.pop((number, size), None)

    @torch.inference_mode()
    def run(self, inputs: StepInputs, size: PrefillSize) -> Tensor:
        """Launch a step that fits: inputs on the CPU -> logits [R, V] fp32. The next run overwrites them."""
        graphs = [self._graph(number, size) for number in range(len(self._graph_stages))]
        self._staged.fill(inputs, size)
        run_stages(self._graph_stages, graphs, size.tokens, self._staged.arrays)
        return self._logits[: len(inputs.logit_tokens)]

    def _graph(self, number: int, size: PrefillSize) -> torch.cuda.CUDAGraph:
        key = (number, size)
        if key not in self._captured:
            graph_stage = self._graph_stages[number]
            with graph_stage.current():
                self._staged.fill_padding(size)
                name = f"a graph of {size.tokens} tokens in {size.rows} rows on {graph_stage.device}"
                self._captured[key] = graph_stage.recorder.record(lambda: self._step(number, size), name)
            self.seconds[size] = self.seconds.get(size, 0.0) + graph_stage.recorder.seconds
        return self._captured[key]

    def _step(self, number: int, size: PrefillSize) -> None:
        """Run one step of a stage. Allocates nothing that survives: all graphs share one memory pool."""
        graph_stage, inputs = self._graph_stages[number], self._staged.inputs(number, size)
        x = graph_stage.forward(inputs, inputs.tokens if number == 0 else None)
        if number == len(self._graph_stages) - 1:
            graph_stage.stage.logits(x, inputs, self._logits)


def smallest_fitting(sizes: Sequence[PrefillSize], inputs: StepInputs) -> PrefillSize | None:
    """Return the first size that fits a step.

    None: no size fits, the tokens are on the device, or rows have adapters.
    """
    if inputs.tokens.is_cuda or inputs.adapters is not None:
        return None
    return next((size for size in sizes if size.holds(*shape_of(inputs))), None)


def shape_of(inputs: StepInputs) -> tuple[int, int]:
    """Return the numbers of rows and tokens."""
    return inputs.read_slots.shape[0], inputs.tokens.shape[0]  # `len` of a tensor takes three times as long


def usable_sizes(max_rows: int, max_tokens: int = LONG_TOKENS[-1], verifies: bool = False) -> tuple[PrefillSize, ...]:
    """Return the sizes that may be worth a graph, smallest first.

    max_rows: of logits; max_tokens: of prompts in a step; verifies: also for steps that verify drafts
    """
    most = next((tokens for tokens in LONG_TOKENS if tokens >= max_tokens), LONG_TOKENS[-1])
    sizes = (size for size in SIZES if size.rows <= max_rows and size.tokens <= most)
    return tuple(sorted([*sizes, *VERIFY_SIZES] if verifies else sizes, key=_cost))


def _cost(size: PrefillSize) -> tuple[int, int]:
    return size.tokens, size.rows  # a row of padding reads and writes a state


def pad(arrays: Mapping[str, Array], inputs: StepInputs, size: PrefillSize) -> None:
    """Write a step's inputs on the CPU and their padding into arrays [n] int64, for a graph that fits it.

    Padding rows share the padding tokens equally: one long padding row would be slower than the step's own rows. In a
    graph of drafts they continue each other, as the other rows do.
    """
    rows, tokens = shape_of(inputs)
    cu_seqlens, token_rows = arrays["cu_seqlens"][: size.rows + 2], arrays["token_rows"][: size.tokens]
    missing = size.rows + 1 - rows
    if size.num_drafts:  # each row has one token, but for the last one
        cu_seqlens[:-1], cu_seqlens[-1], token_rows[:] = _NUMBERS[: size.rows + 1], size.tokens, _NUMBERS[: size.tokens]
    else:
        cu_seqlens[:rows] = inputs.cu_seqlens.numpy()[:-1]
        cu_seqlens[rows:] = tokens - np.arange(missing + 1) * (tokens - size.tokens) // missing
        token_rows[:] = np.repeat(np.arange(size.rows + 1), cu_seqlens[1:] - cu_seqlens[:-1])
    for name, values, length, padding in (
        ("tokens", inputs.tokens, size.tokens, 0),
        ("read_slots", inputs.read_slots, size.rows + 1, ZERO_SLOT),
        ("write_slots", inputs.write_slots, size.rows + 1, DUMMY_SLOT),
        ("logit_tokens", inputs.logit_tokens, size.rows, size.tokens - 1),
    ):
        array, count = arrays[name], values.shape[0]
        array[:count] = values.numpy()
        array[count:length] = padding
    if size.num_drafts:
        arrays["read_slots"][rows : size.rows + 1] = _PADDING_READS[:missing]


_NUMBERS = np.arange(VERIFY_TOKENS[-1] + 1)
_PADDING_READS = np.where(_NUMBERS % PADDING_DRAFT > 0, CONTINUES, ZERO_SLOT)
"""Read slots of padding rows in a graph of drafts."""


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
