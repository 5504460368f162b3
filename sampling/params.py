"""Sampling parameters of a row. Plain data without torch, so HTTP workers may import it."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec
from msgspec import Meta


class Method(enum.StrEnum):
    """Which of the two definitions of the RWKV family samples the token."""

    STANDARD = "standard"
    """Penalties, temperature, top_k, top_p, then one sample by the Gumbel-max rule."""

    NOISE = "noise"
    """argmax(logits / temperature + U(0, noise)), as /big_batch has it."""


MAX_WINDOW = 4096
"""Largest number of last tokens that repetition_penalty and DRY look at."""
MAX_BREAKERS, MAX_BREAKER_BYTES = 8, 32
MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS = 64, 32
DEFAULT_ORDER = tuple(
    "penalties dry temperature top_n_sigma min_p typ_p epsilon_cutoff eta_cutoff top_p top_k xtc".split()
)
"""Names of the filters in llama.cpp's `samplers`, in the order of requests that give none."""
Window = Annotated[int, Meta(ge=-1, lt=2**31)]


class Filters(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of the samplers beyond SamplingParams. Their defaults turn them off.

    The annotations are also the limits and descriptions of the requests' fields. `filters.py` is the definition.
    """

    min_p: Annotated[
        float, Meta(ge=0, le=1, description="Minimum probability, relative to the most probable token. 0 turns it off.")
    ] = 0.0
    typical_p: Annotated[
        float, Meta(gt=0, le=1, description="Locally typical sampling: mass of the typical tokens. 1 turns it off.")
    ] = 1.0
    epsilon_cutoff: Annotated[float, Meta(ge=0, le=1, description="Minimum probability. 0 turns it off.")] = 0.0
    eta_cutoff: Annotated[
        float,
        Meta(ge=0, le=1, description="Minimum probability, smaller where the entropy is high. 0 turns it off."),
    ] = 0.0
    top_n_sigma: Annotated[
        float,
        Meta(ge=-1, le=1000, description="Keep logits within n standard deviations of the largest. 0 turns it off."),
    ] = 0.0
    xtc_probability: Annotated[
        float, Meta(ge=0, le=1, description="Probability of removing all probable tokens but one. 0 turns XTC off.")
    ] = 0.0
    xtc_threshold: Annotated[float, Meta(ge=0, le=1, description="Probability from which XTC removes tokens.")] = 0.1
    repetition_penalty: Annotated[
        float,
        Meta(
            ge=0.01,
            le=100,
            description="Divides positive logits, and multiplies negative ones, of tokens in prompt or answer. "
            "1 turns it off.",
        ),
    ] = 1.0
    repeat_last_n: Annotated[
        Window, Meta(description="Last tokens that repetition_penalty looks at. -1: 4096, the maximum.")
    ] = -1
    dry_multiplier: Annotated[
        float, Meta(ge=0, le=100, description="Size of the penalty for a repeated sequence. 0 turns DRY off.")
    ] = 0.0
    dry_base: Annotated[
        float, Meta(ge=1, le=10, description="Factor of DRY's penalty for each further repeated token.")
    ] = 1.75
    dry_allowed_length: Annotated[
        int, Meta(ge=1, le=64, description="Longest repeated sequence that gets DRY's smallest penalty.")
    ] = 2
    dry_penalty_last_n: Annotated[
        Window, Meta(description="Last tokens that DRY looks at. -1: 4096, the maximum. 0 turns DRY off.")
    ] = -1
    dynatemp_range: Annotated[
        float,
        Meta(ge=0, le=100, description="The temperature follows the entropy within this range. 0 turns it off."),
    ] = 0.0
    dynatemp_exponent: Annotated[
        float, Meta(ge=0, le=100, description="Exponent of the entropy in the dynamic temperature.")
    ] = 1.0
    mirostat: Annotated[
        int,
        Meta(ge=0, le=2, description="Version of Mirostat, which replaces the truncating samplers. 0 turns it off."),
    ] = 0
    mirostat_tau: Annotated[float, Meta(ge=0, le=100, description="Mirostat's target of surprise, in bits.")] = 5.0
    mirostat_eta: Annotated[float, Meta(ge=0, le=10, description="Mirostat's learning rate.")] = 0.1
    min_tokens: Annotated[
        int, Meta(ge=0, lt=2**31, description="Number of tokens before which no stop ends the answer.")
    ] = 0
    samplers: tuple[str, ...] = DEFAULT_ORDER
    """the filters in use, in order"""
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    """texts; a sequence that DRY finds contains no token with one"""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """token sequences of at least two tokens; the last one is banned where the others are the last tokens"""

    @property
    def is_active(self) -> bool:
        """Whether any of them changes what is sampled."""
        return bool(
            self.min_p > 0
            or self.typical_p < 1
            or self.epsilon_cutoff > 0
            or self.eta_cutoff > 0
            or self.top_n_sigma > 0
            or self.xtc_probability > 0
            or self.uses_repetition
            or self.uses_dry
            or self.dynatemp_range > 0
            or self.mirostat
            or self.min_tokens
            or self.bad_words
            or self.samplers != DEFAULT_ORDER
        )

    @property
    def uses_repetition(self) -> bool:
        return self.repetition_penalty != 1 and self.repeat_last_n != 0

    @property
    def uses_dry(self) -> bool:
        return self.dry_multiplier > 0 and self.dry_penalty_last_n != 0


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of a row.

    They apply in this order: logit bias and bans, penalties, temperature, top_k and top_p, sample. Both top_k and
    top_p use the full distribution, or what the filters leave of it. `seed` and the row's step number determine the
    random numbers, so a row's text does not depend on the batch.
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

    filters: Filters | None = None
    """None: all are off"""

    @property
    def is_fused(self) -> bool:
        """Whether one launch of a sampler applies all of it. Graphs need this."""
        return self.top_logprobs is None and self.filters is None

    @property
    def is_greedy(self) -> bool:
        """Whether the row takes the largest logit. Includes `Method.NOISE` at temperature 0 or without noise."""
        if self.method is Method.NOISE:
            return self.temperature == 0 or self.noise == 0
        return self.temperature == 0 or self.top_k == 1 or self.top_p <= 0

    @property
    def has_penalties(self) -> bool:
        """Whether sampled tokens change later logits. Never for `Method.NOISE`."""
        return self.method is Method.STANDARD and (self.presence_penalty != 0 or self.frequency_penalty != 0)
