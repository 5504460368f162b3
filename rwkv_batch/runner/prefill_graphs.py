"""Short prompts as CUDA graphs: launched one by one, the kernels of a forward take the host longer than the GPU.

What that is worth: docs/performance.md, "Steps that mix prompts and decoding rows".

A graph reads up to 48 rows of up to 512 tokens in all. Rows and tokens that are not there are padding: every graph has
one row more than it serves, so that some row takes what is left of the tokens, from the zero state into the dummy slot.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rwkv_batch.model.step_inputs import StepInputs
from rwkv_batch.runner.graph_capture import StagedArrays
from rwkv_batch.runner.stage import Stage
from rwkv_batch.runner.stage_graphs import GraphStage, run_stages
from state_pool.layout import DUMMY_SLOT, ZERO_SLOT

logger = logging.getLogger(__name__)

ROWS = (1, 4, 8, 16, 32, 48)
TOKENS = (16, 32, 64, 80, 96, 112, 128, 160, 192, 256, 320, 384, 448, 512)
"""Up to 256 those that fill a tile of our own products (`kernels.cuda.wide.TILE_ROWS`)."""
MAX_PADDED_WORK = 2.5e12
"""Tokens times weights of a GPU, from which on padding is a loss: it takes as long as the host (360 tokens of 7.2B)."""


class PrefillSize(NamedTuple):
    """What a graph holds, padding included."""

    rows: int
    """those it serves; there is one more"""
    tokens: int

    def holds(self, rows: int, tokens: int) -> bool:
        """Whether so many rows with so many tokens fit: each row of padding takes a token at least."""
        return rows <= self.rows and tokens + (self.rows - rows) + 1 <= self.tokens


SIZES = tuple(size for rows in ROWS for tokens in TOKENS if (size := PrefillSize(rows, tokens)).holds(rows, rows))


def input_lengths(rows: int, tokens: int) -> dict[str, int]:
    """Of the arrays of a step's inputs, for at most so many rows and tokens."""
    per_token = dict.fromkeys(("tokens", "token_rows"), tokens)
    return {**per_token, "cu_seqlens": rows + 1, **dict.fromkeys(("read_slots", "write_slots", "logit_tokens"), rows)}


def empty_step() -> StepInputs:
    """A step without rows and tokens."""
    nothing = torch.zeros(0, dtype=torch.int64)
    return StepInputs(nothing, torch.zeros(1, dtype=torch.int64), nothing, nothing, nothing, 1)


class StagedPrompts:
    """Where graphs of prompts find a step's rows and tokens, on each of several devices."""

    def __init__(self, size: PrefillSize, devices: Sequence[torch.device], depth: int) -> None:
        """For sizes of at most so many rows and tokens; `depth`: steps on their way at once."""
        self.arrays = StagedArrays(input_lengths(size.rows + 1, size.tokens), devices, depth)

    def fill(self, inputs: StepInputs, size: PrefillSize) -> None:
        """A step, its inputs on the CPU, and its padding on their way to all devices."""
        with self.arrays.filling() as host:
            for name, values in padded(inputs, size).items():
                host[name][: len(values)] = values

    def fill_padding(self, size: PrefillSize) -> None:
        """A step over nobody, for a graph of this size that is to be captured."""
        self.fill(empty_step(), size)

    def inputs(self, number: int, size: PrefillSize) -> StepInputs:
        """Inside a graph: what the stage of this number reads of a step."""
        staged, rows = self.arrays.on_device[number], size.rows + 1
        return StepInputs(
            tokens=staged["tokens"][: size.tokens],
            cu_seqlens=staged["cu_seqlens"][: rows + 1],
            read_slots=staged["read_slots"][:rows],
            write_slots=staged["write_slots"][:rows],
            logit_tokens=staged["logit_tokens"][: size.rows],
            max_seqlen=size.tokens,  # at most; the kernels ask only whether it is one
            token_rows=staged["token_rows"][: size.tokens],
        )


