"""What the rows of a step read: their tokens, and where their states lie."""

from __future__ import annotations

import torch

from native.transfer import on_device
from rwkv_batch.core.scheduler import ScheduledRow
from rwkv_batch.core.sequence import NO_SLOT, Sequence
from rwkv_batch.model.step_inputs import StepInputs, step_inputs
from rwkv_batch.runner.decode_graphs import LastTokens
from rwkv_batch.runner.launch_groups import LaunchGroups
from rwkv_batch.runner.mixtures import read_slots, write_slots


class RowInputs:
    """Makes tensors of scheduled rows. Engine thread."""

    def __init__(self, parts: LaunchGroups, device: torch.device) -> None:
        """`device`: the first layers'."""
        self._parts = parts
        self._device = device

    def build(self, rows: list[ScheduledRow], sampled_tokens: LastTokens) -> StepInputs:
        """The rows' tokens, those not known to the host filled in on the device with what their seats have `sampled_tokens`."""
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
            [i for i, row in enumerate(rows) if row.samples],
        )
        if (own := self._parts.adapters_of(sequences)) is not None:
            inputs.adapters = torch.tensor(own).repeat_interleave(torch.tensor([row.num_tokens for row in rows]))
        ahead = [i for i, sequence in enumerate(sequences) if sequence.is_next_token_pending]
        if ahead:
            inputs = inputs.to(self._device)
            input_tokens = sampled_tokens.input_tokens
            req_slots = on_device([sequences[i].req_slot for i in ahead], torch.int64, input_tokens.device)
            at = inputs.cu_seqlens[on_device(ahead, torch.int64, inputs.cu_seqlens.device)]
            inputs.tokens[at] = input_tokens[req_slots].to(inputs.tokens.device)
        return inputs


def slots_of(sequences: list[Sequence]) -> tuple[list[int], list[int]]:
    """Where rows that have read their prompts read and write their states."""
    if all(sequence.spare_slot == NO_SLOT and sequence.shared is None for sequence in sequences):
        slots = [sequence.slot for sequence in sequences]
        return slots, slots
    return [sequence.read_slot for sequence in sequences], [sequence.write_slot for sequence in sequences]
