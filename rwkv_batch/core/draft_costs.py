"""Seconds of steps with and without drafts, and the tokens that drafts yield."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from statistics import median_low
from typing import NamedTuple

from rwkv_batch.core.drafters import MAX_DRAFT_TOKENS, Draft, RowDrafter

RECENT = 9
"""Latest steps of a kind whose median counts."""
ENOUGH = 3
"""Steps of a kind below which it is not known."""
EXPIRY_STEPS = 100
"""Steps without drafts after which the slowest one with drafts of each kind is forgotten."""
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, MAX_DRAFT_TOKENS)
"""Lengths of drafts to choose from."""
HOST_S, HOST_DRAFT_S = 0.0002, 0.00002
"""From the tokens of a step with drafts to the launch of the next one, and for each draft, before it is measured: low,
so that drafts are tried."""
ADDED_S = 0.0001
"""Time of sampling and staging in a step with drafts, beyond its graph and the longer of guesses and host, before it is
measured."""
FIRST_HOST_S, FIRST_HOST_DRAFT_S = 0.0005, 0.0002
"""Both for a step with drafts after one without: the device has nothing to run while the host prepares it."""
ASSUMED_FACTOR = 1.25
"""Times of a plain step that one with drafts takes without graphs. Low, so that drafts are tried and measured."""
ASSUMED_GUESS = 0.1
"""The same, of each token that the draft model guesses."""
MIN_GAIN, KEPT_GAIN = 0.03, -0.015
"""Gain of a step's drafts, in steps, below which they are left out: their cost may be underestimated. The second holds
after a step with drafts: a few unlucky ones end nothing, because without drafts nothing is learnt."""


class Shape(NamedTuple):
    """Size of a step on the device."""

    rows: int
    """with one for each drafted token"""
    tokens: int
    logits: int
    drafts: int = 0

    def with_drafts(self, num_tokens: int, drafts: int) -> Shape:
        """Return the size with this many drafts, which have `num_tokens` in total."""
        return Shape(self.rows + num_tokens, self.tokens + num_tokens, self.logits + num_tokens, drafts)


class Times:
    """Medians of recent seconds by kind. The first of a kind is left out: it may compile or capture something."""

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = {}
        self.medians: dict[int, float] = {}
        """of kinds with enough steps"""

    def count(self, kind: int, seconds: float) -> None:
        """Count a step."""
        recent = self._recent.get(kind)
        if recent is None:
            self._recent[kind] = deque(maxlen=RECENT)
            return
        recent.append(seconds)
        if len(recent) >= ENOUGH:
            self.medians[kind] = median_low(recent)

    def forget_slowest(self) -> None:
        """Forget the slowest step of each kind: those that no step renews become unknown, and are measured again."""
        for kind, recent in self._recent.items():
            if recent:
                recent.remove(max(recent))
                if len(recent) >= ENOUGH:
                    self.medians[kind] = median_low(recent)
                else:
                    self.medians.pop(kind, None)

    def median_near(self, kind: int, default: float) -> float:
        """Return the median of the nearest kind that is known."""
        medians = self.medians
        return medians[min(medians, key=lambda one: abs(one - kind))] if medians else default


class StepTimes:
    """Seconds of steps: of their graphs, or without graphs as measured."""

    def __init__(self, graph_s: Callable[[Shape], float] | None = None) -> None:
        """graph_s: seconds of a step's graph; 0: none fits. None: there are no graphs"""
        self._graph_s = graph_s
        self._plain = Times()
        """by number of tokens, without graphs; by its logarithm, what they took beyond their graph"""
        self._added, self._added_first = Times(), Times()
        """by logarithm of the number of tokens: what steps with drafts took beyond `_least_s` and guesses or the host,
        after others with drafts and after steps without"""
        self._host = Times()
        """by logarithm of the number of drafts: from the tokens of a step with drafts to the launch of the next one"""
        self._guess = Times()
        self._num_plain = 0
        """steps since one with drafts"""

    def plain_s(self, shape: Shape) -> float:
        """Return the seconds of a step without drafts; 0: not known."""
        if self._graph_s is None:
            return self._plain.median_near(shape.tokens, 0.0)
        graph_s = self._graph_s(shape)
        return graph_s and graph_s + max(0.0, self._plain.median_near(shape.tokens.bit_length(), 0.0))

    def drafts_s(self, shape: Shape, plain_s: float, guesses_s: float = 0.0, is_first: bool = False) -> float:
        """Return the seconds of a step with drafts; 0: it fits no graph.

        guesses_s: of its guesses; is_first: the step before has no drafts
        """
        least_s, added, assumed_s = self._least_s(shape, plain_s), self._added, 0.0
        if self._graph_s is not None and is_first:
            added, assumed_s = self._added_first, FIRST_HOST_S + FIRST_HOST_DRAFT_S * shape.drafts
        elif self._graph_s is not None:
            host_s = HOST_S + HOST_DRAFT_S * shape.drafts
            guesses_s = max(guesses_s, self._host.median_near(shape.drafts.bit_length(), host_s))
            assumed_s = ADDED_S
        return least_s and max(plain_s, least_s + added.median_near(shape.tokens.bit_length(), assumed_s)) + guesses_s

    def guess_s(self, num_rows: int, plain_s: float, model_s: Callable[[int], float]) -> float:
        """Return the seconds of each token that the draft model guesses for rows. model_s: of its graph; 0: none"""
        return model_s(num_rows) or self._guess.median_near(0, ASSUMED_GUESS * plain_s)

    def _least_s(self, shape: Shape, plain_s: float) -> float:
        return ASSUMED_FACTOR * plain_s if self._graph_s is None else self._graph_s(shape)

    def count_plain(self, shape: Shape, seconds: float) -> None:
        """Count a step without drafts."""
        self._num_plain += 1
        if self._num_plain % EXPIRY_STEPS == 0:
            self._added.forget_slowest()
            self._host.forget_slowest()
        if self._graph_s is None:
            self._plain.count(shape.tokens, seconds)
        elif graph_s := self._graph_s(shape):
            self._plain.count(shape.tokens.bit_length(), seconds - graph_s)

    def count_drafts(
        self,
        shape: Shape,
        plain_s: float,
        seconds: float,
        guesses_s: float,
        is_first: bool = False,
        host_s: float = 0.0,
    ) -> None:
        """Count a step with drafts.

        guesses_s, is_first: see `drafts_s`; host_s: from the tokens of the step before to its launch
        """
        self._num_plain = 0
        if self._graph_s is None:
            is_first, host_s = False, 0.0
        least_s = self._least_s(shape, plain_s)
        if not (plain_s and least_s):
            return
        if is_first:
            self._added_first.count(shape.tokens.bit_length(), seconds - least_s - guesses_s)
        else:
            self._added.count(shape.tokens.bit_length(), seconds - least_s - max(guesses_s, host_s))
            self._host.count(shape.drafts.bit_length(), host_s)

    def count_guess(self, seconds: float) -> None:
        """Count the seconds of a guessed token."""
        self._guess.count(0, seconds)

    def figures(self) -> dict[str, dict[int, float]]:
        """Return the medians."""
        times = {"plain": self._plain, "guess": self._guess, "host": self._host}
        times |= {"added": self._added, "added_first": self._added_first}
        return {name: one.medians for name, one in times.items()}


