"""Sizes of prefill graphs, and the inputs that they read from staged arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch

from rwkv_batch.core.drafters import MAX_DRAFT_TOKENS, MAX_ROWS
from rwkv_batch.kernels.cuda.adapters import TILE, fill_tiles, max_tiles
from rwkv_batch.model.ops import HasLateTokens
from rwkv_batch.model.step_inputs import CONTINUES, AdapterTiles, StepInputs, step_inputs
from rwkv_batch.runner.graphs.capture import Array, GraphStage, StagedArrays
from state_pool.layout import DUMMY_SLOT, ZERO_SLOT

ROWS, TOKENS = (1, 4, 8, 16, 32, 48), (16, 32, 64, 80, 96, 112, 128, 160, 192)
"""Of short steps: sizes that fill a tile of our own GEMMs (`kernels.cuda.hopper_gemm.TILE_ROWS`)."""
LONG_ROWS, LONG_TOKENS = (1, 8, 32, 64, 128), (256, 320, 384, 448, 512, 640, 768, 1024, 1280, 1536, 2048)
"""Of longer ones. The head of fp8 is less exact for more than 64 rows."""
LONG_ROW = 6
"""Tokens of a long graph's rows on average, padding included: fewer are read token by token (`kernels.cuda.ops`)."""
PADDING_DRAFT = 6
"""In a graph of drafts: a row of padding and those that continue it, as a row with a draft of five tokens."""


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

    def __init__(
        self, size: PrefillSize, graph_stages: Sequence[GraphStage], depth: int, max_adapters: int = 0
    ) -> None:
        """size: the largest step; depth: steps in flight; max_adapters: see `PrefillGraphs`"""
        devices = [graph_stage.device for graph_stage in graph_stages]
        self._ops = cast(HasLateTokens, graph_stages[0].stage.ops)  # graphs need the cuda kernels
        lengths = input_lengths(size.rows + 1, size.tokens)
        lengths |= dict.fromkeys(("late_places", "late_sources"), MAX_LATE_TOKENS)
        self._max_adapters = max_adapters
        if max_adapters:
            tiles = max_tiles(size.tokens, max_adapters)
            lengths |= {"tile_tokens": tiles * TILE, "tile_numbers": tiles}
        int32 = dict.fromkeys(("tile_tokens", "tile_numbers"), torch.int32)
        self.arrays = StagedArrays(lengths, devices, depth, int32)

    def fill(self, inputs: StepInputs, size: PrefillSize) -> None:
        """Stage a step's inputs on all devices. Stages the padding too."""
        with self.arrays.filling() as host:
            pad(host, inputs, size)
            if inputs.adapters is not None:
                tiles = max_tiles(size.tokens, self._max_adapters)
                fill_tiles(inputs.adapters.numpy(), host["tile_tokens"], host["tile_numbers"][:tiles])
            end = 0
            for late in inputs.late_tokens:
                first, end = end, end + len(late.places)
                host["late_places"][first:end], host["late_sources"][first:end] = late.places, late.sources
        staged, end = self.arrays.on_device[0], 0
        for late in inputs.late_tokens:
            first, end = end, end + len(late.places)
            places, sources = staged["late_places"][first:end], staged["late_sources"][first:end]
            self._ops.place_tokens(staged["tokens"], places, late.tokens, sources)

    def fill_padding(self, size: PrefillSize, adapters: bool = False) -> None:
        """Stage a step of padding only, for the capture of a graph. Drafts are rows that continue others, as later."""
        inputs = step_of_drafts(size) if size.num_drafts else empty_step()
        self.fill(dataclasses.replace(inputs, adapters=inputs.tokens) if adapters else inputs, size)

    def inputs(self, number: int, size: PrefillSize, adapters: bool = False) -> StepInputs:
        """Inside a graph: return the inputs of a stage."""
        staged, rows, tiles = self.arrays.on_device[number], size.rows + 1, None
        if adapters:
            count = max_tiles(size.tokens, self._max_adapters)
            tiles = AdapterTiles(
                staged["tile_tokens"][: count * TILE].view(count, TILE), staged["tile_numbers"][:count]
            )
        return StepInputs(
            adapter_tiles=tiles,
            tokens=staged["tokens"][: size.tokens],
            cu_seqlens=staged["cu_seqlens"][: rows + 1],
            read_slots=staged["read_slots"][:rows],
            write_slots=staged["write_slots"][:rows],
            logit_tokens=staged["logit_tokens"][: size.rows],
            max_seqlen=size.tokens,  # an upper bound; kernels only test for 1
            continuing_rows=size.rows - size.num_drafts if size.num_drafts else 0,  # most graphs of drafts are full
            token_rows=staged["token_rows"][: size.tokens],
        )


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
