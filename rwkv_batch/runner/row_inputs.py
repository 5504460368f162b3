"""The inputs of a step's rows: tokens, and slots of states."""

from __future__ import annotations

import torch

from native.tensors import on_device
from rwkv_batch.core.scheduler import ScheduledRow
from rwkv_batch.core.sequence import NO_SLOT, Sequence
from rwkv_batch.model.step_inputs import StepInputs, step_inputs
from rwkv_batch.runner.graphs.decode import LastTokens
from rwkv_batch.runner.launch_groups import LaunchGroups
from rwkv_batch.runner.mixtures import read_slots, write_slots


class RowInputs:
    """Builds a step's inputs from scheduled rows. Engine thread."""

    def __init__(self, launch_groups: LaunchGroups, device: torch.device) -> None:
        """device: of the first layers."""
        self._launch_groups = launch_groups
        self._device = device

    def build(self, rows: list[ScheduledRow], last_tokens: LastTokens) -> StepInputs:
        """Return the rows' inputs. Tokens unknown to the host are filled in from `last_tokens`."""
        reads = [slot for row in rows for slot in read_slots(row.sequence)]
        writes = [slot for row in rows for slot in write_slots(row.sequence)]
        if len(reads) > len(rows):  # each member of a mixture is a row
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
        if (adapters := self._launch_groups.adapters_of(sequences)) is not None:
            inputs.adapters = torch.tensor(adapters).repeat_interleave(torch.tensor([row.num_tokens for row in rows]))
        pending = [i for i, sequence in enumerate(sequences) if sequence.is_next_token_pending]
        if pending:
            inputs = inputs.to(self._device)
            input_tokens = last_tokens.input_tokens
            req_slots = on_device([sequences[i].req_slot for i in pending], torch.int64, input_tokens.device)
            at = inputs.cu_seqlens[on_device(pending, torch.int64, inputs.cu_seqlens.device)]
            inputs.tokens[at] = input_tokens[req_slots].to(inputs.tokens.device)
        return inputs


def slots_of(sequences: list[Sequence]) -> tuple[list[int], list[int]]:
    """Return the read and write slots of rows that have read their prompts."""
    if all(sequence.spare_slot == NO_SLOT and sequence.shared is None for sequence in sequences):
        slots = [sequence.slot for sequence in sequences]
        return slots, slots
    return [sequence.read_slot for sequence in sequences], [sequence.write_slot for sequence in sequences]
