"""Mixtures on the device: a row for each member goes in, the members' logits come out as one row."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

import torch
from torch import Tensor

from native.transfer import on_device
from rwkv_batch.core.scheduler import ScheduledRow
from rwkv_batch.core.sequence import Sequence


def read_slots(sequence: Sequence) -> list[int]:
    """Where the states of the row and of its other members lie."""
    return [sequence.read_slot, *(member.read_slot(sequence.num_computed_tokens) for member in sequence.members)]


def write_slots(sequence: Sequence) -> list[int]:
    """Where they are left, in the same order."""
    return [sequence.write_slot, *(member.slot for member in sequence.members)]


def num_states(rows: Iterable[ScheduledRow]) -> int:
    """Rows that the device computes for these: one for each member."""
    return sum(1 + len(row.sequence.members) for row in rows)


def mixed(logits: Tensor, sampling_rows: list[ScheduledRow]) -> Tensor:
    """The logits [R, V] that rows draw from, of those [E, V] of all their members, in order; V tokens.

    A row alone keeps its own bit for bit; a mixture's are added up in the order of its members, whatever else there is.
    """
    sizes = [1 + len(row.sequence.members) for row in sampling_rows]
    if len(logits) == len(sizes):
        return logits
    first = list(accumulate(sizes, initial=0))[:-1]
    device = logits.device
    weights = [[row.sequence.weight, *(member.weight for member in row.sequence.members)] for row in sampling_rows]
    found = logits[on_device(first, torch.int64, device)]
    found *= on_device([[own[0]] for own in weights], torch.float32, device)
    for number in range(1, max(sizes)):
        rows = [i for i, size in enumerate(sizes) if size > number]
        at = on_device([first[i] + number for i in rows], torch.int64, device)
        member_weights = on_device([[weights[i][number]] for i in rows], torch.float32, device)
        found.index_add_(0, on_device(rows, torch.int64, device), logits[at] * member_weights)
    return found
