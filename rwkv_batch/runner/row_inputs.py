"""What the rows of a step read: their tokens, and where their states lie."""

from __future__ import annotations

import torch

from native.transfer import on_device
from rwkv_batch.core.scheduler import ScheduledRow
from rwkv_batch.core.sequence import NO_SLOT, Sequence
from rwkv_batch.model.step_inputs import StepInputs, step_inputs
from rwkv_batch.runner.decode_graphs import LastTokens
from rwkv_batch.runner.launch_parts import LaunchParts
from rwkv_batch.runner.mixtures import read_slots, write_slots


class RowInputs:
    """Makes tensors of scheduled rows. Engine thread."""

    def __init__(self, parts: LaunchParts, device: torch.device) -> None:
        """`device`: the first layers'."""
        self._parts = parts
        self._device = device

    def of(self, rows: list[ScheduledRow], drawn: LastTokens) -> StepInputs:
        """The rows' tokens, those not known to the host filled in on the device with what their seats have `drawn`."""
        reads = [slot for row in rows for slot in read_slots(row.sequence)]
        writes = [slot for row in rows for slot in write_slots(row.sequence)]
        if len(reads) > len(rows):  # each member of a mixture is a row of the step
            rows = [row for row in rows for _ in range(1 + len(row.sequence.members))]
        sequences = [row.sequence for row in rows]
        inputs = step_inputs(
            [
                row.sequence.token_ids[
                    row.sequence.num_computed_tokens : row.sequence.num_computed_tokens + row.num_tokens
                ]
                for row in rows
            ],
            reads,
            writes,
            [i for i, row in enumerate(rows) if row.draws],
        )
        if (own := self._parts.adapters_of(sequences)) is not None:
            inputs.adapters = torch.tensor(own).repeat_interleave(torch.tensor([row.num_tokens for row in rows]))
        ahead = [i for i, sequence in enumerate(sequences) if sequence.is_ahead]
        if ahead:
            inputs = inputs.to(self._device)
            fed = drawn.to_feed
            seats = on_device([sequences[i].seat for i in ahead], torch.int64, fed.device)
            at = inputs.cu_seqlens[on_device(ahead, torch.int64, inputs.cu_seqlens.device)]
            inputs.tokens[at] = fed[seats].to(inputs.tokens.device)
        return inputs


def slots_of(sequences: list[Sequence]) -> tuple[list[int], list[int]]:
    """Where rows that have read their prompts read and write their states."""
    if all(sequence.spare_slot == NO_SLOT and sequence.shared is None for sequence in sequences):
        slots = [sequence.slot for sequence in sequences]
        return slots, slots
    return [sequence.read_slot for sequence in sequences], [sequence.write_slot for sequence in sequences]
