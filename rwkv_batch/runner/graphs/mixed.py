"""Mixed steps as CUDA graphs: decode rows and short prompts read the weights once.

Alone, a prompt of 20 tokens takes as long as decoding fifty rows. A graph has decode rows first, then
prompts as in prefill.py, both padded. It samples for all of them, so all rows need the graphs' sampler. Other
steps are launched in two parts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rwkv_batch.model.step_inputs import StepInputs
from rwkv_batch.runner.graphs.capture import StagedArrays, run_stages
from rwkv_batch.runner.graphs.decode import DecodeGraphs
from rwkv_batch.runner.graphs.prefill_inputs import PrefillSize, empty_step, input_lengths, pad
from state_pool.layout import DUMMY_SLOT, ZERO_SLOT

logger = logging.getLogger(__name__)

DECODE_SIZES = (8, *range(16, 257, 16), *range(288, 513, 32))
MAX_DECODE_ROWS, MAX_DECODE_ROWS_TWO_STAGES, MAX_DECODE_ROWS_MORE_STAGES = 256, 512, 64
"""Maximum decode rows for one, two, or more pipeline stages.

On one device, a step with more rows is long. A prompt gets its first token sooner in a launch of its own. With two
stages, a prompt's own launch delays both, so mixing pays for more rows. With more stages, a round has more steps, and
mixing into each of them costs more than one prefill step.
"""
MIN_GATHERED_PREFILL_TOKENS = 240
"""With more than two stages, fewer prompt tokens wait for another round.

