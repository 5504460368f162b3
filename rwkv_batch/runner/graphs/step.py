"""All graphs of an engine's steps, and the fallback without them.

Also splits a step's rows into launches. Graphs need the cuda kernels on every stage and a sampler that can be captured.
Without graphs, or after a failed capture, steps are launched kernel by kernel. Nothing here waits for a device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rwkv_batch.config import EngineConfig
from rwkv_batch.core.draft_costs import Shape
from rwkv_batch.core.scheduler import ScheduledRow
from rwkv_batch.core.shares import Limits
from rwkv_batch.model.step_inputs import StepInputs
from rwkv_batch.runner.graphs.capture import CaptureError, GraphStage, make_graph_stages
from rwkv_batch.runner.graphs.decode import DecodeGraphs, DeviceSampler, padded_sizes
from rwkv_batch.runner.graphs.mixed import MixedGraphs, MixedSize, usable_mixed_sizes
from rwkv_batch.runner.graphs.pieces import piece_layers
from rwkv_batch.runner.graphs.prefill import PrefillGraphs, PromptPieces
from rwkv_batch.runner.graphs.prefill_inputs import LONG_ROWS, usable_sizes
from rwkv_batch.runner.pipeline import Pipeline, Stage
from rwkv_batch.runner.row_inputs import RowInputs, num_device_rows
from rwkv_batch.runner.step_sampling import StepSampler
from sampling.sampler import Sampler

logger = logging.getLogger(__name__)


class StepGraphs:
    """Creates and selects the graphs of steps. Nothing is captured before `warm_up`. Engine thread only."""

    def __init__(self) -> None:
        self.refusal: str | None = None
        """why there are no graphs"""
        self.decode: DecodeGraphs | None = None
        self.prompts: PrefillGraphs | None = None
        self.mixed: MixedGraphs | None = None
        self.prompt_pieces: PromptPieces | None = None

    @classmethod
    def for_stages(
        cls,
        stages: Sequence[Stage],
        sampler: Sampler,
        limits: Limits,
        config: EngineConfig,
        depth: int,
        parameters: int,
    ) -> StepGraphs:
        """Create the graphs for steps over these stages, if possible.

        depth: steps in flight
        """
        graphs = cls()
        graphs.refusal = DecodeGraphs.unavailable_reason(stages, sampler)
        if graphs.refusal is not None:
            return graphs
        assert isinstance(sampler, DeviceSampler), "see `unavailable_reason`"
        rows, mixed_sizes = limits.rows_in_step, usable_mixed_sizes(limits.rows_in_mixed_step)
        prompt_sizes = usable_sizes(LONG_ROWS[-1], limits.prefill_tokens_per_step, config.speculate != "off")
        num_logits = max(*(size.num_sampled for size in mixed_sizes), *(size.rows for size in prompt_sizes))
        tokens = [size.tokens for size in mixed_sizes] + [size.tokens for size in prompt_sizes]
        graph_stages = make_graph_stages(stages, max(padded_sizes(rows)[-1], *tokens), depth)
        pieces = piece_layers(config.batch_step_layers, graph_stages, parameters)
        decode = DecodeGraphs(
            graph_stages, rows, sampler, limits.num_req_slots, depth, num_logits, config.pool.max_adapters, pieces
        )
        graphs.decode = decode
        graphs.prompts = PrefillGraphs(graph_stages, decode.logits, depth, prompt_sizes, config.pool.max_adapters)
        graphs.mixed = MixedGraphs(decode, mixed_sizes, depth)
        if decode.pieces is not None:
            graphs.prompt_pieces = PromptPieces(decode.pieces, decode.logits, depth)
        return graphs

    @property
    def graph_stages(self) -> list[GraphStage]:
        """The stages of the graphs. Empty without graphs."""
        return [] if self.decode is None else self.decode.graph_stages

    @property
    def is_recording(self) -> bool:
        """Whether a capture is running, which may take longer than a step. Any thread."""
        decode = self.decode
        return decode is not None and decode.is_recording

    @property
    def has_pieces(self) -> bool:
        """Whether steps with decode rows can be launched in pieces."""
        return self.decode is not None and self.decode.pieces is not None

    @property
    def max_sampled_with_prompts(self) -> int:
        """Maximum rows that a mixed graph samples, including padding."""
        return max((size.num_sampled for size in self.mixed.sizes), default=0) if self.mixed is not None else 0

    def warm_up(self, adapters: bool) -> None:
        """Capture all graphs.

        adapters: also graphs of steps with adapters
        """
        try:
            if self.decode is not None:
                self.decode.warm_up(adapters=adapters)
            if self.prompts is not None:
                self.prompts.warm_up(adapters)
            if self.mixed is not None:
                self.mixed.warm_up()
        except CaptureError as error:
            self.disable(error)
        try:
            if self.prompt_pieces is not None and self.has_pieces:
                self.prompt_pieces.warm_up()
        except CaptureError as error:
            self._disable_prompt_pieces(error)

    def disable(self, error: CaptureError) -> None:
        """Continue without graphs, once no device uses their memory.

        A failed capture has waited for its own device. Another device may still copy the previous step's inputs from
        host memory that is freed with the graphs.
        """
        logger.error("graphs are off, steps are launched kernel by kernel: %s", error)
        for graph_stage in self.graph_stages:
            torch.cuda.synchronize(graph_stage.device)
        self.decode = self.prompts = self.mixed = self.prompt_pieces = None
        self.refusal = str(error)

    def _disable_prompt_pieces(self, error: CaptureError) -> None:
        logger.error(
            "prompts of batch work are launched kernel by kernel, so interactive requests may wait for them: %s", error
        )
        self.prompt_pieces = None

    def for_decode(self, rows: list[ScheduledRow], are_plain: bool) -> DecodeGraphs | None:
        """Return the graphs for a step with decode rows; None if there are no such rows or too many.

        are_plain: all rows are plain decode rows.
        """
        if self.decode is None:
            return None
        if are_plain:
            fits = len(rows) <= self.decode.max_rows
        else:
            decoding = num_device_rows(row for row in rows if row.uses_device_token)
            fits = rows[0].uses_device_token and decoding <= self.decode.max_rows
        return self.decode if fits else None

    def mixed_size(self, decoding: int, reading: int, tokens: int) -> MixedSize | None:
        """Return the graph for this many rows and prompt tokens.

        decoding, reading: numbers of decode rows and of prompts' rows. Returns None if no graph fits.
        """
        return None if self.mixed is None else self.mixed.size_for(decoding, reading, tokens)

    @property
    def graph_s(self) -> Callable[[Shape], float] | None:
        """Return `seconds`; None: there are no graphs."""
        return None if self.decode is None else self.seconds

    def seconds(self, shape: Shape) -> float:
        """Return the seconds of a step's graph without adapters. 0: there is none, or it is not captured."""
        if self.decode is None or self.prompts is None:
            return 0.0
        is_plain = shape.tokens == shape.rows == shape.logits and not shape.drafts
        return self.decode.seconds(shape.rows) if is_plain else self.prompts.seconds_of(shape)

    def logits_of_prompts(self, inputs: StepInputs, between: Callable[[], None] | None) -> Tensor | None:
        """Return logits [R, V] of a step of prompts; None if no graph fits.

        Runs in pieces if `between` is given and decode steps have pieces.
        """
        if between is None or not self.has_pieces:
            size = None if self.prompts is None else self.prompts.size_for(inputs)
            try:
                return None if self.prompts is None or size is None else self.prompts.run(inputs, size)
            except CaptureError as error:
                self.disable(error)
                return None
        pieces = self.prompt_pieces
        size = None if pieces is None else pieces.size_for(inputs)
        try:
            return None if pieces is None or size is None else pieces.run(inputs, size, between)
        except CaptureError as error:
            self._disable_prompt_pieces(error)
            return None

    def run_layers_in_pieces(
        self, inputs: StepInputs, between: Callable[[], None] | None
    ) -> tuple[Tensor, StepInputs] | None:
        """Run `Pipeline.run_layers` in pieces: x [T, C] and the inputs on its device.

        None: `between` is None, or the step cannot be in pieces.
        """
        pieces = None if self.decode is None else self.decode.pieces
        if between is None or pieces is None or inputs.adapters is not None:
            return None
        return pieces.run_layers(inputs, between)


