"""The inputs of a step's rows: tokens, adapters, and the slots of states.

A row that reads a mixture of states takes one device row per member. The members' logits are mixed to those of one row.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

import torch
from torch import Tensor

from native.tensors import on_device
from rwkv_batch.core.drafters import ModelDrafter
from rwkv_batch.core.scheduler import ScheduledRow
from rwkv_batch.core.sequence import NO_SLOT, PENDING, Sequence
from rwkv_batch.model.adapter_table import NO_ADAPTER
from rwkv_batch.model.step_inputs import CONTINUES, LateTokens, StepInputs, flat_inputs
from rwkv_batch.runner.links import DeviceGuesses, LastTokens
from state_pool.origins import Adapters


def device_slots(sequence: Sequence) -> list[tuple[int, int]]:
    """Return the slots to read and to write, for each device row of a row."""
    slots = [(sequence.read_slot, sequence.write_slot)]
    if sequence.members:
        slots += [(member.read_slot(sequence.num_computed_tokens), member.slot) for member in sequence.members]
    return slots


def num_device_rows(rows: Iterable[ScheduledRow]) -> int:
    """Return the number of device rows: one per row, or per member of its mixture."""
    return sum(1 + len(row.sequence.members) for row in rows)


def mix_logits(logits: Tensor, sampling_rows: list[ScheduledRow]) -> Tensor:
    """Mix the logits [E, V] of all members to logits [R, V].

    The result has one row per sampling row. A row without members keeps its logits exactly. A mixture's logits are
    added in the order of its members.
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


def split_drafts(logits: Tensor, sampling_rows: list[ScheduledRow]) -> tuple[Tensor, Tensor | None]:
    """Return the logits [E, V] of a step's own device rows, and those of its drafts [D, V] for later, if any."""
    count = num_device_rows(sampling_rows)
    if len(logits) == count:
        return logits, None
    return logits[:count], logits[count:]


class RowInputs:
    """Builds a step's inputs from scheduled rows. Engine thread."""

    def __init__(self, adapters: Adapters, device: torch.device) -> None:
        """device: of the first layers"""
        self._adapters = adapters
        self._device = device

    def build(self, rows: list[ScheduledRow], last_tokens: LastTokens) -> StepInputs:
        """Return the rows' inputs. Tokens unknown to the host are filled in from `last_tokens`.

        Each drafted token is a device row that continues the one before. The logits of drafts come last.
        """
        reads, writes, tokens, ends = list[int](), list[int](), list[int](), [0]
        logit_tokens, drafted, late = list[int](), list[int](), dict[DeviceGuesses, LateTokens]()
        sequences, pending = list[Sequence](), list[int]()
        """by device row; device rows whose token the host does not know"""
        for row in rows:
            sequence = row.sequence
            first = sequence.num_computed_tokens
            known = sequence.token_ids[first : first + row.num_tokens]
            # Each member of a mixture is a device row.
            for slots in device_slots(sequence):
                tokens += known
                ends.append(len(tokens))
                reads.append(slots[0])
                writes.append(slots[1])
                if known[-1] == PENDING:
                    pending.append(len(sequences))
                sequences.append(sequence)
                if row.samples_token:
                    logit_tokens.append(len(tokens) - 1)
            if (draft := sequence.draft) is not None:
                count = len(draft.tokens)
                places = range(len(tokens), len(tokens) + count)
                draft.first_logit = len(drafted)
                drafted += places
                drafter = draft.drafter.drafter
                if isinstance(drafter, ModelDrafter) and (guesses := self._guesses_of(drafter)) is not None:
                    one = late.get(guesses)
                    if one is None:
                        one = late[guesses] = LateTokens(guesses.tokens, [], [])
                    one.places.extend(places)
                    one.sources.extend(drafter.places[:count])
                else:
                    draft.read_guesses()
                tokens += draft.tokens
                ends += range(places.start + 1, places.stop + 1)
                reads += [CONTINUES] * count
                writes += draft.slots
                sequences += [sequence] * count
        inputs = flat_inputs(tokens, ends, reads, writes, logit_tokens + drafted)
        inputs.late_tokens = list(late.values())
        if (adapters := self.adapters_of(sequences)) is not None:
            inputs.adapters = torch.tensor(adapters).repeat_interleave(inputs.cu_seqlens.diff())
        if pending:
            inputs = inputs.to(self._device)
            input_tokens = last_tokens.input_tokens
            req_slots = on_device([sequences[i].req_slot for i in pending], torch.int64, input_tokens.device)
            at = inputs.cu_seqlens[on_device(pending, torch.int64, inputs.cu_seqlens.device)]
            inputs.tokens[at] = input_tokens[req_slots].to(inputs.tokens.device)
        return inputs

    def _guesses_of(self, drafter: ModelDrafter) -> DeviceGuesses | None:
        """Return guesses that the host does not know yet, if they are on the device of the inputs."""
        guesses = drafter.pending
        return guesses if isinstance(guesses, DeviceGuesses) and guesses.tokens.device == self._device else None

    def adapters_of(self, sequences: list[Sequence]) -> list[int] | None:
        """Return each row's adapter number, 0 for none. None: no row has an adapter."""
        if not self._adapters.num_refs or all(sequence.adapter is None for sequence in sequences):
            return None
        return [NO_ADAPTER if one.adapter is None else one.adapter.slot_index for one in sequences]


def slots_of(sequences: list[Sequence]) -> tuple[list[int], list[int]]:
    """Return read and write slots of rows that have read their prompts."""
    if all(sequence.spare_slot == NO_SLOT and sequence.shared is None for sequence in sequences):
        slots = [sequence.slot for sequence in sequences]
        return slots, slots
    return [sequence.read_slot for sequence in sequences], [sequence.write_slot for sequence in sequences]
