"""One ragged step as tensors: tokens of all rows, and the slots of their states; operations on it in plain torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from native.tensors import on_device, pinned

CONTINUES = -1
"""Read slot of a row that continues the row before it: its state is the one after that row, which has its own slot."""


@dataclass(slots=True)
class AdapterTiles:
    """A step's tokens sorted by adapter, in tiles of 16; on a device."""

    tokens: Tensor
    """[tiles, 16] int32: token indices; -1: none"""
    numbers: Tensor
    """[tiles] int32: adapter number; 0: no adapter, after all others; -1: unused tile"""


class LateTokens(NamedTuple):
    """Tokens that the host does not know yet."""

    tokens: Tensor
    """[n] int64 on a device"""
    places: list[int]
    """indices in `StepInputs.tokens`"""
    sources: list[int]
    """indices in `tokens`, one per place"""


@dataclass(slots=True)
class StepInputs:
    """Inputs of one forward over B rows, on one device.

    The rows have T tokens in total. Row i has tokens cu_seqlens[i] .. cu_seqlens[i+1]-1: at least one, but a graph's
    last rows, its padding, may have none. It reads the state in read_slots[i] and writes the state after its last token
    to write_slots[i]; the two may be equal. No slot is written by two rows, and no row reads a slot that another row
    writes, except the dummy. A row may continue the row before it: it then begins with the state after that row, and
    reads no slot.
    """

    tokens: Tensor
    """[T] int64"""
    cu_seqlens: Tensor
    """[B+1] int64, starts with 0, ends with T"""
    read_slots: Tensor
    """[B] int64; CONTINUES: none"""
    write_slots: Tensor
    """[B] int64"""
    logit_tokens: Tensor
    """[R] int64: flat indices of the tokens with logits"""
    max_seqlen: int
    """1: every row has one token"""
    single_rows: int = 0
    """The first rows that have one token each, for backends that use it; 0: unknown."""
    continuing_rows: int = 0
    """About how many rows continue others, for backends that choose launches by it."""
    token_rows: Tensor | None = None
    """[T] int64: the row of each token, if copied to the device before the step"""
    adapters: Tensor | None = None
    """[T] int64 on the CPU: adapter number of each token, 0 for none; None: no row has one"""
    adapter_tiles: AdapterTiles | None = None
    """the same for graphs, on the device"""
    late_tokens: Sequence[LateTokens] = ()

    def to(self, device: torch.device) -> StepInputs:
        """Return a copy on a device, with the late tokens. Does not wait for the device."""
        tokens = pinned(self.tokens, device).to(device, non_blocking=True)
        for late in self.late_tokens:
            places, sources = on_device([late.places, late.sources], torch.int64, device)
            tokens.index_copy_(0, places, late.tokens.index_select(0, sources))
        token_rows = self.token_rows
        if token_rows is None and device.type == "cuda" and self.max_seqlen > 1:
            token_rows = rows_of_tokens(self.cu_seqlens, len(tokens))
        return StepInputs(
            tokens=tokens,
            cu_seqlens=pinned(self.cu_seqlens, device).to(device, non_blocking=True),
            read_slots=pinned(self.read_slots, device).to(device, non_blocking=True),
            write_slots=pinned(self.write_slots, device).to(device, non_blocking=True),
            logit_tokens=pinned(self.logit_tokens, device).to(device, non_blocking=True),
            max_seqlen=self.max_seqlen,
            single_rows=self.single_rows,
            continuing_rows=self.continuing_rows,
            token_rows=None if token_rows is None else pinned(token_rows, device).to(device, non_blocking=True),
            adapters=self.adapters,
        )


def step_inputs(
    rows: list[list[int]], read_slots: list[int], write_slots: list[int], logit_rows: list[int]
) -> StepInputs:
    """Build inputs on the CPU from each row's token ids. logit_rows: rows with logits after their last token"""
    ends = [0, *accumulate(map(len, rows))]
    logit_tokens = [ends[i + 1] - 1 for i in logit_rows]
    return flat_inputs(list(chain.from_iterable(rows)), ends, read_slots, write_slots, logit_tokens)


def flat_inputs(
    tokens: list[int], ends: list[int], read_slots: list[int], write_slots: list[int], logit_tokens: list[int]
) -> StepInputs:
    """Build inputs on the CPU from the token ids of all rows; the fields are those of `StepInputs`.

    ends: `StepInputs.cu_seqlens`
    """
    cu_seqlens = np.array(ends, dtype=np.int64)
    return StepInputs(
        tokens=int64_tensor(tokens),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        read_slots=int64_tensor(read_slots),
        write_slots=int64_tensor(write_slots),
        logit_tokens=int64_tensor(logit_tokens),
        # The kernels of rows of one token know no rows that continue others.
        max_seqlen=max(int((cu_seqlens[1:] - cu_seqlens[:-1]).max()), 1 + (CONTINUES in read_slots)),
    )


def int64_tensor(values: list[int]) -> Tensor:
    """Return a tensor [n] of a short list in a third of the time of torch.tensor."""
    return torch.from_numpy(np.array(values, dtype=np.int64))


def rows_of_tokens(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Return the row of each token, [T] int64, on the device of cu_seqlens [B+1]."""
    lengths = cu_seqlens.diff()
    rows = torch.arange(len(lengths), device=lengths.device)
    return torch.repeat_interleave(rows, lengths, output_size=num_tokens)


def token_shift(h: Tensor, shift: Tensor, inputs: StepInputs) -> Tensor:
    """Return the token before each of h [T, C] fp32: [T, C].

    shift [num_slots, C] has the one before each row's first token; updated.
    """
    previous = torch.empty_like(h)
    previous[1:] = h[:-1]
    starts, ends = inputs.cu_seqlens[:-1], inputs.cu_seqlens[1:]
    has_slot = (inputs.read_slots != CONTINUES) & (starts < ends)
    previous[starts[has_slot]] = shift[inputs.read_slots[has_slot]].float()
    shift[inputs.write_slots] = h[ends - 1].to(shift.dtype)
    return previous


def longest_first(inputs: StepInputs) -> Iterator[tuple[Tensor, Tensor, Iterator[Tensor]]]:
    """Yield read slots [B], write slots [B] and tokens by position of rows, longest first.

    Rows that continue others come after those, which must have written their slots by then. The n tokens [n] at a
    position belong to the first n rows.
    """
    starts, reads, writes = inputs.cu_seqlens[:-1], inputs.read_slots, inputs.write_slots
    lengths = inputs.cu_seqlens[1:] - starts
    rows = torch.arange(len(reads), device=reads.device)
    continues = reads == CONTINUES
    first = torch.cummax(torch.where(continues, 0, rows), 0).values
    reads = torch.where(continues, writes.roll(1), reads)
    for number in range(int((rows - first).max()) + 1):
        mine = rows[rows - first == number]
        mine = mine[torch.argsort(lengths[mine], descending=True, stable=True)]
        yield reads[mine], writes[mine], _positions(starts[mine], lengths[mine].tolist())


def _positions(starts: Tensor, lengths: list[int]) -> Iterator[Tensor]:
    alive = len(lengths)
    for position in range(lengths[0]):
        while lengths[alive - 1] <= position:
            alive -= 1
        yield starts[:alive] + position
