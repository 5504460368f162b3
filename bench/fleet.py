"""How `rwkv_batch.fleet.routing` balances many engines: a queueing model in simulated time, no engine, no network.

Measured: tokens a second, the wait for the first token (median and 99th percentile), how many turns move to another
engine. An engine works in steps whose length depends on its rows and on the prompt tokens that they read (RWKV-7 7.2B
on one H200; the table of step times is a target, not a measurement). Requests come at random at a share of what the
fleet can do, each a turn of a session; a turn that lands elsewhere waits for its state over that machine's link.
Bounded by the interpreter: a loop over engines and milliseconds; 64 engines take some seconds for 5 s of traffic.

    python -m bench.fleet --engines 8,64 --load 0.8,0.95
    python -m bench.fleet --engines 64 --popularity 0.9      # few sessions have most of the turns

The last line is JSON, an entry for each run.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import deque
from dataclasses import asdict, dataclass, field

import numpy as np

from rwkv_batch.fleet.routing import RoutingHints, choose, load_of

STEP_ROWS = (0, 1, 8, 32, 128, 320, 960)
STEP_MS = (0.0, 1000 / 370, 8000 / 2300, 32000 / 8000, 128000 / 25000, 320000 / 36000, 960000 / 42000)
PROMPT_TOKENS_A_MS = 45.0
FREE_PROMPT_TOKENS = 128
"""Prompt tokens that cost nothing beside rows that decode, up to `KNEE_ROWS` of them."""
KNEE_ROWS = 184
CHUNK = 1024
"""Prompt tokens in one step."""
MOST_ROWS, MOST_REQUESTS = 960, 2000
STATE_MS = 17.3 * 8 / 25 + 4
"""A state of 17.3 MB over 25 Gbit/s, and what it takes to ask for it."""
LINK_MS = STATE_MS - 4
SESSIONS_AN_ENGINE = 2000


@dataclass(slots=True)
class Request:
    """A turn on its way."""

    came: float
    ready: float
    prompt: int
    answer: int


@dataclass(slots=True)
class Engine:
    """One simulated engine; times in milliseconds."""

    reading: deque[Request] = field(default_factory=deque)
    decoding: list[int] = field(default_factory=list)
    """tokens left of each row"""
    requests: int = 0
    unread: int = 0
    busy_until: float = 0.0
    link_free: float = 0.0

    @property
    def load(self) -> float:
        """As the router counts."""
        return load_of(self.requests, self.unread)

    def step(self, now: float, first_tokens: list[float]) -> tuple[int, float]:
        """Run one step; returns the tokens drawn and the step's length. Notes the waits for first tokens."""
        begun, read = self._read(now)
        rows = len(self.decoding)
        if not rows and not read:
            self.busy_until = now + 1.0
            return 0, 0.0
        free = FREE_PROMPT_TOKENS if 0 < rows < KNEE_ROWS else 0
        length = float(np.interp(rows, STEP_ROWS, STEP_MS)) + max(0, read - free) / PROMPT_TOKENS_A_MS
        length = max(length, 0.5 if rows else 3.0)
        self.busy_until = now + length
        self.unread -= read
        left = [tokens - 1 for tokens in self.decoding if tokens > 1]
        left += [request.answer - 1 for request in begun if request.answer > 1]
        self.requests -= rows + len(begun) - len(left)
        self.decoding = left
        first_tokens += [self.busy_until - request.came for request in begun]
        return rows + len(begun), length

    def _read(self, now: float) -> tuple[list[Request], int]:
        """Prompts that are read to their end in this step, and the tokens read of all."""
        begun: list[Request] = []
        budget = CHUNK
        for request in self.reading:
            if request.ready > now:
                continue
            if not budget or len(self.decoding) + len(begun) >= MOST_ROWS:
                break
            count = min(request.prompt, budget)
            request.prompt -= count
            budget -= count
            if not request.prompt:
                begun.append(request)
        for request in begun:
            self.reading.remove(request)
        return begun, CHUNK - budget


class Fleet:
    """Engines, and which of them has each session. One process asks for all, and knows all loads exactly."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self.engines = [Engine() for _ in range(size)]
        self.holders: dict[int, int] = {}
        self._rng = random.Random(seed)

    def place(self, session: int, request: Request) -> tuple[bool, bool]:
        """Give a request to an engine; returns whether one took it, and whether its session moved."""
        holder = self.holders.get(session)
        hints = RoutingHints(assigned_rows=[engine.requests for engine in self.engines])
        number = choose(hints, [engine.load for engine in self.engines], holder, self._rng)
        engine = self.engines[number]
        if engine.requests >= MOST_REQUESTS:
            return False, False
        has_moved = holder is not None and holder != number
        if has_moved:
            engine.link_free = max(request.came, engine.link_free) + LINK_MS
            request.ready = engine.link_free + STATE_MS - LINK_MS
        self.holders[session] = number
        engine.requests += 1
        engine.unread += request.prompt
        engine.reading.append(request)
        return True, has_moved


@dataclass(frozen=True)
class Traffic:
    """What comes."""

    load: float = 0.8
    """share of what the engines can do with 320 rows each"""
    seconds: float = 10.0
    prompt: int = 400
    answer: int = 200
    popularity: float = 0.4
    """exponent of Zipf's law over sessions"""


@dataclass(frozen=True)
class Figures:
    """What came of it, after the first part of the run."""

    engines: int
    load: float
    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    step_p99_ms: float
    moved: float
    """of all turns"""
    refused: int


def simulate(fleet: Fleet, traffic: Traffic, seed: int = 1) -> Figures:
    """Run the traffic through the fleet."""
    rng = np.random.default_rng(seed)
    size = len(fleet.engines)
    request_ms = traffic.answer * STEP_MS[5] / STEP_ROWS[5] + traffic.prompt / PROMPT_TOKENS_A_MS
    weights = 1.0 / np.arange(1, SESSIONS_AN_ENGINE * size + 1) ** traffic.popularity
    sessions = np.cumsum(weights / weights.sum())
    end = traffic.seconds * 1000
    warm = min(3000.0, end / 2)
    first_tokens: list[float] = []
    steps: list[float] = []
    drawn = moves = turns = refused = 0
    for now in np.arange(0.0, end):
        for _ in range(rng.poisson(traffic.load * size / request_ms)):
            prompt = max(8, int(rng.lognormal(np.log(traffic.prompt) - 0.5, 1.0)))
            answer = max(4, int(rng.lognormal(np.log(traffic.answer) - 0.32, 0.8)))
            session = int(np.searchsorted(sessions, rng.random()))
            is_taken, has_moved = fleet.place(session, Request(now, now, prompt, answer))
            turns, moves, refused = turns + is_taken, moves + has_moved, refused + (not is_taken)
        for engine in fleet.engines:
            if engine.busy_until <= now and engine.requests:
                waits: list[float] = []
                count, length = engine.step(now, waits)
                if now > warm and length:
                    drawn += count
                    first_tokens += [wait for wait in waits if engine.busy_until - wait > warm]
                    steps.append(length)
    span = (end - warm) / 1000
    return Figures(
        engines=size,
        load=traffic.load,
        tokens_per_s=round(drawn / span),
        ttft_p50_ms=round(float(np.percentile(first_tokens, 50)), 1),
        ttft_p99_ms=round(float(np.percentile(first_tokens, 99)), 1),
        step_p99_ms=round(float(np.percentile(steps, 99)), 1),
        moved=round(moves / max(turns, 1), 4),
        refused=refused,
    )


def main(arguments: list[str]) -> None:
    """Run what is asked for and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1:])
