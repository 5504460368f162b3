"""The times of rounds and those between them: when, and the memory around each; what a round leaves of that."""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Callable
from typing import Any

from bench.service.coming_models import Look, Service
from bench.service.gaps import Span

SETTLE_S = 0.5
"""After something has happened, before memory is looked at and the next time begins."""
LOOKS = 3
"""At memory, of which the middle one is taken."""


def kept_kb(looks: list[Look], rounds: list[int]) -> dict[str, dict[str, float]]:
    """What a round leaves of memory beyond what tokens take (KB), and its standard error, of all and of each kind.

    `rounds`: how many there were between each look and the next. Least squares of growth = tokens * a + rounds * b.
    """
    told = {}
    drawn = [(after.drawn - before.drawn) / 1e3 for before, after in itertools.pairwise(looks)]
    tt, tr, rr = (sum(map(operator.mul, *two)) for two in ((drawn, drawn), (drawn, rounds), (rounds, rounds)))
    for kind in looks[0].memory:
        grown = [(y.memory.get(kind, 0.0) - x.memory[kind]) * 1e3 for x, y in itertools.pairwise(looks)]
        tg, rg = sum(map(operator.mul, drawn, grown)), sum(map(operator.mul, rounds, grown))
        of_token, of_round = (tg * rr - rg * tr) / (tt * rr - tr * tr), (rg * tt - tg * tr) / (tt * rr - tr * tr)
        off = [g - t * of_token - r * of_round for g, t, r in zip(grown, drawn, rounds, strict=True)]
        spread = sum(map(operator.mul, off, off)) / max(len(off) - 2, 1)
        told[kind] = {
            "kb": round(of_round, 2),
            "error": round((spread * tt / (tt * rr - tr * tr)) ** 0.5, 2),
            "bytes_of_a_token": round(of_token, 1),
        }
    return told


class Times:
    """The times alone and those of rounds: when, how often the engine's threads lost their core, memory around them."""

    def __init__(self, served: Service) -> None:
        self.served = served
        self.spans: dict[bool, list[Span]] = {False: [], True: []}
        """of rounds: True"""
        self.lost = {False: 0, True: 0}
        self.looks: list[Look] = []
        self.rounds: list[int] = []
        """between each look and the next"""
        self.begun: float | None = None
        """when the one that goes on has begun, which is one of rounds"""

    def look(self) -> None:
        """At memory."""
        looks = []
        for _ in range(LOOKS):
            time.sleep(SETTLE_S)
            looks.append(self.served.look())
        self.looks.append(sorted(looks, key=lambda look: look.memory["all"])[LOOKS // 2])
        time.sleep(SETTLE_S / 2)

    def take(self, act: Callable[[], None], num_rounds: int) -> None:
        """The time that `act` takes, and a look behind it."""
        lost, self.begun = self.served.lost_cores(), time.monotonic()
        act()
        self.spans[num_rounds > 0].append((self.begun, time.monotonic()))
        self.lost[num_rounds > 0] += self.served.lost_cores() - lost
        self.begun = None
        self.rounds.append(num_rounds)
        self.look()

    def memory(self) -> dict[str, Any]:
        """All looks by now, and what a round leaves by them."""
        told = {
            "memory_mb": [look.memory for look in self.looks],
            "drawn": [look.drawn - self.looks[0].drawn for look in self.looks],
        }
        both = {True, False} <= {rounds > 0 for rounds in self.rounds}
        return told | ({"kept_kb_of_a_round": kept_kb(self.looks, self.rounds)} if both else {})

    def seconds(self, of_rounds: bool) -> float:
        """Of all of these times."""
        return sum(end - begin for begin, end in self.spans[of_rounds])