class PrefillGraphs:
    """Captures and replays forwards of short prompts over all stages. Engine thread only."""

    def __init__(self, places: Sequence[GraphStage], logits: Tensor, depth: int = 2) -> None:
        """logits [rows, V] fp32: where the steps leave theirs; `depth`: steps on their way at once."""
        self.sizes = usable_sizes([graph_stage.stage for graph_stage in places], len(logits))
        self._places = list(places)
        self._logits = logits
        self._captured: dict[tuple[int, PrefillSize], torch.cuda.CUDAGraph] = {}
        self._staged = StagedPrompts(
            PrefillSize(max(ROWS), max(TOKENS)), [graph_stage.device for graph_stage in places], depth
        )

    def size_for(self, inputs: StepInputs) -> PrefillSize | None:
        """The smallest graph for a step; None: none holds it."""
        return smallest_fitting(self.sizes, inputs)

    def warm_up(self) -> None:
        """Capture every size now, largest first."""
        started = time.perf_counter()
        for size in reversed(self.sizes):
            for number in range(len(self._places)):
                self._graph(number, size)
        logger.info("captured %d graphs of prompts in %.1f s", len(self._captured), time.perf_counter() - started)

    @torch.inference_mode()
    def run(self, inputs: StepInputs, size: PrefillSize) -> Tensor:
        """Launch a step that fits: inputs on the CPU -> fp32 logits [R, V], overwritten by the next run."""
        graphs = [self._graph(number, size) for number in range(len(self._places))]
        self._staged.fill(inputs, size)
        run_stages(self._places, graphs, size.tokens, self._staged.arrays)
        return self._logits[: len(inputs.logit_tokens)]

    def _graph(self, number: int, size: PrefillSize) -> torch.cuda.CUDAGraph:
        key = (number, size)
        if key not in self._captured:
            graph_stage = self._places[number]
            with graph_stage.current():
                self._staged.fill_padding(size)
                name = f"a graph of {size.tokens} tokens in {size.rows} rows on {graph_stage.device}"
                self._captured[key] = graph_stage.recorder.record(lambda: self._step(number, size), name)
        return self._captured[key]

    def _step(self, number: int, size: PrefillSize) -> None:
        """What a graph holds. It keeps no tensor of its own: all graphs work in the same memory, one after another."""
        graph_stage, inputs = self._places[number], self._staged.inputs(number, size)
        x = graph_stage.forward(inputs, inputs.tokens if number == 0 else None)
        if number == len(self._places) - 1:
            graph_stage.stage.logits(x, inputs, self._logits)


def smallest_fitting(sizes: Sequence[PrefillSize], inputs: StepInputs) -> PrefillSize | None:
    """The first size that holds a step; None: none does, the host lacks its tokens, or rows have adapters."""
    if inputs.tokens.is_cuda or inputs.adapters is not None:
        return None
    rows, tokens = len(inputs.read_slots), len(inputs.tokens)
    return next((size for size in sizes if size.holds(rows, tokens)), None)


def usable_sizes(stages: Sequence[Stage], max_rows: int) -> tuple[PrefillSize, ...]:
    """The sizes that are worth a graph: with more tokens each stage's GPU takes as long as the host."""
    weights = max(13 * stage.width**2 * len(stage.layers) for stage in stages)
    return tuple(size for size in SIZES if size.rows <= max_rows and size.tokens * weights <= MAX_PADDED_WORK)


def padded(inputs: StepInputs, size: PrefillSize) -> dict[str, np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """A step's arrays for a graph that holds it: the rows that are missing share the tokens that are, a token each at
    least. Equally: one long row of padding would take its kernels longer than the step's own rows."""
    rows, tokens = len(inputs.read_slots), len(inputs.tokens)
    missing = size.rows + 1 - rows
    ends = tokens + np.arange(missing + 1) * (size.tokens - tokens) // missing
    cu_seqlens = np.concatenate([inputs.cu_seqlens.numpy()[:-1], ends])

    def filled(values: Tensor, length: int, padding: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        array = np.full(length, padding, dtype=np.int64)
        array[: len(values)] = values.numpy()
        return array

    return {
        "tokens": filled(inputs.tokens, size.tokens, 0),
        "token_rows": np.repeat(np.arange(size.rows + 1), np.diff(cu_seqlens)),
        "cu_seqlens": cu_seqlens,
        "read_slots": filled(inputs.read_slots, size.rows + 1, ZERO_SLOT),
        "write_slots": filled(inputs.write_slots, size.rows + 1, DUMMY_SLOT),
        "logit_tokens": filled(inputs.logit_tokens, size.rows, size.tokens - 1),
    }