class LaunchGroups:
    """Splits the rows of steps. Engine thread."""

    def __init__(self, graphs: StepGraphs, pipeline: Pipeline, sampling: StepSampler, inputs: RowInputs) -> None:
        self._graphs = graphs
        self._pipeline = pipeline
        self._step_sampler = sampling
        self._inputs = inputs

    def split(self, rows: list[ScheduledRow], mixes: bool = True) -> list[list[ScheduledRow]]:
        """Split a step's rows into launches.

        Constrained rows come last, which keeps each group's logits contiguous. With graphs, prefill rows are launched
        before decode rows, or with them if `mixes` and a mixed graph fits. Rows whose constraint waits for earlier
        tokens leave their logits in the shared buffer, so their launch is the last. Rows with an adapter that no graph
        supports come first.
        """
        if rows and are_all_plain(rows):
            return [rows]
        routed = [row for row in rows if self.is_routed(row)]
        rows = [row for row in rows if not self.is_routed(row)] if routed else rows
        mixtures = self._separate_mixtures(rows)
        if mixtures:
            separate = {id(row) for row in mixtures}
            rows = [row for row in rows if id(row) not in separate]
        if self._graphs.decode is None:
            parts = [mixtures, sorted(rows, key=lambda row: row.sequence.matcher is not None)]
        else:
            reading, decoding = split_prefill_decode(rows)
            scored = [row for row in reading if row.scored]  # graphs return logits only
            reading = [row for row in reading if not row.scored]
            has_drafts = any(row.draft is not None for row in reading)  # their logits fit no mixed graph
            if mixes and reading and decoding and not has_drafts and self.mixed_size(decoding, reading) is not None:
                reading, decoding = [], decoding + reading
            parts = [reading, scored, *split_prefill_decode(mixtures), decoding]
        parts = [[row for row in routed if row.scored], [row for row in routed if not row.scored], *parts]
        return [part for part in parts if part]

    def is_routed(self, row: ScheduledRow) -> bool:
        """Return whether the row's adapter prevents the use of graphs."""
        adapter = row.sequence.adapter
        return self._graphs.decode is not None and adapter is not None and self._pipeline.is_routed(adapter.slot_index)

    def _separate_mixtures(self, rows: list[ScheduledRow]) -> list[ScheduledRow]:
        """Return the mixtures that need a launch of their own.

        Decoding ones do if their members exceed the rows of a graph.
        """
        mixtures = [row for row in rows if row.sequence.members]
        graphs = self._graphs.decode
        if not mixtures or graphs is None:
            return mixtures if any(row.scored for row in rows) else []
        if num_device_rows(row for row in rows if row.uses_device_token) > graphs.max_rows:
            return mixtures
        return [row for row in mixtures if not row.uses_device_token]

    def mixed_size(self, decoding: list[ScheduledRow], reading: list[ScheduledRow]) -> MixedSize | None:
        """Return the graph that fits both kinds of rows. None if they may not share one."""
        if self._graphs.mixed is None or any(row.sequence.members for row in decoding):
            return None
        if self._inputs.adapters_of([row.sequence for row in (*decoding, *reading)]) is not None:
            return None
        tokens = sum(row.num_tokens for row in reading)
        size = self._graphs.mixed_size(len(decoding), len(reading), tokens)
        sampling = (row.sequence for row in [*decoding, *reading] if row.samples_token and row.sequence.matcher is None)
        return size if size is not None and self._step_sampler.fits_graphs(sampling) else None


def split_prefill_decode(rows: list[ScheduledRow]) -> tuple[list[ScheduledRow], list[ScheduledRow]]:
    """Split rows into prefill and decode rows.

    The token ids of the first are known to the host, those of the second are on the device.
    """
    return [row for row in rows if not row.uses_device_token], [row for row in rows if row.uses_device_token]


def are_all_plain(rows: list[ScheduledRow]) -> bool:
    """See `Sequence.is_plain`."""
    return False not in [row.is_plain for row in rows]  # a generator takes twice as long
