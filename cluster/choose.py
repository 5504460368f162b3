"""Which engine gets a request: bounded-load affinity. Pure; `bench/fleet_simulation.py` says what comes of it.

Load is counted in rows; 256 prompt tokens that wait to be read count as one. Who holds the request's session gets it
unless it is clearly busier than two engines picked at random, else the less busy of these two gets it. To look at two
rather than at all keeps many who choose at once, on reports that are some milliseconds old, from choosing the same.
Where whoever asks cannot know which of the two that is, it takes the one that it has given less itself, which it knows
exactly: if they are nearly as busy, and while an engine has not answered what it was given, since its load is older
than that. So a thousand requests that come at once to many who ask are halved, where by loads alone all would go to
the engine that is slow to tell of them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

PROMPT_TOKENS_A_ROW = 256
CLEARLY = 1.25
SLACK_ROWS = 8
"""A holder may be busier than the two by this factor and so many rows: a move costs more than a short wait."""
NEARLY = 1 / 16
"""Loads that differ by this part of the smaller one, and by `SLACK_ROWS` at most, are nearly equal."""
TIE_ROWS = 1.0
"""Loads that differ by less are equal: then whoever has read the prompt's beginning before gets the request."""


class Wish(NamedTuple):
    """What of a request matters to the choice."""

    prefers: int | None = None
    """Number of an engine that has read the beginning of its prompt lately."""
    given: Sequence[int] = ()
    """Rows under way that whoever asks has given each engine; empty where it does not count them."""
    unanswered: Sequence[int] = ()
    """Requests that it has given each engine and that have not arrived there, as far as it knows; or empty."""


def load_of(rows: float, prompt_tokens: float) -> float:
    """Rows and unread prompt tokens as one figure."""
    return rows + prompt_tokens / PROMPT_TOKENS_A_ROW


def choose(request: Wish, loads: Sequence[float], holder: int | None, rng: random.Random) -> int:
    """The number of the engine that gets the request.

    `loads`: of the engines that take work, at least one, as `load_of`. `holder`: which of them has the session.
    """
    if len(loads) == 1:
        return 0
    one = int(rng.random() * len(loads))
    probes = one, (one + 1 + int(rng.random() * (len(loads) - 1))) % len(loads)
    lighter = min(probes, key=loads.__getitem__)
    if request.given and (_is_old(request, probes) or _is_near(loads, probes)):
        lighter = min(probes, key=lambda number: (request.given[number], loads[number]))
    if holder is not None:
        mean = (loads[probes[0]] + loads[probes[1]]) / 2
        return holder if loads[holder] <= CLEARLY * mean + SLACK_ROWS else lighter
    prefers = request.prefers
    return prefers if prefers is not None and loads[prefers] < loads[lighter] + TIE_ROWS else lighter


def _is_old(request: Wish, probes: Sequence[int]) -> bool:
    """Whether more has been given to one of them than its load tells of."""
    return bool(request.unanswered) and any(request.unanswered[number] for number in probes)


def _is_near(loads: Sequence[float], probes: Sequence[int]) -> bool:
    less, more = sorted(loads[number] for number in probes)
    return more <= less + min(NEARLY * less, SLACK_ROWS)
