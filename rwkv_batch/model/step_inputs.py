"""One ragged step as tensors: flat tokens of all rows, and where each row's state is read and written."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from native.transfer import pinned


@dataclass(slots=True)
class AdapterTiles:
    """A step's tokens sorted by adapter, 16 to a tile; on a device."""

    tokens: Tensor
    """[tiles, 16] int32: which tokens; -1: none"""
    numbers: Tensor
    """[tiles] int32: whose they are; 0: no adapter's, behind all others; -1: the tile is not there"""


@dataclass(slots=True)
class StepInputs:
    """Inputs of one forward over B rows with T tokens in all, on one device.

    Row i owns tokens cu_seqlens[i] .. cu_seqlens[i+1]-1 (at least one). It reads the state in slot
    read_slots[i] and leaves the state after its last token in write_slots[i]; the two may be equal.
    No slot is written by two rows, and no row reads a slot that another row writes, except the dummy.
    """

    tokens: Tensor
    """[T] int64"""
    cu_seqlens: Tensor
    """[B+1] int64, starts with 0, ends with T"""
    read_slots: Tensor
    """[B] int64"""
    write_slots: Tensor
    """[B] int64"""
    logit_tokens: Tensor
    """[R] int64: flat indices of the tokens after which logits are wanted, R <= B"""
    max_seqlen: int
    """Longest row; 1 means every row decodes (or reads a single token)."""
    single_rows: int = 0
    """The first so many rows read one token each, which a backend may use; 0: not told."""
    token_rows: Tensor | None = None
    """[T] int64: the row of each token; made on the device by a backend that needs it"""
    adapters: Tensor | None = None
    """[T] int64 on the CPU: number of each token's adapter, 0 for none; None: no row has one"""
    adapter_tiles: AdapterTiles | None = None
    """the same where a graph finds it"""

    def to(self, device: torch.device) -> StepInputs:
        """The same inputs on another device, copied without waiting for what that is doing."""
        return StepInputs(
            tokens=pinned(self.tokens, device).to(device, non_blocking=True),
            cu_seqlens=pinned(self.cu_seqlens, device).to(device, non_blocking=True),
            read_slots=pinned(self.read_slots, device).to(device, non_blocking=True),
            write_slots=pinned(self.write_slots, device).to(device, non_blocking=True),
            logit_tokens=pinned(self.logit_tokens, device).to(device, non_blocking=True),
            max_seqlen=self.max_seqlen,
            single_rows=self.single_rows,
            adapters=self.adapters,
        )


def step_inputs(rows: list[list[int]], read_slots: list[int], write_slots: list[int], wanted: list[int]) -> StepInputs:
    """Inputs on the CPU from the token ids of each row; `wanted`: rows after whose last token logits are wanted."""
    ends = [0]
    for row in rows:
        ends.append(ends[-1] + len(row))
    return StepInputs(
        tokens=torch.tensor([token for row in rows for token in row], dtype=torch.int64),
        cu_seqlens=torch.tensor(ends, dtype=torch.int64),
        read_slots=torch.tensor(read_slots, dtype=torch.int64),
        write_slots=torch.tensor(write_slots, dtype=torch.int64),
        logit_tokens=torch.tensor([ends[i + 1] - 1 for i in wanted], dtype=torch.int64),
        max_seqlen=max(len(row) for row in rows),
    )
