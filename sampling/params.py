"""What a request may ask of the sampler. Plain data: no torch, so HTTP workers may import it."""

from __future__ import annotations

import enum

import msgspec


class Method(enum.StrEnum):
    """Which of the family's two definitions draws the token."""

    STANDARD = "standard"
    """Penalties, temperature, top_k, top_p, then one draw by the Gumbel-max rule."""

    NOISE = "noise"
    """big_batch with `noise`: argmax(logits / temperature + U(0, noise))."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Per-row sampling parameters; nothing is optional but `top_logprobs`.

    The order in which they act is fixed: logit bias and banned tokens, penalties, temperature, then
    top_k and top_p (both look at the full distribution), then the draw. `seed` and the row's step
    number decide the random numbers, so a row's text does not depend on its neighbours.
    """

    temperature: float = 1.0
    """0 means greedy."""
    top_k: int = 0
    """0 or >= vocabulary: off."""
    top_p: float = 1.0
    """>= 1: off; 0: greedy."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_decay: float = 1.0
    seed: int = 0
    """Unsigned, 64 bits."""
    logit_bias: dict[int, float] = {}
    """Token id -> what is added to its logit; -inf bans it."""
    method: Method = Method.STANDARD
    noise: float = 0.0
    top_logprobs: int | None = None
    """None: no log-probabilities; n: the chosen token's and the n largest, of the distribution before truncation."""

    @property
    def is_greedy(self) -> bool:
        """Whether no random number is needed."""
        return self.method is Method.STANDARD and (self.temperature == 0 or self.top_k == 1 or self.top_p <= 0)

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens generated so far matter."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0
