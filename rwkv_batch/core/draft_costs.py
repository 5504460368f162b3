"""Cost and gain of drafts, in tokens that a step without drafts yields in the same time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from rwkv_batch.core.drafters import MAX_DRAFT_TOKENS

SMOOTHING, FALLING = 0.2, 0.5
"""Weight of a new time, and of one below the average: times exceed the usual one for many reasons."""
DECAY = 0.95
"""Weight of the sums of older steps with drafts."""
SKIPPED_STEPS = 4
MIN_WEIGHT = 4.0
"""Steps with drafts, older ones counting less, below which their times are not used yet."""


def smoothed(before: float, new: float) -> float:
    """Return the average with a new time, which counts as twice the average at most. `before` is 0 if there is none."""
    if not before:
        return new
    return before + (min(new, 2 * before) - before) * (SMOOTHING if new > before else FALLING)


class DraftCost(NamedTuple):
    """Cost of drafts in tokens: those that the step yields without drafts in the same time."""

    fixed: float
    """of a step's drafts of any number and length"""
    token: float
    """of each of their tokens"""
    guess: float
    """of each further token that the draft model guesses, for all rows together"""


CERTAIN_COST = DraftCost(0.3, 0.02, 0.1)
"""For one row, before anything is measured: low, so that it is."""


@dataclass(slots=True)
class Added:
    """Seconds that drafts add to steps of one size. Older ones count less."""

    weight: float = 0.0
    tokens: float = 0.0
    squares: float = 0.0
    """of drafted tokens"""
    added: float = 0.0
    products: float = 0.0
    """of tokens and added seconds"""

    def count(self, num_tokens: int, seconds: float, plain_s: float) -> None:
        """Count a step that took so many seconds more than a plain one."""
        fixed_s, token_s = self.seconds
        usual = 2 * (fixed_s + token_s * num_tokens) + plain_s / 2 if self.weight else 3 * plain_s
        seconds = max(0.0, min(seconds, usual))
        self.weight = DECAY * self.weight + 1
        self.tokens = DECAY * self.tokens + num_tokens
        self.squares = DECAY * self.squares + num_tokens**2
        self.added = DECAY * self.added + seconds
        self.products = DECAY * self.products + num_tokens * seconds

    @property
    def seconds(self) -> tuple[float, float]:
        """Those of any draft, and of each drafted token."""
        if not self.weight:
            return 0.0, 0.0
        spread = self.weight * self.squares - self.tokens**2
        slope = self.weight * self.products - self.tokens * self.added
        # Drafts of one length do not show which part is fixed: three quarters of it.
        token_s = slope / spread if spread > 0.01 * self.tokens**2 else self.added / self.tokens / 4
        token_s = min(max(token_s, 0.0), self.added / self.tokens)
        return (self.added - token_s * self.tokens) / self.weight, token_s


@dataclass(slots=True)
class StepTimes:
    """Measured times of steps without prompts."""

    plain_s: dict[int, float] = field(default_factory=dict)
    """by number of rows: smoothed seconds of a step without drafts; 0: only one ran, which may have captured a graph"""
    num_skipped: int = 0
    """first steps with drafts, which may compile or capture something, so they are not measured"""
    added: dict[int, Added] = field(default_factory=dict)
    """by number of rows: what drafts add"""

    def count(self, num_rows: int, num_draft_tokens: int, seconds: float) -> None:
        """Count a step with this many drafted tokens."""
        before = self.plain_s.get(num_rows)
        if not num_draft_tokens:
            self.plain_s[num_rows] = 0.0 if before is None else smoothed(before, seconds)
        elif self.num_skipped < SKIPPED_STEPS:
            self.num_skipped += 1
        elif before:
            self.added.setdefault(num_rows, Added()).count(num_draft_tokens, seconds - before, before)

    def cost(self, num_rows: int, model_s: float) -> DraftCost:
        """Return the cost of drafts in a step of this many rows. model_s: `Speculation.model_s`"""
        plain_s, known = self.plain_s.get(num_rows), [n for n, one in self.added.items() if one.weight >= MIN_WEIGHT]
        if not plain_s or not known:
            return DraftCost(*(num_rows * one for one in CERTAIN_COST))
        fixed_s, token_s = self.added[min(known, key=lambda n: abs(n - num_rows))].seconds
        tokens_per_s = num_rows / plain_s
        guess = model_s * tokens_per_s if model_s else num_rows * CERTAIN_COST.guess
        return DraftCost(fixed_s * tokens_per_s, token_s * tokens_per_s, guess)


def best_length(rate: float, token_cost: float, max_length: int = MAX_DRAFT_TOKENS) -> tuple[int, float]:
    """Return the number of tokens to draft, and how many tokens that gains. 0 if no draft pays.

    rate: chance that a token is accepted
    token_cost: time of each token, in tokens that the step yields in it without drafts
    """
    best, best_gain, gain, chance = 0, 0.0, 0.0, 1.0
    for length in range(1, max_length + 1):
        chance *= rate
        gain += chance - token_cost
        if gain > best_gain:
            best, best_gain = length, gain
    return best, best_gain
