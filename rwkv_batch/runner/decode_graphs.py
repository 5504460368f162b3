"""Decode steps as CUDA graphs: one per padded batch size and stage, over slots and seats, tokens fed back on devices.

Engine thread only. How a loop uses it:

    graphs = DecodeGraphs(graph_stages(stages, 960, depth=2), seats=960, sampler=rapid)   # nothing is captured yet
    graphs.warm_up()                                            # capture all sizes now, not each when it is first met
    graphs.tokens.remember([seat], first_tokens)                # after a prefill: the token each seat feeds next
    drawn = graphs.run(seats, read_slots, write_slots)          # [B] int64 on the last device; returns at once

Each `run` embeds the last token of each seat, runs all layers of all stages, draws and keeps the new tokens, so step
n+1 may be launched before the host has read step n, with rows added, removed or reordered between. A row that has to
be undone keeps its old state if its write slot differs from its read slot. `run_logits` is the same without the draw,
for steps whose rows need a sampler of the host. A graph that cannot be captured raises CaptureError before any row's
state has changed, so the step may be run without.
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

from native.transfer import on_device
from rwkv_batch.kernels.cuda.adapters import TILE, fill_tiles, max_tiles
from rwkv_batch.model.step_inputs import AdapterTiles, StepInputs
from rwkv_batch.runner.graph_capture import Array, CaptureError, StagedArrays
from rwkv_batch.runner.graph_pieces import GraphPieces, Pieces
from rwkv_batch.runner.links import Link
from rwkv_batch.runner.stage import Stage
from rwkv_batch.runner.stage_graphs import GraphStage, run_stages
from state_pool.layout import DUMMY_SLOT, ZERO_SLOT

logger = logging.getLogger(__name__)

Values = Sequence[int] | Array


@runtime_checkable
class DeviceSampler(Protocol):
    """A sampler whose whole work runs on the device and may be captured in a graph."""

    def sample_on_device(self, logits: Tensor, req_slots: Tensor, out: Tensor) -> None:
        """Draw one token per row: logits [B, V] fp32, seats [B] int32, out [B] int64."""
        ...


class Greedy:
    """The largest logit of each row."""

    def sample_on_device(self, logits: Tensor, req_slots: Tensor, out: Tensor) -> None:
        """See DeviceSampler."""
        torch.argmax(logits, dim=-1, out=out)


class LastTokens:
    """The token each seat has drawn last: written on the last device, read on the first, which may be another."""

    def __init__(
        self, req_slots: int, first: torch.device, last: torch.device, depth: int, is_read: bool = True
    ) -> None:
        """One seat more than `req_slots`, for padding; `depth`: steps on their way at once, each in two parts at most.

        `is_read`: False where the host knows every token before the next step is launched, and no graph reads them."""
        self._is_read = is_read
        self.sampled_tokens = torch.zeros(req_slots + 1, dtype=torch.int64, device=last)
        """[seats + 1] int64 on the last device"""
        self.input_tokens = (
            self.sampled_tokens if first == last else torch.zeros(req_slots + 1, dtype=torch.int64, device=first)
        )
        """the same on the first, as of the last `receive`"""
        self._link = None if first == last else Link(last, first, req_slots + 1, torch.int64, 2 * depth + 4)

    @property
    def link_kind(self) -> str | None:
        """How tokens come back to the first device; None where they are there."""
        return None if self._link is None else self._link.transport

    @torch.inference_mode()
    def store(self, req_slots: Sequence[int], tokens: Tensor | Sequence[int]) -> int:
        """Tokens [n] of these seats, on the last device or on the host; returns the number to `receive` them by."""
        if not self._is_read:
            return 0
        values = torch.as_tensor(tokens, dtype=torch.int64).to(self.sampled_tokens.device, non_blocking=True)
        self.sampled_tokens[on_device(req_slots, torch.int64, self.sampled_tokens.device)] = values
        return self.send()

    def send(self) -> int:
        """Start to carry all tokens drawn so far to the first device: a number that grows."""
        return 0 if self._link is None else self._link.send(self.sampled_tokens, len(self.sampled_tokens))

    def receive(self, number: int) -> None:
        """Have the first device wait for what `send` numbered so, unless it has come or a later one has."""
        if self._link is not None and number > self._link.received:
            self._link.receive(number, self.input_tokens, len(self.input_tokens))


class DecodeGraphs:
    """Captures and replays decode steps; the sizes of a stage share one memory pool."""

    def __init__(
        self,
        places: Sequence[GraphStage],
        max_rows: int,
        sampler: DeviceSampler | None = None,
        req_slots: int | None = None,
        depth: int = 2,
        logit_rows: int = 0,
        max_adapters: int = 64,
        piece_layers: int = 0,
    ) -> None:
        """`max_rows` for_rows one step; `req_slots` the sampler knows (as many, unless told); `depth`: steps on their way;
        `logit_rows`: least rows for_rows `logits`; `max_adapters` that its rows may have between them.

        `piece_layers` in a piece for_rows a step that may be left (`graph_pieces.piece_layers`); 0: none may be.

        Steps in which a row has an adapter have graphs of their own: the others cost what they did."""
        self.places = list(places)
        self.max_rows = max_rows
        self.dummy_req_slot = req_slots = max_rows if req_slots is None else req_slots
        self.sizes = padded_sizes(max_rows)
        self._padding = {"read_slots": ZERO_SLOT, "write_slots": DUMMY_SLOT, "req_slots": self.dummy_req_slot}
        self._sampler = sampler or Greedy()
        self._padded_rows = padded = self.sizes[-1]
        lengths = dict.fromkeys(("read_slots", "write_slots", "req_slots", "req_slots32"), padded)
        self._max_adapters = max_adapters
        tiles = max_tiles(padded, max_adapters)
        lengths |= {"tile_tokens": tiles * TILE, "tile_numbers": tiles}
        devices = [graph_stage.device for graph_stage in self.places]
        int32 = dict.fromkeys(("req_slots32", "tile_tokens", "tile_numbers"), torch.int32)
        self._staged = StagedArrays(lengths, devices, depth, int32)
        self._identity = [torch.arange(padded + 1, device=graph_stage.device) for graph_stage in self.places]
        last = self.places[-1]
        self.tokens = LastTokens(req_slots, self.places[0].device, last.device, depth)
        self._sampled_tokens = torch.zeros(padded, dtype=torch.int64, device=last.device)
        self._captured: dict[tuple[int, int, bool, bool], torch.cuda.CUDAGraph] = {}
        """by stage, size, whether it draws (the last stage's only), and whether it adds adapters"""
        assert last.stage.head is not None, "graphs draw from the logits of the last stage"
        vocab = last.stage.head.linear.weight.shape[0]
        self.logits = torch.empty(max(padded, logit_rows), vocab, dtype=torch.float32, device=last.device)
        """[rows, V]: of every graph's step, and of any other step whose logits are done with before the next"""
        self.pieces = GraphPieces(self, piece_layers) if piece_layers else None

    @staticmethod
    def unavailable_reason(stages: Sequence[Stage], sampler: object) -> str | None:
        """Why these stages cannot decode by graphs, drawing with `sampler`; None if they can."""
        others = {stage.ops.name for stage in stages} - {"cuda"}
        if others:
            return f"decode graphs need the cuda kernels on every device, not {', '.join(sorted(others))}"
        if not isinstance(sampler, DeviceSampler):
            return f"decode graphs need a sampler whose work can be captured, not {type(sampler).__name__}"
        return None

    @property
    def is_recording(self) -> bool:
        """Whether a graph of any stage is being captured, of these or of prompts."""
        return any(graph_stage.recorder.is_recording for graph_stage in self.places)

    def warm_up(self, adapters: bool = False) -> None:
        """Capture every size now, largest first, so that the smaller ones fit into its memory; with `adapters` those
        of steps in which rows have one, too."""
        started = time.perf_counter()
        for size, adds in product(reversed(self.sizes), (False, True) if adapters else (False,)):
            for sampled in (True, False):
                for number in range(len(self.places)):
                    self._graph(number, size, sampled, adds)
        logger.info("captured %d decode graphs in %.1f s", len(self._captured), time.perf_counter() - started)
        if self.pieces is not None:
            try:
                self.pieces.warm_up()
            except CaptureError as error:
                self._give_up_pieces(error)

    def run(
        self,
        req_slots: Sequence[int],
        read_slots: Sequence[int],
        write_slots: Sequence[int],
        deferred: Sequence[int] = (),
        adapters: Sequence[int] | None = None,
        between: Callable[[], None] | None = None,
    ) -> Tensor:
        """Launch one step over B rows: [B] int64 drawn tokens on the last device, overwritten by the next run.

        `deferred`: rows that sample later, from `logits`; the token told for_rows them means nothing. `adapters`: the number
        of each row's, 0 for none; None: no row has one. `between`: see `GraphPieces.run`, which returns when most of
        the step is done.
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
        """As `run` without the sample: fp32 logits [B, V], overwritten by the next run. `store` what is drawn."""
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
            raise ValueError(f"a decode step takes 1 to {self.max_rows} rows, not {len(req_slots)}")
        arrays: dict[str, Values] = {"read_slots": read_slots, "write_slots": write_slots, "req_slots": req_slots}
        if read_slots is write_slots:  # a list becomes an array once
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
        graphs = [self._graph(number, size, sampled, adapters is not None) for number in range(len(self.places))]
        self._fill(size, arrays, deferred, adapters)
        run_stages(self.places, graphs, size, self._staged)

    def _pieces_for(self, rows: int, sampled: bool) -> Pieces[torch.cuda.CUDAGraph] | None:
        """The pieces of a step of so many rows, if it has any."""
        if self.pieces is None:
            return None
        try:
            return self.pieces.for_rows(rows, sampled)
        except CaptureError as error:
            self._give_up_pieces(error)
            return None

    def _give_up_pieces(self, error: CaptureError) -> None:
        logger.error("steps go on in one piece each, which first tokens wait for: %s", error)
        self.pieces = None

    def _graph(self, number: int, size: int, sampled: bool, adapters: bool) -> torch.cuda.CUDAGraph:
        """The graph of a stage; only the last one's has a draw or not."""
        key = (number, size, sampled and number == len(self.places) - 1, adapters)
        if key not in self._captured:
            started = time.perf_counter()
            with self.places[number].current():
                self.fill_padding(size, adapters)
                name = f"a decode graph of {size} rows on {self.places[number].device}"
                self._captured[key] = self.places[number].recorder.record(lambda: self._step(*key), name)
            logger.debug("captured a graph of %d rows in %.0f ms", size, (time.perf_counter() - started) * 1e3)
        return self._captured[key]

    def fill_padding(self, size: int, adapters: bool = False) -> None:
        """A step over nobody, for a graph of this size that is to be captured."""
        self._fill(size, dict.fromkeys(self._padding, ()), adapters=() if adapters else None)

    def _fill(
        self,
        size: int,
        arrays: Mapping[str, Values],
        deferred: Sequence[int] = (),
        adapters: Sequence[int] | None = None,
    ) -> None:
        """One step's rows on their way to all devices; rows beyond them, up to `size`, are padding."""
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
        """What a graph holds. It keeps no tensor of its own: all graphs work in the same memory, one after another."""
        graph_stage = self.places[number]
        inputs, input_tokens = self.inputs(number, size, adapters)
        x = graph_stage.forward(inputs, input_tokens)
        if number == len(self.places) - 1:
            self.finish(x, inputs, sampled)

    def inputs(self, number: int, size: int, adapters: bool = False) -> tuple[StepInputs, Tensor | None]:
        """Inside a graph: what a stage reads of a step, and the tokens [size] that the first one is fed."""
        staged, rows = self._staged.on_device[number], self._identity[number]
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
        """Inside a graph: logits of x [T, C] behind the last layer, and the draw."""
        logits = self.places[-1].stage.logits(x, inputs, self.logits)
        if sampled:
            self.sample(logits, self._staged.on_device[-1], self._sampled_tokens[: len(logits)])

    def sample(self, logits: Tensor, staged: Mapping[str, Tensor], sampled_tokens: Tensor) -> None:
        """Inside a graph: draw for logits [B, V] of the staged seats into `sampled_tokens` [B] int64, and keep the tokens."""
        self._sampler.sample_on_device(logits, staged["req_slots32"][: len(sampled_tokens)], sampled_tokens)
        self.tokens.sampled_tokens[staged["req_slots"][: len(sampled_tokens)]] = sampled_tokens


def padded_sizes(max_rows: int) -> list[int]:
    """Batch sizes worth a graph of their own: every one up to 8, then steps of an eighth or so; up to 512 of 16 rows, a
    tile of the products: one row more than a size costs all rows the time of the next."""
    sizes = [*range(1, 9), 12, 16, 24, 32, 40, 48, 56, 64, *range(80, 513, 16)]
    sizes += range(576, max(max_rows, 576) + 64, 64)
    upper = next(i for i, size in enumerate(sizes) if size >= max_rows)
    return sizes[: upper + 1]