class Launched(NamedTuple):
    """A step with drafts: how to measure it."""

    times: StepTimes
    size: Shape
    plain_s: float
    """seconds without drafts"""
    guess_s: float
    """of each guess"""
    first: Draft
    """of its drafts"""
    is_first: bool
    """whether the step before has no drafts"""


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


class Proposal(NamedTuple):
    """What a row can draft."""

    drafter: RowDrafter
    tokens: list[int] | None
    """None: the draft model has to guess them"""
    start: int
    """see `Draft`"""
    max_tokens: int
    gain: float
    """in tokens, without the cost that rows share"""
    rate: float
    """of the drafter; 0: the row has only one drafter, so none is compared"""

    def draft(self, length: int, is_probe: bool = False) -> Draft:
        """Return a draft of at most this many tokens."""
        length = min(length, self.max_tokens)
        if self.tokens is None:
            return Draft(self.drafter, [], self.start, length, 0 if is_probe else length)
        return Draft(self.drafter, self.tokens[:length], self.start)


class Candidate(NamedTuple):
    """A row that can draft."""

    row: int
    """its index in the step"""
    rate: float
    """chance that a drafted token is accepted"""
    log_rate: float
    max_tokens: int
    is_guessed: bool
    """whether the draft model guesses the tokens"""


class Choice(NamedTuple):
    """Drafts of a step."""

    lengths: dict[int, int]
    """tokens to draft, by the row's index"""
    size: Shape
    seconds: float
    """with the guesses; 0: it fits no graph"""
    num_tokens: float
    """that the step is expected to yield"""


