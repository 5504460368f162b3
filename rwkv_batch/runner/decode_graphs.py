"""Decode steps as CUDA graphs: one per padded batch size, over slots and seats, the token fed back on the device.

Engine thread only. How a loop uses it:

    graphs = DecodeGraphs(stage, max_rows=960, sampler=rapid)   # nothing is captured yet
    graphs.warm_up()                                            # capture all sizes now, not each when it is first met
    graphs.remember([seat], first_tokens)                       # after a prefill: the token each seat feeds next
    drawn = graphs.run(seats, read_slots, write_slots)          # [B] int64 on the device; returns at once
    host = graphs.to_host(drawn)                                # starts the copy; host.read() waits for it

Each `run` embeds `last_tokens[seat]`, runs all layers, draws and writes the token back to `last_tokens[seat]`, so
step n+1 may be launched before the host has read step n, with rows added, removed or reordered between. A row
that has to be undone keeps its old state if its write slot differs from its read slot. `run_logits` is the same
without the draw, for steps whose rows need a sampler that has no device face. A graph that cannot be captured
raises CaptureError before any row's state has changed, so the step may be run without.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from native.transfer import on_device
from rwkv_batch.model.step_inputs import StepInputs
from rwkv_batch.runner.graph_capture import Recorder, StagedArrays
from rwkv_batch.runner.stage import Stage
from state_pool.arena import DUMMY_SLOT, ZERO_SLOT

logger = logging.getLogger(__name__)


@runtime_checkable
class DeviceSampler(Protocol):
    """A sampler whose whole work runs on the device and may be captured in a graph."""

    def sample_on_device(self, logits: Tensor, seats: Tensor, out: Tensor) -> None:
        """Draw one token per row: logits [B, V] fp32, seats [B] int32, out [B] int64."""
        ...


class Greedy:
    """The largest logit of each row."""

    def sample_on_device(self, logits: Tensor, seats: Tensor, out: Tensor) -> None:
        """See DeviceSampler."""
        torch.argmax(logits, dim=-1, out=out)


@dataclass(slots=True)
class HostTokens:
    """Tokens on their way to the host."""

    pinned: Tensor
    event: torch.cuda.Event

    def read(self) -> list[int]:
        """The token ids; waits for the copy, not for later steps."""
        self.event.synchronize()
        return self.pinned.tolist()


class DecodeGraphs:
    """Captures and replays decode steps of a one-stage pipeline; the sizes share one memory pool."""

    def __init__(
        self, stage: Stage, max_rows: int, sampler: DeviceSampler | None = None, num_seats: int | None = None
    ) -> None:
        """Steps of at most `max_rows` rows, which sit on any of `num_seats` seats (None: as many as rows)."""
        self.stage = stage
        self.max_rows = max_rows
        self.dummy_seat = max_rows if num_seats is None else num_seats
        self.sizes = padded_sizes(max_rows)
        self._sampler = sampler or Greedy()
        self._device = stage.precision.device
        self._padded_rows = self.sizes[-1]
        names = ("read_slots", "write_slots", "seats", "seats32")
        self._staged = StagedArrays(dict.fromkeys(names, self._padded_rows), self._device, {"seats32": torch.int32})
        self._identity = torch.arange(self._padded_rows + 1, device=self._device)
        self.last_tokens = torch.zeros(self.dummy_seat + 1, dtype=torch.int64, device=self._device)
        self._drawn = torch.zeros(self._padded_rows, dtype=torch.int64, device=self._device)
        self.recorder = Recorder(self._device)
        self._captured: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        assert stage.head is not None, "graphs draw from the logits of the last stage"
        vocab = stage.head.linear.weight.shape[0]
        self.logits = torch.empty(self._padded_rows, vocab, dtype=torch.float32, device=self._device)
        """[rows, V]: of every graph's step, and of any other step whose logits are done with before the next"""

    @staticmethod
    def why_not(stages: Sequence[Stage], sampler: object) -> str | None:
        """Why these stages cannot decode by graphs, drawing with `sampler`; None if they can."""
        if len(stages) != 1:
            return "decode graphs serve one device, not several pipeline stages"
        if stages[0].ops.name != "cuda":
            return f"decode graphs need the cuda kernels, not {stages[0].ops.name}"
        if not isinstance(sampler, DeviceSampler):
            return f"decode graphs need a sampler whose work can be captured, not {type(sampler).__name__}"
        return None

    def warm_up(self) -> None:
        """Capture every size now, largest first, so that the smaller ones fit into its memory."""
        started = time.perf_counter()
        for size in reversed(self.sizes):
            for sampled in (True, False):
                self._graph(size, sampled)
        logger.info("captured %d decode graphs in %.1f s", len(self._captured), time.perf_counter() - started)

    @torch.inference_mode()
    def remember(self, seats: Sequence[int], tokens: Tensor | Sequence[int]) -> None:
        """The token that each seat feeds in its next step; a device tensor stays on the device."""
        values = torch.as_tensor(tokens, dtype=torch.int64).to(self._device, non_blocking=True)
        self.last_tokens[on_device(seats, torch.int64, self._device)] = values

    @torch.inference_mode()
    def run(self, seats: Sequence[int], read_slots: Sequence[int], write_slots: Sequence[int]) -> Tensor:
        """Launch one step over B rows: [B] int64 drawn tokens, overwritten by the next run."""
        self._replay(seats, read_slots, write_slots, sampled=True)
        return self._drawn[: len(seats)]

    @torch.inference_mode()
    def run_logits(self, seats: Sequence[int], read_slots: Sequence[int], write_slots: Sequence[int]) -> Tensor:
        """As `run` without the draw: fp32 logits [B, V], overwritten by the next run. `remember` what is drawn."""
        self._replay(seats, read_slots, write_slots, sampled=False)
        return self.logits[: len(seats)]

    def to_host(self, drawn: Tensor) -> HostTokens:
        """Start copying drawn tokens to the host."""
        pinned = torch.empty(len(drawn), dtype=torch.int64, pin_memory=True)
        pinned.copy_(drawn, non_blocking=True)
        return HostTokens(pinned, torch.cuda.current_stream(self._device).record_event())

    def _replay(
        self, seats: Sequence[int], read_slots: Sequence[int], write_slots: Sequence[int], sampled: bool
    ) -> None:
        if not 0 < len(seats) <= self.max_rows:
            raise ValueError(f"a decode step takes 1 to {self.max_rows} rows, not {len(seats)}")
        graph = self._graph(next(size for size in self.sizes if size >= len(seats)), sampled)
        self._fill(seats, read_slots, write_slots)
        graph.replay()

    def _graph(self, size: int, sampled: bool) -> torch.cuda.CUDAGraph:
        if (size, sampled) not in self._captured:
            started = time.perf_counter()
            self._captured[size, sampled] = self._capture(size, sampled)
            logger.debug("captured a graph of %d rows in %.0f ms", size, (time.perf_counter() - started) * 1e3)
        return self._captured[size, sampled]

    def _capture(self, size: int, sampled: bool) -> torch.cuda.CUDAGraph:
        self._fill([], [], [])
        return self.recorder.record(lambda: self._step(size, sampled), f"a decode graph of {size} rows")

    def _fill(self, seats: Sequence[int], read_slots: Sequence[int], write_slots: Sequence[int]) -> None:
        """One step's rows on their way to the device; all rows beyond are padding."""
        rows, dummy = len(seats), self.dummy_seat
        with self._staged.filling() as host:
            for name, values, padding in (
                ("read_slots", read_slots, ZERO_SLOT),
                ("write_slots", write_slots, DUMMY_SLOT),
                ("seats", seats, dummy),
                ("seats32", seats, dummy),
            ):
                host[name][:rows] = values
                host[name][rows:] = padding

    def _step(self, size: int, sampled: bool) -> None:
        """What a graph holds. It keeps no tensor of its own: all graphs work in the same memory, one after another."""
        staged, rows = self._staged.on_device, self._identity[:size]
        seats = staged["seats"][:size]
        inputs = StepInputs(
            tokens=self.last_tokens[seats],
            cu_seqlens=self._identity[: size + 1],
            read_slots=staged["read_slots"][:size],
            write_slots=staged["write_slots"][:size],
            logit_tokens=rows,
            max_seqlen=1,
        )
        x, _ = self.stage.forward(self.stage.embed(inputs.tokens), None, inputs)
        logits = self.stage.logits(x, inputs, self.logits)
        if sampled:
            drawn = self._drawn[:size]
            self._sampler.sample_on_device(logits, staged["seats32"][:size], drawn)
            self.last_tokens[seats] = drawn


def padded_sizes(max_rows: int) -> list[int]:
    """Batch sizes worth a graph of their own: every one up to 8, then steps of an eighth or so."""
    sizes = [*range(1, 9), 12, 16, 24, 32, 40, 48, 56, 64, *range(80, 257, 16), *range(288, 513, 32)]
    sizes += range(576, max(max_rows, 576) + 64, 64)
    upper = next(i for i, size in enumerate(sizes) if size >= max_rows)
    return sizes[: upper + 1]
