"""State mixtures on the device: one row per member goes in, one row of logits comes out."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

import torch
from torch import Tensor

from native.tensors import on_device
from rwkv_batch.core.scheduler import ScheduledRow
from rwkv_batch.core.sequence import Sequence


def read_slots(sequence: Sequence) -> list[int]:
    """Return the slots that the row and its other members read."""
    return [sequence.read_slot, *(member.read_slot(sequence.num_computed_tokens) for member in sequence.members)]


def write_slots(sequence: Sequence) -> list[int]:
    """Return the slots that they write, in the same order."""
    return [sequence.write_slot, *(member.slot for member in sequence.members)]


def num_states(rows: Iterable[ScheduledRow]) -> int:
    """Return the number of device rows: one per member."""
    return sum(1 + len(row.sequence.members) for row in rows)


def mix_logits(logits: Tensor, sampling_rows: list[ScheduledRow]) -> Tensor:
    """Mix the logits [E, V] of all members to logits [R, V], one row per sampling row.

    A row without members keeps its logits exactly. A mixture's logits are added in the order of its members.
    """
    sizes = [1 + len(row.sequence.members) for row in sampling_rows]
    if len(logits) == len(sizes):
        return logits
    first = list(accumulate(sizes, initial=0))[:-1]
    device = logits.device
    weights = [[row.sequence.weight, *(member.weight for member in row.sequence.members)] for row in sampling_rows]
    result = logits[on_device(first, torch.int64, device)]
    result *= on_device([[row_weights[0]] for row_weights in weights], torch.float32, device)
    for number in range(1, max(sizes)):
        rows = [i for i, size in enumerate(sizes) if size > number]
        at = on_device([first[i] + number for i in rows], torch.int64, device)
        member_weights = on_device([[weights[i][number]] for i in rows], torch.float32, device)
        result.index_add_(0, on_device(rows, torch.int64, device), logits[at] * member_weights)
    return result