class Chooser:
    """Finds the drafts of a step that yield most tokens per second. All rows share the step's time."""

    def __init__(self, times: StepTimes, plain: Shape, plain_s: float, guess_s: float, rows: list[Candidate]) -> None:
        """plain: the step without drafts, which takes `plain_s`; guess_s: of each guessed token"""
        self._times, self._plain, self._guess_s = times, plain, guess_s
        self.rows = rows
        self.nothing = Choice({}, plain, plain_s, plain.logits)

    def best(self, min_gain: float) -> Choice:
        """Return the best drafts, or none if they gain less than this share."""
        best, best_speed = self.nothing, (1 + min_gain) * self._plain.logits / self.nothing.seconds
        top, before, num_falling = max(one.log_rate for one in self.rows), 0.0, 0
        for number in LENGTHS:
            chance = number * top
            lengths = {
                one.row: length
                for one in self.rows
                # Not much longer than a draft of this row with the same chance.
                if (length := min(number, one.max_tokens, round(2 * chance / one.log_rate)))
            }
            choice = self.evaluate(lengths)
            if not choice.seconds:
                break
            speed = choice.num_tokens / choice.seconds
            if speed > best_speed:
                best, best_speed = choice, speed
            num_falling = num_falling + 1 if speed <= before else 0
            if num_falling == 2:
                break
            before = speed
        return best

    def evaluate(self, lengths: dict[int, int], is_first: bool = False) -> Choice:
        """Return what drafts of these lengths yield, and in what time. is_first: see `StepTimes.drafts_s`"""
        plain, num_tokens, drafts = self._plain, 0, 0
        expected, num_guesses, all_whole, none_whole, least = float(plain.logits), 0, 1.0, 1.0, 1.0
        num_whole = lost = 0.0
        for row, rate, _, _, is_guessed in self.rows:
            length = lengths.get(row)
            if length:
                drafts += 1
                num_tokens += length
                chance = rate**length
                expected += rate * (1 - chance) / (1 - rate)
                if is_guessed:
                    num_guesses = max(num_guesses, length)
                    all_whole *= chance
                    none_whole *= 1 - chance
                    least = min(least, chance)
                    num_whole += chance
                    lost += chance * chance
        guesses_s = 0.0
        if num_guesses == 1:  # after a draft that is accepted whole, the model first reads its last token
            guesses_s = self._guess_s * (2 - none_whole)
        elif num_guesses:  # and guesses one less for this row, unless all rows must
            others = 1 - all_whole / least
            expected -= others * lost
            num_tokens -= int(others * num_whole)
            guesses_s = self._guess_s * (num_guesses + all_whole)
        shape = plain.with_drafts(num_tokens, drafts)
        return Choice(lengths, shape, self._times.drafts_s(shape, self.nothing.seconds, guesses_s, is_first), expected)


class Plan(NamedTuple):
    """Lengths for the next step. They hold if the same drafters propose tokens, in a step of the same size."""

    times: StepTimes
    shape: Shape
    lengths: dict[RowDrafter, int]


class DraftOptions(NamedTuple):
    """What the rows of a step can draft, and its times."""

    found: list[Proposal | None]
    """by row; None: it can draft nothing"""
    times: StepTimes
    shape: Shape
    """without drafts"""
    plain_s: float
    """seconds without drafts"""
    guess_s: float
    """of each guess"""

    def chooser(self) -> Chooser:
        """Return what finds the best drafts."""
        rows = list[Candidate]()
        for i, one in enumerate(self.found):
            if one is not None:
                rate = min(max(one.drafter.rate, 0.001), 0.999)
                rows.append(Candidate(i, rate, math.log(rate), one.max_tokens, one.tokens is None))
        return Chooser(self.times, self.shape, self.plain_s, self.guess_s, rows)

    def plan(self) -> Plan | None:
        """Return the best lengths for the next step. None: no draft pays, or a row has none, and may need a probe."""
        lengths = self.chooser().best(KEPT_GAIN).lengths
        planned = {one.drafter: lengths.get(i, 0) for i, one in enumerate(self.found) if one is not None}
        return Plan(self.times, self.shape, planned) if all(planned.values()) else None

    def planned_lengths(self, plan: Plan | None) -> dict[int, int] | None:
        """Return the planned lengths by row. None: the plan does not hold."""
        drafters = {one.drafter for one in self.found if one is not None}
        if plan is None or plan[:2] != (self.times, self.shape) or plan.lengths.keys() != drafters:
            return None
        return {i: plan.lengths[one.drafter] for i, one in enumerate(self.found) if one is not None}


FIRST_PROBES, MAX_PROBES = 1.0, 4.0
"""Steps that probes may cost when a service begins, and at most after a time without them."""
PROBE_SHARE, MAX_BACKOFF = 0.008, 16.0
"""Share of the time for probes, and what it is divided by at most: they become rare until drafts pay again."""
LEAST_PROBE = 0.02
"""Cost of a probe at least, in steps."""


class ProbeBudget:
    """The time for probes: drafts that show whether a text that was not predictable is so by now."""

    def __init__(self) -> None:
        self.steps = FIRST_PROBES
        """that probes may cost by now"""
        self._backoff = 1.0

    def add(self, are_paying: bool) -> None:
        """Count a step. are_paying: it has drafts because they pay"""
        if are_paying:
            self._backoff = 1.0
        self.steps = min(MAX_PROBES, self.steps + PROBE_SHARE / self._backoff)

    @property
    def is_enough(self) -> bool:
        """Whether a probe may be possible."""
        return self.steps >= LEAST_PROBE

    def cost(self, steps: float) -> float:
        """Return what a probe costs that loses so many steps; 0: too much."""
        cost = min(MAX_PROBES, max(LEAST_PROBE, steps))
        return cost if cost <= self.steps else 0.0

    def spend(self, cost: float) -> None:
        """Count a probe."""
        self.steps -= cost
        self._backoff = min(MAX_BACKOFF, (1 + cost) * self._backoff)
