"""What a sampler backend provides. Meaning of the parameters: params.py; the definition in code: naive.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sampling.params import SamplingParams


@dataclass(slots=True)
class Logprobs:
    """Log-probabilities of the distribution over what a mask allows, before penalties, temperature and truncation;
    R rows."""

    chosen: Tensor
    """[R] fp32"""
    top_ids: Tensor
    """[R, n] int64, likeliest first; n the most any row asked for"""
    top: Tensor
    """[R, n] fp32"""


@dataclass(slots=True)
class SamplerOutput:
    """The drawn tokens, still on the sampler's device."""

    token_ids: Tensor
    """[R] int64"""
    logprobs: Logprobs | None = None
    """None when no row of this step asked for them"""


class Sampler(Protocol):
    """Draws tokens. Owns, per *seat* (a running row's number, 0 .. max_rows-1), the parameters, the step
    number and the penalty counts; all of it lives on the device and is written at admission only."""

    name: str

    @staticmethod
    def unavailable_reason(device: torch.device) -> str | None:
        """Why this sampler cannot serve this device; None if it can."""
        ...

    def __init__(self, max_rows: int, vocab: int, device: torch.device, penalty_exempt_ids: list[int]) -> None:
        """`penalty_exempt_ids`: tokens that never add to the penalty count (digits, spaces, tabs)."""
        ...

    def admit(self, req_slot: int, params: SamplingParams) -> None:
        """A new row takes this seat: write its parameters, forget the last row's tokens, step = 0."""
        ...

    def append_tokens(self, req_slots: list[int], runs: list[list[int]]) -> None:
        """The rows of these seats have gone on by the tokens of a run each without a draw: count them as if drawn.

        Seats are distinct, runs are not empty. Does not wait for the device.
        """
        ...

    def sample(self, logits: Tensor, req_slots: list[int], masks: Tensor | None = None) -> SamplerOutput:
        """Draw one token for each row of logits [R, V] fp32 (may be overwritten), then count it.

        Row i of `logits` belongs to seats[i]; seats are distinct. masks [R, V/32] int32: bit j % 32 of word j / 32 is
        set where token j is allowed; None: all are. Does not wait for the device.
        """
        ...