cuBLAS computes the GEMMs of larger steps.
"""
PROMPT_SIZES = (PrefillSize(4, 32), PrefillSize(4, 64), PrefillSize(8, 160), PrefillSize(16, 256))


class MixedSize(NamedTuple):
    """Capacity of a graph, including padding."""

    decoding: int
    prompts: PrefillSize

    @property
    def tokens(self) -> int:
        return self.decoding + self.prompts.tokens

    @property
    def num_sampled(self) -> int:
        return self.decoding + self.prompts.rows


def max_decode_rows(stages: int) -> int:
    """Return the maximum decode rows of a mixed graph.

    stages: those that work at the same time
    """
    if stages == 1:
        return MAX_DECODE_ROWS
    return MAX_DECODE_ROWS_TWO_STAGES if stages == 2 else MAX_DECODE_ROWS_MORE_STAGES


def min_gathered_prefill_tokens(stages: int) -> int:
    """Return how many prompt tokens suffice to read them in every round.

    stages: those that work at the same time.
    """
    return MIN_GATHERED_PREFILL_TOKENS if stages > 2 else 0


def usable_mixed_sizes(max_rows: int) -> tuple[MixedSize, ...]:
    """Return the sizes of graphs for such steps, smallest first."""
    largest = next((size for size in DECODE_SIZES if size >= max_rows), DECODE_SIZES[-1])
    sizes = (
        MixedSize(decoding, prompts) for decoding in DECODE_SIZES if decoding <= largest for prompts in PROMPT_SIZES
    )
    return tuple(sorted(sizes, key=lambda size: size.tokens))


class MixedGraphs:
    """Captures and replays mixed steps over all stages. Engine thread only."""

    def __init__(self, decode: DecodeGraphs, sizes: Sequence[MixedSize], depth: int = 2) -> None:
        """Uses the stages, tokens, logits and sampler of `decode`. depth: steps in flight."""
        self.sizes = tuple(size for size in sizes if size.num_sampled <= len(decode.logits))
        self._decode = decode
        self._captured: dict[tuple[int, MixedSize], torch.cuda.CUDAGraph] = {}
        tokens = max((size.tokens for size in self.sizes), default=1)
        rows = max((size.num_sampled for size in self.sizes), default=1) + 1
        lengths = {**input_lengths(rows, tokens), "req_slots": rows, "req_slots32": rows}
        devices = [graph_stage.device for graph_stage in decode.graph_stages]
        self._staged = StagedArrays(lengths, devices, depth, {"req_slots32": torch.int32})
        self._token_range = np.arange(DECODE_SIZES[-1])
        self._sampled_tokens = torch.zeros(rows, dtype=torch.int64, device=decode.logits.device)

    def size_for(self, decoding: int, rows: int, tokens: int) -> MixedSize | None:
        """Return the smallest graph for a step.

        decoding: decode rows; rows, tokens: of prompts
        """
        return next(
            (size for size in self.sizes if size.decoding >= decoding and size.prompts.holds(rows, tokens)), None
        )

    def warm_up(self) -> None:
        """Capture every size, largest size first."""
        started = time.perf_counter()
        for size in reversed(self.sizes):
            for number in range(len(self._decode.graph_stages)):
                self._graph(number, size)
        logger.info("captured %d mixed graphs in %.1f s", len(self._captured), time.perf_counter() - started)

    @torch.inference_mode()
    def run(
        self,
        size: MixedSize,
        decoding: Mapping[str, Sequence[int]],
        prompts: StepInputs,
        prompt_req_slots: Sequence[int],
        deferred: Sequence[int] = (),
    ) -> Tensor:
        """Launch a mixed step. Returns tokens [size.decoding + R] int64 on the last device.

        The next run overwrites them.
        decoding: req_slots, read_slots and write_slots of the decode rows, whose tokens come first.
        prompts: on the CPU.
        prompt_req_slots: of the R prompt rows that sample; their tokens start at `size.decoding`.
        deferred: indices of rows that sample later, as in `DecodeGraphs.run`.
        """
        graphs = [self._graph(number, size) for number in range(len(self._decode.graph_stages))]
        self._fill(size, decoding, prompts, prompt_req_slots, deferred)
        run_stages(self._decode.graph_stages, graphs, size.tokens, self._staged)
        return self._sampled_tokens[: size.decoding + len(prompt_req_slots)]

    def _graph(self, number: int, size: MixedSize) -> torch.cuda.CUDAGraph:
        key = (number, size)
        if key not in self._captured:
            graph_stage = self._decode.graph_stages[number]
            with graph_stage.current():
                none: dict[str, Sequence[int]] = {"req_slots": (), "read_slots": (), "write_slots": ()}
                self._fill(size, none, empty_step(), ())
                name = (
                    f"a graph of {size.decoding} rows and {size.prompts.tokens} prompt tokens on {graph_stage.device}"
                )
                self._captured[key] = graph_stage.recorder.record(lambda: self._step(number, size), name)
        return self._captured[key]

    def _fill(
        self,
        size: MixedSize,
        decoding: Mapping[str, Sequence[int]],
        prompts: StepInputs,
        prompt_req_slots: Sequence[int],
        deferred: Sequence[int] = (),
    ) -> None:
        """Stage a step on all devices. Stages padding too."""
        first, count, num_sampled = size.decoding, len(decoding["req_slots"]), size.num_sampled
        padding = {"read_slots": ZERO_SLOT, "write_slots": DUMMY_SLOT, "req_slots": self._decode.dummy_req_slot}
        with self._staged.filling() as host:
            behind = {name: array if name == "tokens" else array[first:] for name, array in host.items()}
            pad(behind, prompts, size.prompts)
            prompts_lengths = (size.prompts.tokens, size.prompts.rows + 2, size.prompts.rows)
            for name, length in zip(("token_rows", "cu_seqlens", "logit_tokens"), prompts_lengths, strict=True):
                host[name][:first] = self._token_range[:first]
                behind[name][:length] += first
            for name, number in padding.items():
                host[name][:count] = decoding[name]
                host[name][count:first] = number
            host["req_slots"][first : first + len(prompt_req_slots)] = prompt_req_slots
            host["req_slots"][first + len(prompt_req_slots) : num_sampled] = self._decode.dummy_req_slot
            host["req_slots32"][:num_sampled] = host["req_slots"][:num_sampled]
            host["req_slots32"][list(deferred)] = self._decode.dummy_req_slot

    def _step(self, number: int, size: MixedSize) -> None:
        """Run one step of a stage. Allocates nothing that survives: all graphs share one memory pool."""
        decode, staged, rows = self._decode, self._staged.on_device[number], size.num_sampled + 1
        graph_stage, token_rows = decode.graph_stages[number], staged["token_rows"][: size.tokens]
        input_tokens = None
        if number == 0:
            req_slots = staged["req_slots"][: size.decoding]
            input_tokens = torch.cat([decode.tokens.input_tokens[req_slots], staged["tokens"][: size.prompts.tokens]])
        inputs = StepInputs(
            tokens=token_rows if input_tokens is None else input_tokens,
            cu_seqlens=staged["cu_seqlens"][: rows + 1],
            read_slots=staged["read_slots"][:rows],
            write_slots=staged["write_slots"][:rows],
            logit_tokens=staged["logit_tokens"][: size.num_sampled],
            max_seqlen=size.prompts.tokens,  # an upper bound; kernels only test for 1
            token_rows=token_rows,
            single_rows=size.decoding,
        )
        x = graph_stage.forward(inputs, input_tokens)
        if number == len(decode.graph_stages) - 1:
            decode.sample(
                graph_stage.stage.logits(x, inputs, decode.logits), staged, self._sampled_tokens[: size.num_sampled]
            )
