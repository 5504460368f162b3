"""The interface of a sampler. params.py explains the parameters; naive.py is the definition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

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
        """None: it can run on the device."""
        ...

    def __init__(self, max_rows: int, vocab: int, device: torch.device, penalty_exempt_ids: list[int]) -> None:
        """penalty_exempt_ids: tokens without penalties (digits, spaces, tabs)."""
        ...

    def admit(self, req_slot: int, params: SamplingParams) -> None:
        """Start a new row in this slot: write its parameters, forget the old tokens, set step = 0."""
        ...

    def append_tokens(self, req_slots: list[int], runs: list[list[int]]) -> None:
        """Count runs[i] for the row of req_slots[i] as if it had been sampled.

        Slots are distinct, runs are not empty. Does not wait for the device.
        """
        ...

    def sample(self, logits: Tensor, req_slots: list[int], masks: Tensor | None = None) -> SamplerOutput:
        """Sample one token for each row of logits [R, V] fp32, then count it.

        May overwrite the logits. Row i belongs to req_slots[i]; slots are distinct. masks [R, V/32] int32: bit j % 32
        of word j / 32 is 1 if token j is allowed; None: all are. Does not wait for the device.
        """
        ...
