"""Simulates load balancing of `rwkv_batch.fleet.routing` over many engines.

This is a queueing model in simulated time.

    python -m bench.fleet --engines 8,64 --load 0.8,0.95
    python -m bench.fleet --engines 64 --popularity 0.9      # few sessions have most of the turns

No engine and no network runs. Measures tokens/s, time to first token (p50, p99) and the share of turns that move to
another engine. The length of a step depends on its rows and prompt tokens, by a table for RWKV-7 7.2B on one H200. The
table is a target, not a measurement. Requests arrive at random, at a share of the fleet's capacity; each is a turn of
a session. A turn on another engine waits for its state to arrive over the network link.

Bound: the Python interpreter. 64 engines take some seconds for 5 s of traffic. The last line is JSON with one entry
per run.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from dataclasses import asdict, dataclass, field

import numpy as np

from bench.tools.record import Arguments, finish
from rwkv_batch.fleet.routing import RoutingHints, choose, load_of

STEP_ROWS = (0, 1, 8, 32, 128, 320, 960)
STEP_MS = (0.0, 1000 / 370, 8000 / 2300, 32000 / 8000, 128000 / 25000, 320000 / 36000, 960000 / 42000)
PROMPT_TOKENS_PER_MS = 45.0
FREE_PROMPT_TOKENS = 128
"""Prompt tokens that are free in a step with decode rows, below `KNEE_ROWS` rows."""
KNEE_ROWS = 184
CHUNK = 1024
"""Prompt tokens per step."""
MAX_ROWS, MAX_REQUESTS = 960, 2000
STATE_MS = 17.3 * 8 / 25 + 4
"""Time to request and transfer a state of 17.3 MB over 25 Gbit/s."""
LINK_MS = STATE_MS - 4
SESSIONS_PER_ENGINE = 2000


@dataclass(slots=True)
class Request:
    """A turn in flight."""

    arrived: float
    ready: float
    prompt: int
    answer: int


@dataclass(slots=True)
class Engine:
    """One simulated engine; times in milliseconds."""

    prefilling: deque[Request] = field(default_factory=deque)
    decoding: list[int] = field(default_factory=list)
    """remaining tokens of each row"""
    requests: int = 0
    prompt_tokens_left: int = 0
    busy_until: float = 0.0
    link_free: float = 0.0

    @property
    def load(self) -> float:
        """The load as the router computes it."""
        return load_of(self.requests, self.prompt_tokens_left)

    def step(self, now: float, first_tokens: list[float]) -> tuple[int, float]:
        """Run one step; returns the number of sampled tokens and its length. Appends times to first token."""
        prefilled, read = self._prefill(now)
        rows = len(self.decoding)
        if not rows and not read:
            self.busy_until = now + 1.0
            return 0, 0.0
        free = FREE_PROMPT_TOKENS if 0 < rows < KNEE_ROWS else 0
        length = float(np.interp(rows, STEP_ROWS, STEP_MS)) + max(0, read - free) / PROMPT_TOKENS_PER_MS
        length = max(length, 0.5 if rows else 3.0)
        self.busy_until = now + length
        self.prompt_tokens_left -= read
        left = [tokens - 1 for tokens in self.decoding if tokens > 1]
        left += [request.answer - 1 for request in prefilled if request.answer > 1]
        self.requests -= rows + len(prefilled) - len(left)
        self.decoding = left
        first_tokens += [self.busy_until - request.arrived for request in prefilled]
        return rows + len(prefilled), length

    def _prefill(self, now: float) -> tuple[list[Request], int]:
        """Return the prompts that end in this step, and a token count.

        The count is that of all prompt tokens in the step.
        """
        prefilled: list[Request] = []
        budget = CHUNK
        for request in self.prefilling:
            if request.ready > now:
                continue
            if not budget or len(self.decoding) + len(prefilled) >= MAX_ROWS:
                break
            count = min(request.prompt, budget)
            request.prompt -= count
            budget -= count
            if not request.prompt:
                prefilled.append(request)
        for request in prefilled:
            self.prefilling.remove(request)
        return prefilled, CHUNK - budget


class Fleet:
    """The engines, and the engine that holds each session. One router knows all loads exactly."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self.engines = [Engine() for _ in range(size)]
        self.holders: dict[int, int] = {}
        self._rng = random.Random(seed)

    def assign(self, session: int, request: Request) -> tuple[bool, bool]:
        """Assign a request to an engine; returns whether it was accepted, and whether its session moved."""
        holder = self.holders.get(session)
        hints = RoutingHints(assigned_rows=[engine.requests for engine in self.engines])
        number = choose(hints, [engine.load for engine in self.engines], holder, self._rng)
        engine = self.engines[number]
        if engine.requests >= MAX_REQUESTS:
            return False, False
        has_moved = holder is not None and holder != number
        if has_moved:
            engine.link_free = max(request.arrived, engine.link_free) + LINK_MS
            request.ready = engine.link_free + STATE_MS - LINK_MS
        self.holders[session] = number
        engine.requests += 1
        engine.prompt_tokens_left += request.prompt
        engine.prefilling.append(request)
        return True, has_moved


