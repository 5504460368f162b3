"""The interface of a sampler. params.py explains the parameters; naive.py is the definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from native.tensors import on_device
from sampling.params import SamplingParams


@dataclass(slots=True)
class Logprobs:
    """Log-probabilities of R rows after the mask, before penalties, temperature and truncation."""

    chosen: Tensor
    """[R] fp32"""
    top_ids: Tensor
    """[R, n] int64, likeliest first; n is the largest number that a row requested"""
    top: Tensor
    """[R, n] fp32"""


@dataclass(slots=True)
class SamplerOutput:
    """The sampled tokens, on the sampler's device."""

    token_ids: Tensor
    """[R] int64"""
    logprobs: Logprobs | None = None
    """None if no row of this step requested them"""


class Sampler(Protocol):
    """Samples tokens; one thread uses it. Owns the parameters, step number and penalty counts of each request slot.

    A request slot is the number of a running row, 0 .. max_rows-1. All state is on the device and written at admission.
    """

    name: str

    @staticmethod
    def unavailable_reason(device: torch.device) -> str | None:
        """Return why it cannot run on the device. None: it can."""

    def __init__(self, max_rows: int, vocab: int, device: torch.device, penalty_exempt_ids: list[int]) -> None:
        """penalty_exempt_ids: tokens without penalties (digits, spaces, tabs)."""

    def admit(self, req_slot: int, params: SamplingParams) -> None:
        """Start a new row in this slot: write its parameters, forget the old tokens, set step = 0."""

    def append_tokens(self, req_slots: list[int], runs: list[list[int]]) -> None:
        """Count runs[i] for the row of req_slots[i] as if sampled.

        Slots are distinct, runs are not empty. Does not wait for the device.
        """

    def sample(self, logits: Tensor, req_slots: list[int], masks: Tensor | None = None) -> SamplerOutput:
        """Sample and count one token per row of logits [R, V] fp32.

        May overwrite the logits. Row i belongs to req_slots[i]; slots are distinct. masks [R, V/32] int32: bit j % 32
        of word j / 32 is 1 if token j is allowed; None: all are. Does not wait for the device.
        """


@runtime_checkable
class SamplesAhead(Protocol):
    """A sampler that samples several tokens of a row at once, if those between them are guessed."""

    def sample_ahead(self, logits: Tensor, req_slots: list[int], runs: list[list[int]]) -> Tensor:
        """Sample for each row as if `append_tokens` had counted its run, but count nothing.

        logits: [R, V] fp32, may be overwritten. req_slots need not be distinct; their rows have no filters. Returns
        [R] int64. Does not wait for the device.
        """


@dataclass(slots=True)
class RawLogprobs:
    """log_softmax of those rows of a step that requested log-probabilities."""

    rows: Tensor
    """[q] int64, in the step"""
    values: Tensor
    """[q, V] fp32, -inf instead of NaN"""
    num_top: int
    """the largest number that a row requested"""

    def gather(self, tokens: Tensor) -> Logprobs:
        """Return the values of the sampled tokens [R] and the largest ones. Rows without a request have zeros."""
        count = min(self.num_top, self.values.shape[1])
        ids = tokens.new_zeros(len(tokens), count)
        top = self.values.new_zeros(len(tokens), count)
        chosen = self.values.new_zeros(len(tokens))
        top[self.rows], ids[self.rows] = self.values.topk(count, dim=1)
        chosen[self.rows] = self.values.gather(1, tokens[self.rows].unsqueeze(1)).squeeze(1)
        return Logprobs(chosen=chosen, top_ids=ids, top=top)


def target_logprobs(logits: Tensor, targets: Tensor, count: int) -> Logprobs:
    """Return log_softmax of logits at the targets and the `count` largest.

    logits: [R, V] fp32. targets: [R] int64. If a target has the largest logit, its value equals the first of `top`
    exactly. A row's values do not depend on R: log_softmax sums each row by itself.
    """
    # On a GPU, topk takes several times as long as the rest of this function.
    top_ids = logits.max(dim=1, keepdim=True).indices[:, :count] if count < 2 else logits.topk(count, dim=1).indices
    values, lowest = torch.log_softmax(logits, dim=1), -float("inf")
    return Logprobs(
        chosen=values.gather(1, targets.unsqueeze(1)).nan_to_num_(nan=lowest, neginf=lowest).squeeze(1),
        top_ids=top_ids,
        top=values.gather(1, top_ids).nan_to_num_(nan=lowest, neginf=lowest),
    )


def raw_logprobs(logits: Tensor, params: Sequence[SamplingParams]) -> RawLogprobs | None:
    """Return log_softmax of the rows of logits [R, V] whose parameters request it. None: no row does."""
    rows = [row for row, one in enumerate(params) if one.top_logprobs is not None]
    if not rows:
        return None
    picked = on_device(rows, torch.int64, logits.device)
    values = torch.log_softmax(logits[picked].float(), dim=1)
    values.nan_to_num_(nan=-float("inf"), neginf=-float("inf"))
    return RawLogprobs(picked, values, max(params[row].top_logprobs or 0 for row in rows))
