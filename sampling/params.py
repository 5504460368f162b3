"""Sampling parameters of a row. Plain data without torch, so HTTP workers may import it."""

from __future__ import annotations

import enum

import msgspec


class Method(enum.StrEnum):
    """Which of the two definitions of the RWKV family samples the token."""

    STANDARD = "standard"
    """Penalties, temperature, top_k, top_p, then one sample by the Gumbel-max rule."""

    NOISE = "noise"
    """argmax(logits / temperature + U(0, noise)), as /big_batch has it."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of a row.

    They apply in this order: logit bias and bans, penalties, temperature, top_k and top_p, sample. Both top_k and
    top_p use the full distribution. `seed` and the row's step number determine the random numbers, so a row's text does
    not depend on the batch.
    """

    temperature: float = 1.0
    """0: greedy"""
    top_k: int = 0
    """0 or >= V: off"""
    top_p: float = 1.0
    """>= 1: off; 0: greedy"""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_decay: float = 1.0
    seed: int = 0
    """64 bits, unsigned"""
    logit_bias: dict[int, float] = {}
    """Token id -> value added to its logit; -inf bans the token."""
    method: Method = Method.STANDARD
    noise: float = 0.0
    top_logprobs: int | None = None
    """Number of log-probabilities besides the sampled token's, before truncation; None: none at all."""

    @property
    def is_greedy(self) -> bool:
        return self.method is Method.STANDARD and (self.temperature == 0 or self.top_k == 1 or self.top_p <= 0)

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0
