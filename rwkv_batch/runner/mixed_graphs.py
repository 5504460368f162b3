"""Steps that decode rows and read short prompts, as one graph for each stage: the weights are read once for both.

Apart, a prompt of twenty tokens takes as long as a decode step of fifty rows. What that is worth: docs/performance.md.
A graph holds decoding rows first, then prompts as in prefill_graphs.py, padding in both; it draws for all of them, so
every row's sampler has to be the graphs'. Anything else goes in two parts.
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
from rwkv_batch.runner.decode_graphs import DecodeGraphs
from rwkv_batch.runner.graph_capture import StagedArrays
from rwkv_batch.runner.prefill_graphs import PrefillSize, empty_step, input_lengths, padded
from rwkv_batch.runner.stage_graphs import run_stages
from state_pool.layout import DUMMY_SLOT, ZERO_SLOT

logger = logging.getLogger(__name__)

DECODE_SIZES = (8, *range(16, 257, 16), *range(288, 513, 32))
MAX_DECODE_ROWS, MAX_DECODE_ROWS_TWO_STAGES, MAX_DECODE_ROWS_MORE_STAGES = 256, 512, 64
"""Of one device, of two stages that work at once, and of more.

On one device a step with more rows is long, and a prompt has its first token sooner when it goes before. Of two stages
a prompt's own step holds up both: riding gives all rows more. With more stages there are as many more steps in a round,
and what riding adds to each of them comes to more than one step of prompts alone, through which no group has to wait
for its own."""
HELD_PROMPT_TOKENS = 240
"""Of more than two stages: so many prompt tokens never wait for a further round; of more cuBLAS makes the products."""
PROMPT_SIZES = (PrefillSize(4, 32), PrefillSize(4, 64), PrefillSize(8, 160), PrefillSize(16, 256))


class MixedSize(NamedTuple):
    """What a graph holds, padding included."""

    decoding: int
    prompts: PrefillSize

    @property
    def tokens(self) -> int:
        """Tokens in all."""
        return self.decoding + self.prompts.tokens

    @property
    def num_sampled(self) -> int:
        """Rows that it may draw for."""
        return self.decoding + self.prompts.rows


def max_decode_rows(stages: int) -> int:
    """Most rows that decode in a graph with prompts; `stages` that can work at once."""
    if stages == 1:
        return MAX_DECODE_ROWS
    return MAX_DECODE_ROWS_TWO_STAGES if stages == 2 else MAX_DECODE_ROWS_MORE_STAGES


def min_gathered_prefill_tokens(stages: int) -> int:
    """Prompt tokens from which on they are read in every round; `stages` that can work at once."""
    return HELD_PROMPT_TOKENS if stages > 2 else 0


def usable_mixed_sizes(max_rows: int) -> tuple[MixedSize, ...]:
    """Sizes worth a graph for steps of at most `max_rows` decoding rows, the smallest first."""
    most = next((size for size in DECODE_SIZES if size >= max_rows), DECODE_SIZES[-1])
    sizes = (MixedSize(decoding, prompts) for decoding in DECODE_SIZES if decoding <= most for prompts in PROMPT_SIZES)
    return tuple(sorted(sizes, key=lambda size: size.tokens))


class MixedGraphs:
    """Captures and replays mixed steps over all stages, beside the decode graphs. Engine thread only."""

    def __init__(self, decode: DecodeGraphs, sizes: Sequence[MixedSize], depth: int = 2) -> None:
        """Works on `decode`'s stages, tokens, logits and sampler; `depth`: steps on their way at once."""
        self.sizes = tuple(size for size in sizes if size.num_sampled <= len(decode.logits))
        self._decode = decode
        self._captured: dict[tuple[int, MixedSize], torch.cuda.CUDAGraph] = {}
        tokens = max((size.tokens for size in self.sizes), default=1)
        rows = max((size.num_sampled for size in self.sizes), default=1) + 1
        lengths = {**input_lengths(rows, tokens), "req_slots": rows, "req_slots32": rows}
        devices = [graph_stage.device for graph_stage in decode.places]
        self._staged = StagedArrays(lengths, devices, depth, {"req_slots32": torch.int32})
        self._token_range = np.arange(DECODE_SIZES[-1])
        self._sampled_tokens = torch.zeros(rows, dtype=torch.int64, device=decode.logits.device)

    def size_for(self, decoding: int, rows: int, tokens: int) -> MixedSize | None:
        """The smallest graph for so many decoding rows beside prompts of so many rows and tokens in all."""
        return next(
            (size for size in self.sizes if size.decoding >= decoding and size.prompts.holds(rows, tokens)), None
        )

    def warm_up(self) -> None:
        """Capture every size now, largest first."""
        started = time.perf_counter()
        for size in reversed(self.sizes):
            for number in range(len(self._decode.places)):
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
        """Launch a step that fits: drawn tokens [decoding + R] int64 on the last device, overwritten by the next.

        `decoding`: req_slots, read_slots and write_slots of the rows that decode, whose tokens come first; `prompts` on the
        CPU; `prompt_req_slots` of those R rows of them that sample, whose tokens stand from `size.decoding` on; `deferred`:
        places of rows that draw later, as in `DecodeGraphs.run`.
        """
        graphs = [self._graph(number, size) for number in range(len(self._decode.places))]
        self._fill(size, decoding, prompts, prompt_req_slots, deferred)
        run_stages(self._decode.places, graphs, size.tokens, self._staged)
        return self._sampled_tokens[: size.decoding + len(prompt_req_slots)]

    def _graph(self, number: int, size: MixedSize) -> torch.cuda.CUDAGraph:
        key = (number, size)
        if key not in self._captured:
            graph_stage = self._decode.places[number]
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
        """A step and its padding on their way to all devices."""
        first, count, num_sampled = size.decoding, len(decoding["req_slots"]), size.num_sampled
        padded_prompts = padded(prompts, size.prompts)
        padding = {"read_slots": ZERO_SLOT, "write_slots": DUMMY_SLOT, "req_slots": self._decode.dummy_req_slot}
        with self._staged.filling() as host:
            host["tokens"][: size.prompts.tokens] = padded_prompts["tokens"]
            for name in ("token_rows", "cu_seqlens", "logit_tokens"):
                values = padded_prompts[name]
                host[name][:first] = self._token_range[:first]
                np.add(values, first, out=host[name][first : first + len(values)])
            for name in ("read_slots", "write_slots"):
                values = padded_prompts[name]
                host[name][first : first + len(values)] = values
            for name, number in padding.items():
                host[name][:count] = decoding[name]
                host[name][count:first] = number
            host["req_slots"][first : first + len(prompt_req_slots)] = prompt_req_slots
            host["req_slots"][first + len(prompt_req_slots) : num_sampled] = self._decode.dummy_req_slot
            host["req_slots32"][:num_sampled] = host["req_slots"][:num_sampled]
            host["req_slots32"][list(deferred)] = self._decode.dummy_req_slot

    def _step(self, number: int, size: MixedSize) -> None:
        """What a graph holds. It keeps no tensor of its own: all graphs work in the same memory, one after another."""
        decode, staged, rows = self._decode, self._staged.on_device[number], size.num_sampled + 1
        graph_stage, token_rows = decode.places[number], staged["token_rows"][: size.tokens]
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
            max_seqlen=size.prompts.tokens,  # at most; the kernels ask only whether it is one
            token_rows=token_rows,
            single_rows=size.decoding,
        )
        x = graph_stage.forward(inputs, input_tokens)
        if number == len(decode.places) - 1:
            decode.sample(
                graph_stage.stage.logits(x, inputs, decode.logits), staged, self._sampled_tokens[: size.num_sampled]
            )