@dataclass(frozen=True)
class Traffic:
    load: float = 0.8
    """share of the engines' capacity with 320 rows each"""
    seconds: float = 10.0
    prompt: int = 400
    answer: int = 200
    popularity: float = 0.4
    """exponent of Zipf's law over sessions"""


@dataclass(frozen=True)
class Figures:
    """Results after the warm-up."""

    engines: int
    load: float
    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    step_p99_ms: float
    moved: float
    """share of all turns"""
    refused: int


def simulate(fleet: Fleet, traffic: Traffic, seed: int = 1) -> Figures:
    """Run the traffic through the fleet."""
    rng = np.random.default_rng(seed)
    size = len(fleet.engines)
    request_ms = traffic.answer * STEP_MS[5] / STEP_ROWS[5] + traffic.prompt / PROMPT_TOKENS_PER_MS
    weights = 1.0 / np.arange(1, SESSIONS_PER_ENGINE * size + 1) ** traffic.popularity
    sessions = np.cumsum(weights / weights.sum())
    end = traffic.seconds * 1000
    warm = min(3000.0, end / 2)
    first_tokens: list[float] = []
    steps: list[float] = []
    sampled = moves = turns = refused = 0
    for now in np.arange(0.0, end):
        for _ in range(rng.poisson(traffic.load * size / request_ms)):
            prompt = max(8, int(rng.lognormal(np.log(traffic.prompt) - 0.5, 1.0)))
            answer = max(4, int(rng.lognormal(np.log(traffic.answer) - 0.32, 0.8)))
            session = int(np.searchsorted(sessions, rng.random()))
            is_taken, has_moved = fleet.assign(session, Request(now, now, prompt, answer))
            turns, moves, refused = turns + is_taken, moves + has_moved, refused + (not is_taken)
        for engine in fleet.engines:
            if engine.busy_until <= now and engine.requests:
                waits: list[float] = []
                count, length = engine.step(now, waits)
                if now > warm and length:
                    sampled += count
                    first_tokens += [wait for wait in waits if engine.busy_until - wait > warm]
                    steps.append(length)
    span = (end - warm) / 1000
    return Figures(
        engines=size,
        load=traffic.load,
        tokens_per_s=round(sampled / span),
        ttft_p50_ms=round(float(np.percentile(first_tokens, 50)), 1),
        ttft_p99_ms=round(float(np.percentile(first_tokens, 99)), 1),
        step_p99_ms=round(float(np.percentile(steps, 99)), 1),
        moved=round(moves / max(turns, 1), 4),
        refused=refused,
    )


def main(arguments: list[str]) -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--engines", default="8")
    parser.add_argument("--load", default="0.8")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--popularity", type=float, default=0.4)
    given = parser.parse_args(arguments)
    results = []
    for size in map(int, given.engines.split(",")):
        for load in map(float, given.load.split(",")):
            traffic = Traffic(load=load, seconds=given.seconds, popularity=given.popularity)
            results.append(asdict(simulate(Fleet(size), traffic)))
            sys.stderr.write(f"{results[-1]}\n")
    finish(results, given.out)


if __name__ == "__main__":
    main(sys.argv[1:])
