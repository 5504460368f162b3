"""Which engine gets a request: bounded-load affinity. Pure; `bench/fleet.py` says what comes of it.

Load is counted in rows; 256 prompt tokens that wait to be read count as one. Who holds the request's session gets it
unless it is clearly busier than two engines picked at random, else the less busy of these two gets it. To look at two
rather than at all keeps many who choose at once, on reports that are some milliseconds old, from choosing the same.
While an engine has not answered what it was given its report is older than that: the others who ask are then taken to
have as much on its way as whoever asks now has. Of two that are nearly as busy, as far as that can be known, whoever
asks takes the one that it has given less itself, which it knows exactly. So a thousand requests that come at once to
many who ask are halved, where by reports alone all would go to the engine that is slow to tell of them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

PROMPT_TOKENS_PER_ROW = 256
BUSY_FACTOR = 1.25
SLACK_ROWS = 8
"""A holder may be busier than the two by this factor and so many rows: a move costs more than a short wait."""
NEAR_TIE_FRACTION = 1 / 16
"""Loads that differ by this part of the smaller one, and by `SLACK_ROWS` at most, are nearly equal."""
TIE_ROWS = 1.0
"""Loads that differ by less are equal: then whoever has read the prompt's beginning before gets the request."""


class RoutingHints(NamedTuple):
    """What of a request matters to the choice."""

    preferred: int | None = None
    """Number of an engine that has read the beginning of its prompt lately."""
    assigned_rows: Sequence[int] = ()
    """Rows of jobs under way that whoever asks has given each engine; empty where it does not count them."""
    unanswered: Sequence[int] = ()
    """Requests that it has given each engine and that have not arrived there, as far as it knows; or empty."""
    num_routers: int = 1
    """Processes that ask for engines, itself among them."""


def load_of(rows: float, prompt_tokens: float) -> float:
    """Rows and unread prompt tokens as one figure."""
    return rows + prompt_tokens / PROMPT_TOKENS_PER_ROW


def choose(request: RoutingHints, loads: Sequence[float], holder: int | None, rng: random.Random) -> int:
    """The number of the engine that gets the request.

    `loads`: of the engines that take work, at least one, as `load_of`. `holder`: which of them has the session.
    """
    if len(loads) == 1:
        return 0
    one = int(rng.random() * len(loads))
    probes = one, (one + 1 + int(rng.random() * (len(loads) - 1))) % len(loads)
    estimated, uncertainty = _estimate_loads(request, loads)
    less_busy = min(probes, key=estimated.__getitem__)
    if request.assigned_rows and _is_near([estimated[number] for number in probes], uncertainty):
        less_busy = min(probes, key=lambda number: (request.assigned_rows[number], estimated[number]))
    if holder is not None:
        mean = (loads[probes[0]] + loads[probes[1]]) / 2
        return holder if loads[holder] <= BUSY_FACTOR * mean + SLACK_ROWS else less_busy
    preferred = request.preferred
    return preferred if preferred is not None and loads[preferred] < loads[less_busy] + TIE_ROWS else less_busy


def _estimate_loads(request: RoutingHints, loads: Sequence[float]) -> tuple[Sequence[float], float]:
    """Loads with what others have on its way, if that is as much as the asker has; by how much that may be wrong."""
    if not any(request.unanswered):
        return loads, 0.0
    others = request.num_routers - 1
    estimated = [load + others * count for load, count in zip(loads, request.unanswered, strict=True)]
    return estimated, request.num_routers * max(request.unanswered)


def _is_near(loads: Sequence[float], uncertainty: float) -> bool:
    less, more = sorted(loads)
    return more <= less + min(NEAR_TIE_FRACTION * less, SLACK_ROWS) + uncertainty
