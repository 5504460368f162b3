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
from rwkv_batch.runner.graph_capture import Array, StagedArrays
from rwkv_batch.runner.prefill_graphs import PrefillSize, padded
from state_pool.arena import DUMMY_SLOT, ZERO_SLOT

logger = logging.getLogger(__name__)

DECODING = (8, 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""With more rows a step is long, and a prompt has its first token sooner when it goes before."""
PROMPTS = (PrefillSize(4, 32), PrefillSize(4, 96), PrefillSize(16, 256))


class MixedSize(NamedTuple):
    """What a graph holds, padding included."""

    decoding: int
    prompts: PrefillSize

    @property
    def tokens(self) -> int:
        """Tokens in all."""
        return self.decoding + self.prompts.tokens

    @property
    def drawn(self) -> int:
        """Rows that it may draw for."""
        return self.decoding + self.prompts.rows


def usable_mixed_sizes(max_rows: int) -> tuple[MixedSize, ...]:
    """Sizes worth a graph for steps of at most `max_rows` decoding rows, the smallest first."""
    most = next((size for size in DECODING if size >= max_rows), DECODING[-1])
    sizes = (MixedSize(decoding, prompts) for decoding in DECODING if decoding <= most for prompts in PROMPTS)
    return tuple(sorted(sizes, key=lambda size: size.tokens))


class MixedGraphs:
    """Captures and replays mixed steps over all stages, beside the decode graphs. Engine thread only."""

    def __init__(self, decode: DecodeGraphs, sizes: Sequence[MixedSize], depth: int = 2) -> None:
        """Works on `decode`'s stages, tokens, logits and sampler; `depth`: steps on their way at once."""
        self.sizes = tuple(size for size in sizes if size.drawn <= len(decode.logits))
        self._decode = decode
        self._captured: dict[tuple[int, MixedSize], torch.cuda.CUDAGraph] = {}
        tokens = max((size.tokens for size in self.sizes), default=1)
        rows = max((size.drawn for size in self.sizes), default=1) + 1
        lengths = {
            "tokens": tokens,
            "token_rows": tokens,
            "cu_seqlens": rows + 1,
            "read_slots": rows,
            "write_slots": rows,
            "logit_tokens": rows,
            "seats": rows,
            "seats32": rows,
        }
        self._staged = [StagedArrays(lengths, place.device, depth, {"seats32": torch.int32}) for place in decode.places]
        self._drawn = torch.zeros(rows, dtype=torch.int64, device=decode.logits.device)

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
        prompt_seats: Sequence[int],
        undrawn: Sequence[int] = (),
    ) -> Tensor:
        """Launch a step that fits: drawn tokens [decoding + R] int64 on the last device, overwritten by the next.

        `decoding`: seats, read_slots and write_slots of the rows that decode, whose tokens come first; `prompts` on the
        CPU; `prompt_seats` of those R rows of them that draw, whose tokens stand from `size.decoding` on; `undrawn`:
        places of rows that draw later, as in `DecodeGraphs.run`.
        """
        graphs = [self._graph(number, size) for number in range(len(self._decode.places))]
        arrays = self._arrays(size, decoding, prompts, prompt_seats)
        before = None
        for number, (place, graph) in enumerate(zip(self._decode.places, graphs, strict=True)):
            with place.current():
                self._fill(number, arrays, undrawn)
            place.run(graph.replay, size.tokens, before)
            before = place
        return self._drawn[: size.decoding + len(prompt_seats)]

    def _arrays(
        self,
        size: MixedSize,
        decoding: Mapping[str, Sequence[int]],
        prompts: StepInputs,
        prompt_seats: Sequence[int],
    ) -> dict[str, Array]:
        first, dummy = size.decoding, self._decode.dummy_seat

        def filled(values: Sequence[int], length: int, padding: int) -> Array:
            array = np.full(length, padding, dtype=np.int64)
            array[: len(values)] = values
            return array

        single = np.arange(first)
        behind = padded(prompts, size.prompts)
        return {
            "tokens": behind["tokens"],
            "token_rows": np.concatenate([single, behind["token_rows"] + first]),
            "cu_seqlens": np.concatenate([single, behind["cu_seqlens"] + first]),
            "read_slots": np.concatenate([filled(decoding["read_slots"], first, ZERO_SLOT), behind["read_slots"]]),
            "write_slots": np.concatenate([filled(decoding["write_slots"], first, DUMMY_SLOT), behind["write_slots"]]),
            "logit_tokens": np.concatenate([single, behind["logit_tokens"] + first]),
            "seats": np.concatenate(
                [filled(decoding["seats"], first, dummy), filled(prompt_seats, size.prompts.rows, dummy)]
            ),
        }

    def _graph(self, number: int, size: MixedSize) -> torch.cuda.CUDAGraph:
        key = (number, size)
        if key not in self._captured:
            nothing = torch.zeros(0, dtype=torch.int64)
            place = self._decode.places[number]
            with place.current():
                empty = StepInputs(nothing, torch.zeros(1, dtype=torch.int64), nothing, nothing, nothing, 1)
                nobody: dict[str, Sequence[int]] = {"seats": (), "read_slots": (), "write_slots": ()}
                self._fill(number, self._arrays(size, nobody, empty, ()))
                name = f"a graph of {size.decoding} rows and {size.prompts.tokens} prompt tokens on {place.device}"
                self._captured[key] = place.recorder.record(lambda: self._step(number, size), name)
        return self._captured[key]

    def _fill(self, number: int, arrays: Mapping[str, Array], undrawn: Sequence[int] = ()) -> None:
        with self._staged[number].filling() as host:
            for name, values in arrays.items():
                host[name][: len(values)] = values
            host["seats32"][: len(arrays["seats"])] = arrays["seats"]
            host["seats32"][list(undrawn)] = self._decode.dummy_seat

    def _step(self, number: int, size: MixedSize) -> None:
        """What a graph holds. It keeps no tensor of its own: all graphs work in the same memory, one after another."""
        decode, staged, rows = self._decode, self._staged[number].on_device, size.drawn + 1
        place, token_rows = decode.places[number], staged["token_rows"][: size.tokens]
        fed = None
        if number == 0:
            seats = staged["seats"][: size.decoding]
            fed = torch.cat([decode.tokens.to_feed[seats], staged["tokens"][: size.prompts.tokens]])
        inputs = StepInputs(
            tokens=token_rows if fed is None else fed,
            cu_seqlens=staged["cu_seqlens"][: rows + 1],
            read_slots=staged["read_slots"][:rows],
            write_slots=staged["write_slots"][:rows],
            logit_tokens=staged["logit_tokens"][: size.drawn],
            max_seqlen=size.prompts.tokens,  # at most; the kernels ask only whether it is one
            token_rows=token_rows,
            single_rows=size.decoding,
        )
        x = place.forward(inputs, fed)
        if number == len(decode.places) - 1:
            decode.draw(place.stage.logits(x, inputs, decode.logits), staged, self._drawn[: size.drawn])
