"""The graphs of an engine's steps: which kinds there are, what holds a step, and going on without them.

Graphs need the cuda kernels on every stage and a sampler that can be captured. Where there are none, or one cannot be
captured, steps are launched kernel by kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rwkv_batch.config import EngineConfig
from rwkv_batch.core.limits import Limits
from rwkv_batch.core.scheduler import ScheduledRow
from rwkv_batch.model.step_inputs import StepInputs
from rwkv_batch.runner.decode_graphs import DecodeGraphs, DeviceSampler, padded_sizes
from rwkv_batch.runner.graph_capture import CaptureError
from rwkv_batch.runner.graph_pieces import piece_layers
from rwkv_batch.runner.mixed_graphs import MixedGraphs, MixedSize, usable_mixed_sizes
from rwkv_batch.runner.mixtures import num_states
from rwkv_batch.runner.prefill_graphs import PrefillGraphs, usable_sizes
from rwkv_batch.runner.prompt_pieces import PromptPieces
from rwkv_batch.runner.stage import Stage
from rwkv_batch.runner.stage_graphs import GraphStage, make_graph_stages
from sampling.sampler import Sampler

logger = logging.getLogger(__name__)


class StepGraphs:
    """Makes, chooses and holds them; nothing is captured before `warm_up`. Engine thread only."""

    def __init__(self) -> None:
        """None at all; see `for_stages`."""
        self.refusal: str | None = None
        """why there are none"""
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
        """Of steps over these stages that draw with `sampler`, if they can be graphs.

        `depth`: steps on their way at once; `parameters` of the model.
        """
        made = cls()
        made.refusal = DecodeGraphs.unavailable_reason(stages, sampler)
        if made.refusal is not None:
            return made
        assert isinstance(sampler, DeviceSampler), "see `unavailable_reason`"
        rows, mixed_sizes = limits.rows_in_step, usable_mixed_sizes(limits.rows_in_mixed_step)
        tokens = [size.tokens for size in mixed_sizes] + [size.tokens for size in usable_sizes(stages, rows)]
        places = make_graph_stages(stages, max(padded_sizes(rows)[-1], *tokens), depth)
        num_sampled = max((size.num_sampled for size in mixed_sizes), default=0)
        pieces = piece_layers(config.batch_step_layers, places, parameters)
        decode = DecodeGraphs(
            places, rows, sampler, limits.num_req_slots, depth, num_sampled, config.pool.max_adapters, pieces
        )
        made.decode = decode
        made.prompts = PrefillGraphs(places, decode.logits, depth)
        made.mixed = MixedGraphs(decode, mixed_sizes, depth)
        if decode.pieces is not None:
            made.prompt_pieces = PromptPieces(decode.pieces, decode.logits, depth)
        return made

    @property
    def places(self) -> list[GraphStage]:
        """The stages, none without graphs."""
        return [] if self.decode is None else self.decode.places

    @property
    def is_recording(self) -> bool:
        """Whether a graph is being captured, which may take longer than any step. Any thread."""
        decode = self.decode
        return decode is not None and decode.is_recording

    @property
    def has_pieces(self) -> bool:
        """Whether steps in which rows decode can be launched in pieces."""
        return self.decode is not None and self.decode.pieces is not None

    @property
    def max_sampled_with_prompts(self) -> int:
        """Rows that a graph of both kinds may draw for, padding included."""
        return max((size.num_sampled for size in self.mixed.sizes), default=0) if self.mixed is not None else 0

    def warm_up(self, adapters: bool) -> None:
        """Capture all of them now; with `adapters` those of decode steps in which rows have one, too."""
        try:
            if self.decode is not None:
                self.decode.warm_up(adapters=adapters)
            for graphs in (self.prompts, self.mixed):
                if graphs is not None:
                    graphs.warm_up()
        except CaptureError as error:
            self.give_up(error)
        try:
            if self.prompt_pieces is not None and self.has_pieces:
                self.prompt_pieces.warm_up()
        except CaptureError as error:
            self._give_up_prompt_pieces(error)

    def give_up(self, error: CaptureError) -> None:
        """Go on without any, once no device reads what belongs to them.

        A capture that fails has waited for its own device. Another may still be at the step before, and copy what that
        step reads from memory of the host that is somebody else's once the graphs are gone."""
        logger.error("steps go on without graphs: %s", error)
        for place in self.places:
            torch.cuda.synchronize(place.device)
        self.decode = self.prompts = self.mixed = self.prompt_pieces = None
        self.refusal = str(error)

    def _give_up_prompt_pieces(self, error: CaptureError) -> None:
        logger.error("prompts of batch work are launched kernel by kernel beside interactive requests: %s", error)
        self.prompt_pieces = None

    def for_decode(self, rows: list[ScheduledRow], are_plain: bool) -> DecodeGraphs | None:
        """What launches a step in which rows decode; None: none do, or more than a graph holds. `are_plain`: all do."""
        if self.decode is None:
            return None
        if are_plain:
            fits = len(rows) <= self.decode.max_rows
        else:
            decoding = num_states(row for row in rows if row.uses_device_token)
            fits = rows[0].uses_device_token and decoding <= self.decode.max_rows
        return self.decode if fits else None

    def mixed_size(self, decoding: int, reading: int, tokens: int) -> MixedSize | None:
        """The graph for so many rows that decode beside prompts of so many rows and tokens in all; None: none is."""
        return None if self.mixed is None else self.mixed.size_for(decoding, reading, tokens)

    def logits_of_prompts(self, inputs: StepInputs, between: Callable[[], None] | None) -> Tensor | None:
        """Logits [R, V] of a step that graphs of short prompts hold, in pieces if something is to be called between
        them and decode steps have pieces; None: none hold it."""
        if between is None or not self.has_pieces:
            size = None if self.prompts is None else self.prompts.size_for(inputs)
            try:
                return None if self.prompts is None or size is None else self.prompts.run(inputs, size)
            except CaptureError as error:
                self.give_up(error)
                return None
        pieces = self.prompt_pieces
        size = None if pieces is None else pieces.size_for(inputs)
        try:
            return None if pieces is None or size is None else pieces.run(inputs, size, between)
        except CaptureError as error:
            self._give_up_prompt_pieces(error)
            return None

    def hidden_in_pieces(
        self, inputs: StepInputs, between: Callable[[], None] | None
    ) -> tuple[Tensor, StepInputs] | None:
        """What `Pipeline.hidden` gives, x [T, C] and the inputs where it lies, with something called between pieces;
        None: there are none for the step, or nothing is to be called."""
        pieces = None if self.decode is None else self.decode.pieces
        if between is None or pieces is None or inputs.adapters is not None:
            return None
        return pieces.hidden(inputs, between)
