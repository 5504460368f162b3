"""A sampler's data per request slot: parameters, step, bias and seen tokens.

On the device, for the samplers written in torch. `admit` writes a slot; `advance` adds one to its step.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from native.tensors import on_device
from sampling.params import SamplingParams
from sampling.philox import signed64

MIN_TEMPERATURE = 1e-8
"""Lower temperatures give the greedy result in fp32. Keeps 1/T finite."""
MAX_LOGIT = 1e30
"""Larger logits (+inf too) are clamped to this, so that no arithmetic on logits makes a NaN."""
MIN_CAPACITY = 64


def inverse_temperature(params: SamplingParams) -> float:
    """Return 1 / T. Callers round it to fp32 and multiply logits by it."""
    return 1.0 / max(params.temperature, MIN_TEMPERATURE)


def check_bias(params: SamplingParams, vocab: int) -> None:
    """Check a logit bias. Raises ValueError for a NaN bias or a token outside the vocabulary."""
    for token, value in params.logit_bias.items():
        if not 0 <= token < vocab:
            raise ValueError(f"logit_bias: token {token} is outside the vocabulary of {vocab}")
        if math.isnan(value):
            raise ValueError(f"logit_bias: the value for token {token} is NaN; send a number")


class Biased(NamedTuple):
    """The rows of a step with a logit bias, [b] int64 each."""

    rows: Tensor
    req_slots: Tensor
    counts: Tensor
    """numbers of entries"""


class Penalised(NamedTuple):
    """The rows of a step with presence or frequency penalties."""

    rows: Tensor
    """[p] int64"""
    req_slots: Tensor
    """[p] int64"""
    alphas: Tensor
    """[p, 3] fp32: presence, frequency, decay"""
    listed: list[int]
    """`req_slots` on the host"""


class ReqSlotTable:
    """State of `max_rows` request slots. One thread uses it.

    Sparse lists are [max_rows, capacity] and grow when a row needs more. The device has the exact number of valid
    entries, the host an upper bound. So nothing is read back.
    """

    def __init__(self, max_rows: int, vocab: int, device: torch.device, penalty_exempt_ids: list[int]) -> None:
        self.vocab, self.device = vocab, device
        self.params = [SamplingParams(temperature=0.0)] * max_rows
        self.version = 0
        """Grows with every admission. Plans are valid for one version."""
        self.steps = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.penalty_exempt = torch.zeros(vocab, dtype=torch.bool, device=device)
        self.penalty_exempt[torch.tensor(penalty_exempt_ids, dtype=torch.int64, device=device)] = True
        self.seen_ids = torch.zeros(max_rows, MIN_CAPACITY, dtype=torch.int64, device=device)
        self.seen_counts = torch.zeros(max_rows, MIN_CAPACITY, device=device)
        self.num_seen = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.bias_ids = torch.zeros(max_rows, MIN_CAPACITY, dtype=torch.int64, device=device)
        self.bias_values = torch.zeros(max_rows, MIN_CAPACITY, device=device)
        self._max_seen = [0] * max_rows

    def admit(self, req_slot: int, params: SamplingParams) -> None:
        """Start a new row in this request slot. Raises ValueError for a bad logit bias."""
        check_bias(params, self.vocab)
        self.version += 1
        self.params[req_slot] = params
        self.steps[req_slot] = 0
        self.num_seen[req_slot] = 0
        self._max_seen[req_slot] = 0
        if params.logit_bias:
            self._write_bias(req_slot, params.logit_bias)

    def _write_bias(self, req_slot: int, bias: dict[int, float]) -> None:
        self.bias_ids = _widened(self.bias_ids, len(bias))
        self.bias_values = _widened(self.bias_values, len(bias))
        self.bias_ids[req_slot, : len(bias)] = self.ids(list(bias))
        self.bias_values[req_slot, : len(bias)] = on_device(list(bias.values()), torch.float32, self.device)

    def seeds(self, req_slots: list[int]) -> Tensor:
        """Return the bits of the seeds, [R] int64."""
        return self.ids([signed64(self.params[req_slot].seed) for req_slot in req_slots])

    def biased(self, req_slots: list[int]) -> Biased | None:
        """Return the rows of these slots with a logit bias. None: there is no such row."""
        rows = [row for row, req_slot in enumerate(req_slots) if self.params[req_slot].logit_bias]
        listed = [req_slots[row] for row in rows]
        sizes = [len(self.params[req_slot].logit_bias) for req_slot in listed]
        return Biased(self.ids(rows), self.ids(listed), self.ids(sizes)) if rows else None

    def penalised(self, req_slots: list[int]) -> Penalised | None:
        """Return the rows of these slots with penalties. None: there is no such row."""
        rows = [row for row, req_slot in enumerate(req_slots) if self.params[req_slot].has_penalties]
        listed = [req_slots[row] for row in rows]
        params = [self.params[req_slot] for req_slot in listed]
        alphas = [[p.presence_penalty, p.frequency_penalty, p.penalty_decay] for p in params]
        on_this_device = on_device(alphas, torch.float32, self.device)
        return Penalised(self.ids(rows), self.ids(listed), on_this_device, listed) if rows else None

    def ids(self, values: list[int]) -> Tensor:
        """Copy whole numbers to the device, [n] int64."""
        return on_device(values, torch.int64, self.device)

    def add_bias(self, logits: Tensor, biased: Biased) -> None:
        """Add each slot's bias to its row of logits [R, V], in place."""
        rows, req_slots, counts = biased
        width = int(counts.max()) if counts.device.type == "cpu" else self.bias_ids.shape[1]
        valid = torch.arange(width, device=self.device) < counts.unsqueeze(1)
        values = self.bias_values[req_slots, :width].masked_fill(~valid, 0.0)
        _add_at(logits, rows, self.bias_ids[req_slots, :width].masked_fill(~valid, 0), values)

    def subtract_penalties(self, logits: Tensor, penalised: Penalised) -> None:
        """Subtract `presence + count * frequency` from logits [R, V] for every token seen, in place."""
        rows, req_slots, alphas, listed = penalised
        width = self._max_num_seen(listed)
        if width == 0:
            return
        valid = torch.arange(width, device=self.device) < self.num_seen[req_slots].unsqueeze(1)
        penalty = self.seen_counts[req_slots, :width] * alphas[:, 1:2] + alphas[:, 0:1]
        ids = self.seen_ids[req_slots, :width].masked_fill(~valid, 0)
        _add_at(logits, rows, ids, penalty.masked_fill_(~valid, 0.0).neg_())

    def _max_num_seen(self, req_slots: list[int]) -> int:
        """Return an upper bound of tokens seen by any of these slots."""
        return max((self._max_seen[req_slot] for req_slot in req_slots), default=0)

    def count(self, penalised: Penalised, sampled: Tensor) -> None:
        """Decay the counts, then count each row's token of those sampled in the step, [R] int64."""
        rows, req_slots, alphas, listed = penalised
        tokens = sampled[rows]
        for req_slot in listed:
            self._max_seen[req_slot] += 1
        width = self._max_num_seen(listed)
        self.seen_ids, self.seen_counts = _widened(self.seen_ids, width), _widened(self.seen_counts, width)
        known = self.num_seen[req_slots]
        columns = torch.arange(width, device=self.device)
        match = (self.seen_ids[req_slots, :width] == tokens.unsqueeze(1)) & (columns < known.unsqueeze(1))
        is_known, at = match.max(dim=1)
        at = torch.where(is_known, at, known)
        counts = self.seen_counts[req_slots, :width] * alphas[:, 2:3]
        is_token = columns == at.unsqueeze(1)
        # A new token starts at 0: the entry may hold a count of the slot's previous row.
        fresh = is_token & ~is_known.unsqueeze(1)
        counts = counts.masked_fill_(fresh, 0.0) + (is_token & ~self.penalty_exempt[tokens].unsqueeze(1))
        self.seen_counts[req_slots, :width] = counts
        self.seen_ids[req_slots, at] = tokens
        self.num_seen[req_slots] = known + (~is_known)

    def append_tokens(self, req_slots: list[int], runs: list[list[int]]) -> None:
        for req_slot, run in zip(req_slots, runs, strict=True):
            penalised = self.penalised([req_slot])
            if penalised is not None:
                for token in self.ids(run).split(1):
                    self.count(penalised, token)
            self.steps[req_slot] += len(run)

    def advance(self, req_slots: Tensor) -> None:
        """Add one to the step of these slots. req_slots [r] int64"""
        self.steps[req_slots] += 1


def _widened(table: Tensor, width: int) -> Tensor:
    """Return the table with at least `width` columns. New columns are zero."""
    rows, capacity = table.shape
    if width <= capacity:
        return table
    wider = table.new_zeros(rows, max(width, 2 * capacity))
    wider[:, :capacity] = table
    return wider


def _add_at(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> None:
    """Add values in place: logits[rows[i], ids[i, j]] += values[i, j]

    ids are distinct within a row, except for padding: zeros added to token 0.
    """
    flat = (rows.unsqueeze(1) * logits.shape[1] + ids).flatten()
    logits.view(-1).index_add_(0, flat, values.flatten())
