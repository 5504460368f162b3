"""Decode steps as CUDA graphs, one per padded batch size and stage.

Engine thread only. Usage:

    graphs = DecodeGraphs(make_graph_stages(stages, 960, 2), 960, sampler)   # captures nothing
    graphs.warm_up()                                            # captures all sizes, else each at its first use
    graphs.tokens.store([req_slot], first_tokens)               # after a prefill: the next input token of each slot
    tokens = graphs.run(req_slots, read_slots, write_slots)     # [B] int64 on the last device; does not wait

Each `run` embeds the last token of each request slot, runs all layers of all stages, samples, and stores the new
tokens on the device. So step n+1 may be launched before the host has read step n. Rows may be added, removed or
reordered between steps. A row that must be undone keeps its old state if its write slot differs from its read slot.

`run_logits` does the same without sampling, for rows that need a sampler on the host. If a graph cannot be captured,
CaptureError is raised before any state changes, so the caller can run the step without graphs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from rwkv_batch.kernels.cuda.adapters import TILE, fill_tiles, max_tiles
from rwkv_batch.model.step_inputs import AdapterTiles, StepInputs
from rwkv_batch.runner.graphs.capture import Array, CaptureError, GraphStage, StagedArrays, run_stages
from rwkv_batch.runner.graphs.pieces import GraphPieces, Pieces
from rwkv_batch.runner.links import LastTokens
from rwkv_batch.runner.pipeline import Stage
from state_pool.layout import DUMMY_SLOT, ZERO_SLOT

logger = logging.getLogger(__name__)

Values = Sequence[int] | Array


@runtime_checkable
class DeviceSampler(Protocol):
    """A sampler that runs entirely on the device. So a graph can capture it."""

    def sample_on_device(self, logits: Tensor, req_slots: Tensor, out: Tensor) -> None:
        """Sample one token per row: logits [B, V] fp32, req_slots [B] int32, out [B] int64."""


class Greedy:
    def sample_on_device(self, logits: Tensor, req_slots: Tensor, out: Tensor) -> None:
        """See DeviceSampler."""
        torch.argmax(logits, dim=-1, out=out)


class DecodeGraphs:
    """Captures and replays decode steps. The graphs of a stage share one memory pool."""

    def __init__(
        self,
        graph_stages: Sequence[GraphStage],
        max_rows: int,
        sampler: DeviceSampler | None = None,
        req_slots: int | None = None,
        depth: int = 2,
        logit_rows: int = 0,
        max_adapters: int = 64,
        piece_layers: int = 0,
    ) -> None:
        """max_rows: rows of a step
        req_slots: request slots of the sampler, default max_rows.
        depth: steps in flight.
        logit_rows: minimum number of rows of `logits`.
        max_adapters: different adapters in one step.
        piece_layers: layers per piece of a step (`pieces.piece_layers`); 0: steps have no pieces.

        Steps with adapters have their own graphs, so other steps do not pay for adapters.
        """
        self.graph_stages = list(graph_stages)
        self.max_rows = max_rows
        self.dummy_req_slot = req_slots = max_rows if req_slots is None else req_slots
        self.sizes = padded_sizes(max_rows)
        self._padding = {"read_slots": ZERO_SLOT, "write_slots": DUMMY_SLOT, "req_slots": self.dummy_req_slot}
        self._sampler = sampler or Greedy()
        padded = self.sizes[-1]
        lengths = dict.fromkeys(("read_slots", "write_slots", "req_slots", "req_slots32"), padded)
        self._max_adapters = max_adapters
        tiles = max_tiles(padded, max_adapters)
        lengths |= {"tile_tokens": tiles * TILE, "tile_numbers": tiles}
        devices = [graph_stage.device for graph_stage in self.graph_stages]
        int32 = dict.fromkeys(("req_slots32", "tile_tokens", "tile_numbers"), torch.int32)
        self._staged = StagedArrays(lengths, devices, depth, int32)
        self._row_numbers = [torch.arange(padded + 1, device=graph_stage.device) for graph_stage in self.graph_stages]
        last = self.graph_stages[-1]
        self.tokens = LastTokens(req_slots, self.graph_stages[0].device, last.device, depth)
        self._sampled_tokens = torch.zeros(padded, dtype=torch.int64, device=last.device)
        self._captured: dict[tuple[int, int, bool, bool], torch.cuda.CUDAGraph] = {}
        """by stage, size, whether it samples (last stage only), and whether it adds adapters"""
        self._seconds: dict[tuple[int, int], float] = {}
        """of captured graphs without adapters, by stage and size"""
        assert last.stage.head is not None, "graphs sample from the logits of the last stage"
        vocab = last.stage.head.linear.weight.shape[0]
        self.logits = torch.empty(max(padded, logit_rows), vocab, dtype=torch.float32, device=last.device)
        """[rows, V] of every graph's step, overwritten by the next step"""
        self.pieces = GraphPieces(self, piece_layers) if piece_layers else None

    @staticmethod
    def unavailable_reason(stages: Sequence[Stage], sampler: object) -> str | None:
        """Return why decode graphs cannot be used.

        None: these stages and this sampler can use decode graphs.
        """
        others = {stage.ops.name for stage in stages} - {"cuda"}
        if others:
            return f"decode graphs need the cuda kernels on every device, not {', '.join(sorted(others))}"
        if not isinstance(sampler, DeviceSampler):
            return f"decode graphs need a sampler whose work can be captured, not {type(sampler).__name__}"
        return None

    @property
    def is_recording(self) -> bool:
        """Whether any stage is capturing a graph. Includes graphs of prompts."""
        return any(graph_stage.recorder.is_recording for graph_stage in self.graph_stages)

    def warm_up(self, adapters: bool = False, logits: bool = True) -> None:
        """Capture every size. Largest size first, so that smaller ones fit into its memory.

        adapters: also capture the graphs of steps with adapters.
        logits: also those of `run_logits`.
        """
        started = time.perf_counter()
        for size, with_adapters in product(reversed(self.sizes), (False, True) if adapters else (False,)):
            for sampled in (True, False) if logits else (True,):
                for number in range(len(self.graph_stages)):
                    self._graph(number, size, sampled, with_adapters)
        logger.info("captured %d decode graphs in %.1f s", len(self._captured), time.perf_counter() - started)
        if self.pieces is not None:
            try:
                self.pieces.warm_up()
            except CaptureError as error:
                self._disable_pieces(error)

    def run(
        self,
        req_slots: Sequence[int],
        read_slots: Sequence[int],
        write_slots: Sequence[int],
        deferred: Sequence[int] = (),
        adapters: Sequence[int] | None = None,
        between: Callable[[], None] | None = None,
    ) -> Tensor:
        """Launch one step over B rows. Returns sampled tokens [B] int64 on the last device.

        The next run overwrites them.
        deferred: indices of rows that sample later, from `logits`; their tokens are meaningless.
        adapters: adapter number of each row, 0 for none; None if no row has one.
        between: see `GraphPieces.run`, which returns when most of the step is done.
        """
        self._replay(req_slots, read_slots, write_slots, True, deferred, adapters, between)
        return self._sampled_tokens[: len(req_slots)]

    def run_logits(
        self,
        req_slots: Sequence[int],
        read_slots: Sequence[int],
        write_slots: Sequence[int],
        adapters: Sequence[int] | None = None,
        between: Callable[[], None] | None = None,
    ) -> Tensor:
        """Launch one step without sampling. Returns logits [B, V] fp32.

        The next run overwrites them. Pass the sampled tokens to `store`.
        """
        self._replay(req_slots, read_slots, write_slots, False, (), adapters, between)
        return self.logits[: len(req_slots)]

    def _replay(
        self,
        req_slots: Sequence[int],
        read_slots: Sequence[int],
        write_slots: Sequence[int],
        sampled: bool,
        deferred: Sequence[int],
        adapters: Sequence[int] | None,
        between: Callable[[], None] | None,
    ) -> None:
        if not 0 < len(req_slots) <= self.max_rows:
            raise ValueError(f"a decode step takes 1 to {self.max_rows} rows, got {len(req_slots)}")
        arrays: dict[str, Values] = {"read_slots": read_slots, "write_slots": write_slots, "req_slots": req_slots}
        if read_slots is write_slots:  # convert the list once
            arrays["read_slots"] = arrays["write_slots"] = np.array(read_slots, dtype=np.int64)
        if (
            between is not None
            and adapters is None
            and (pieces := self._pieces_for(len(req_slots), sampled)) is not None
        ):
            self._fill(pieces.size, arrays, deferred)
            assert self.pieces is not None
            self.pieces.run(pieces, between)
            return
        size = next(size for size in self.sizes if size >= len(req_slots))
        graphs = [self._graph(number, size, sampled, adapters is not None) for number in range(len(self.graph_stages))]
        self._fill(size, arrays, deferred, adapters)
        run_stages(self.graph_stages, graphs, size, self._staged)

    def seconds(self, num_rows: int) -> float:
        """Return the seconds of a step without adapters. 0: it is not captured."""
        size = next((size for size in self.sizes if size >= num_rows), 0)
        stages = [self._seconds.get((number, size), 0.0) for number in range(len(self.graph_stages))]
        return sum(stages) if all(stages) else 0.0

    def _pieces_for(self, rows: int, sampled: bool) -> Pieces[torch.cuda.CUDAGraph] | None:
        if self.pieces is None:
            return None
        try:
            return self.pieces.for_rows(rows, sampled)
        except CaptureError as error:
            self._disable_pieces(error)
            return None

    def _disable_pieces(self, error: CaptureError) -> None:
        logger.error("steps are no longer split into pieces, so first tokens wait for whole steps: %s", error)
        self.pieces = None

    def _graph(self, number: int, size: int, sampled: bool, adapters: bool) -> torch.cuda.CUDAGraph:
        """Return a stage's graph. The graph is captured at its first use."""
        key = (number, size, sampled and number == len(self.graph_stages) - 1, adapters)
        if key not in self._captured:
            started = time.perf_counter()
            with self.graph_stages[number].current():
                self.fill_padding(size, adapters)
                name = f"a decode graph of {size} rows on {self.graph_stages[number].device}"
                self._captured[key] = self.graph_stages[number].recorder.record(lambda: self._step(*key), name)
            if not adapters and (sampled or (number, size) not in self._seconds):  # plain steps sample
                self._seconds[number, size] = self.graph_stages[number].recorder.seconds
            logger.debug("captured a graph of %d rows in %.0f ms", size, (time.perf_counter() - started) * 1e3)
        return self._captured[key]

    def fill_padding(self, size: int, adapters: bool = False) -> None:
        """Stage a step of padding rows only, for a graph's capture."""
        self._fill(size, dict.fromkeys(self._padding, ()), adapters=() if adapters else None)

    def _fill(
        self,
        size: int,
        arrays: Mapping[str, Values],
        deferred: Sequence[int] = (),
        adapters: Sequence[int] | None = None,
    ) -> None:
        """Stage a step's rows on all devices. The rows are padded up to `size`."""
        with self._staged.filling() as host:
            for name, values in arrays.items():
                host[name][: len(values)] = values
                host[name][len(values) : size] = self._padding[name]
            host["req_slots32"][:size] = host["req_slots"][:size]
            if deferred:
                host["req_slots32"][list(deferred)] = self.dummy_req_slot
            if adapters is not None:
                tiles = max_tiles(size, self._max_adapters)
                fill_tiles(np.array(adapters, dtype=np.int64), host["tile_tokens"], host["tile_numbers"][:tiles])

    def _step(self, number: int, size: int, sampled: bool, adapters: bool) -> None:
        """Run one step of a stage. Allocates nothing that survives: all graphs share one memory pool."""
        graph_stage = self.graph_stages[number]
        inputs, input_tokens = self.inputs(number, size, adapters)
        x = graph_stage.forward(inputs, input_tokens)
        if number == len(self.graph_stages) - 1:
            self.finish(x, inputs, sampled)

    def inputs(self, number: int, size: int, adapters: bool = False) -> tuple[StepInputs, Tensor | None]:
        """Inside a graph: return a stage's inputs, and tokens [size] for the first stage."""
        staged, rows = self._staged.on_device[number], self._row_numbers[number]
        req_slots = staged["req_slots"][:size]
        input_tokens = self.tokens.input_tokens[req_slots] if number == 0 else None
        inputs = StepInputs(
            tokens=rows[:size] if input_tokens is None else input_tokens,
            cu_seqlens=rows[: size + 1],
            read_slots=staged["read_slots"][:size],
            write_slots=staged["write_slots"][:size],
            logit_tokens=rows[:size],
            max_seqlen=1,
        )
        if adapters:
            tiles = max_tiles(size, self._max_adapters)
            tokens = staged["tile_tokens"][: tiles * TILE].view(tiles, TILE)
            inputs.adapter_tiles = AdapterTiles(tokens, staged["tile_numbers"][:tiles])
        return inputs, input_tokens

    def finish(self, x: Tensor, inputs: StepInputs, sampled: bool) -> None:
        """Inside a graph: compute logits of the last layer's x [T, C], and sample."""
        logits = self.graph_stages[-1].stage.logits(x, inputs, self.logits)
        if sampled:
            self.sample(logits, self._staged.on_device[-1], self._sampled_tokens[: len(logits)])

    def sample(self, logits: Tensor, staged: Mapping[str, Tensor], sampled_tokens: Tensor) -> None:
        """Inside a graph: sample for the staged slots, logits [B, V] -> `sampled_tokens` [B] int64."""
        self._sampler.sample_on_device(logits, staged["req_slots32"][: len(sampled_tokens)], sampled_tokens)
        self.tokens.sampled_tokens[staged["req_slots"][: len(sampled_tokens)]] = sampled_tokens


def padded_sizes(max_rows: int) -> list[int]:
    """Return the batch sizes with a graph of their own.

    Every size up to 8, then steps of about an eighth. From 16 to 512 they are multiples of 8 or 16, the tile sizes of
    the GEMMs. A batch is padded to the next size.
    """
    sizes = [*range(1, 9), 12, 16, 24, 32, 40, 48, 56, 64, *range(80, 513, 16)]
    sizes += range(576, max(max_rows, 576) + 64, 64)
    upper = next(i for i, size in enumerate(sizes) if size >= max_rows)
    return sizes[: upper + 1]
