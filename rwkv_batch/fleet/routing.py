"""Chooses the engine of a request: bounded-load affinity. Functions are pure.

Load is counted in rows; 256 queued prompt tokens count as one row.

- Two engines are picked at random, and the less busy one is the candidate. Processes that compared all engines would
  all choose the same one, because load reports are some milliseconds old.
- The engine that holds the request's session gets it, unless it is clearly busier than the two.
- A report does not include requests still on their way. Each other routing process is assumed to have the same number
  on their way as this one.
- On a near-tie, the engine that this process has sent less work is chosen. That count is exact, so a burst of requests
  is split evenly.
"""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from rwkv_batch.request import Job

PROMPT_TOKENS_PER_ROW = 256
BUSY_FACTOR = 1.25
SLACK_ROWS = 8
"""A holder may be busier than the two by BUSY_FACTOR and this many rows: a move costs more than a short wait."""
NEAR_TIE_FRACTION = 1 / 16
"""Loads that differ by at most this part of the smaller one, and by at most `SLACK_ROWS`, are a near-tie."""
TIE_ROWS = 1.0
"""Loads that differ by less are equal. Then the engine that has read the prompt's prefix is chosen."""


class RoutingHints(NamedTuple):
    preferred: int | None = None
    """index of the engine that read the prompt's prefix lately"""
    assigned_rows: Sequence[int] = ()
    """per engine, rows of jobs in flight that this process sent; empty: not counted"""
    unanswered: Sequence[int] = ()
    """per engine, requests sent by this process that have not arrived there; or empty"""
    num_routers: int = 1
    """including this one"""


def load_of(rows: float, prompt_tokens: float) -> float:
    return rows + prompt_tokens / PROMPT_TOKENS_PER_ROW


def choose(request: RoutingHints, loads: Sequence[float], holder: int | None, rng: random.Random) -> int:
    """Return the index of the engine that gets the request.

    loads: `load_of` each available engine, at least one
    holder: index of the engine that has the session
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
    """Add the requests that other processes probably have on their way. Returns the loads and their uncertainty."""
    if not any(request.unanswered):
        return loads, 0.0
    others = request.num_routers - 1
    estimated = [load + others * count for load, count in zip(loads, request.unanswered, strict=True)]
    return estimated, request.num_routers * max(request.unanswered)


def _is_near(loads: Sequence[float], uncertainty: float) -> bool:
    less, more = sorted(loads)
    return more <= less + min(NEAR_TIE_FRACTION * less, SLACK_ROWS) + uncertainty


class FleetLimits(NamedTuple):
    resubmit: int = 2
    """lost engines after which a job still continues; 0: it ends with its engine"""
    wait_s: float = 10.0
    """seconds that a job waits for an engine, each time"""
    shares_sessions: bool = False
    """whether any engine can continue any session; else a session always stays with its engine"""
    num_routers: int = 1
    """including this one"""


PREFIX_TOKENS = 64
"""Length of the prompt prefix that identifies an engine with a cached state."""
MAX_REMEMBERED = 16_384


class EngineLru(OrderedDict[str, str]):
    def put(self, key: str, engine: str) -> None:
        """Store an entry. Drops the oldest entry if there are too many."""
        self[key] = engine
        self.move_to_end(key)
        if len(self) > MAX_REMEMBERED:
            self.popitem(last=False)


def rendezvous_weight(session: str, engine: str) -> bytes:
    """Return a hash. The engine with the largest one serves an unknown session: the same in every process."""
    return hashlib.blake2b(f"{session}\0{engine}".encode(), digest_size=8).digest()


def prefix_key(job: Job) -> str:
    """Return a hash of the job's first prompt prefix. "" for a short prompt."""
    row = job.rows[0]
    if len(row.prompt) < PREFIX_TOKENS:
        return ""
    beginning = f"{job.prefix_salt}\0{row.state}\0{row.prompt[:PREFIX_TOKENS]}"
    return hashlib.blake2b(beginning.encode(), digest_size=12).hexdigest()
