"""Gaps between a stream's deltas while something happens, beside those of as much time in which nothing does."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.tools.service import percentile

Gap = tuple[int, float, float]
"""Stream, when it ended (monotonic s), how long it was (s)."""
Span = tuple[float, float]
"""From and to a moment (monotonic s)."""
SAME_S = 0.04
"""Gaps of several streams that end within so long are told as one."""


def figures(gaps: list[Gap], alone: Sequence[Span], rounds: Sequence[Span], second_s: float) -> dict[str, Any]:
    """Gaps in the rounds and alone, and by how much a stream's in the rounds are longer than alone.

    The longest of all grows with the time that is looked at: there should be as much of both.
    `second_s`: length of the pieces of which each has a longest gap.
    """
    half = (len(alone) + 1) // 2
    times = {"alone": alone, "in_rounds": rounds, "first": alone[:half], "second": alone[half:]}
    found = {name: _of_streams(gaps, spans, second_s) for name, spans in times.items()}
    told: dict[str, Any] = {"streams_seen": len(found["in_rounds"])}
    for name in ("alone", "in_rounds"):
        every = [gap for stream in found[name].values() for gap in stream.gaps]
        longest = [gap for stream in found[name].values() for gap in stream.longest]
        told[f"{name}_gap_ms"] = {
            **{n: percentile(every, p) for n, p in (("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999), ("max", 1.0))},
            "longest_of_a_second": {n: percentile(longest, p) for n, p in (("p50", 0.5), ("p90", 0.9))},
            "longest_of_each_time": [_longest_ms(gaps, span) for span in times[name]],
            "seconds": round(sum(end - begin for begin, end in times[name]), 1),
        }
    told["grew"] = _grew(found["alone"], found["in_rounds"])
    told["alone_by_alone"] = _grew(found["first"], found["second"])
    return told


def longest(gaps: list[Gap], spans: Sequence[Span], count: int) -> list[Span]:
    """When the longest gaps of that time were, each with all streams that had it, the longest first."""
    found: list[Span] = []
    for _, at, gap in sorted((g for g in gaps if any(b <= g[1] < e for b, e in spans)), key=lambda one: -one[2]):
        if len(found) == count:
            break
        if all(abs(at - end) > SAME_S for _, end in found):
            found.append((at - gap, at))
    return found


def _longest_ms(gaps: list[Gap], span: Span) -> float | None:
    return percentile([gap for _, at, gap in gaps if span[0] <= at < span[1]], 1.0)


@dataclass
class Stream:
    """One stream's gaps (s) of some time, and the longest of each piece of it."""

    gaps: list[float]
    longest: list[float]


def _of_streams(gaps: list[Gap], spans: Sequence[Span], second_s: float) -> dict[int, Stream]:
    pieces: dict[int, dict[tuple[int, int], float]] = defaultdict(dict)
    streams: dict[int, list[float]] = defaultdict(list)
    for stream, at, gap in gaps:
        for number, (begin, end) in enumerate(spans):
            if begin <= at < end:
                streams[stream].append(gap)
                piece = number, int((at - begin) / second_s)
                pieces[stream][piece] = max(gap, pieces[stream].get(piece, 0.0))
    return {stream: Stream(found, list(pieces[stream].values())) for stream, found in streams.items()}


def _grew(first: dict[int, Stream], then: dict[int, Stream]) -> dict[str, Any]:
    """For each measure of a stream's gaps: its ratio, at the median of the streams and at most; of none: nothing."""
    measures: dict[str, Callable[[Stream], float]] = {
        "longest": lambda stream: max(stream.gaps),
        "longest_of_a_second": lambda stream: statistics.median(stream.longest),
        "p99": lambda stream: _p99(stream.gaps),
        "median": lambda stream: statistics.median(stream.gaps),
    }
    told = {}
    for name, measure in measures.items():
        ratios = [measure(then[s]) / measure(first[s]) for s in first.keys() & then.keys()]
        if not ratios:
            return {}
        told[name] = {
            "median": round(statistics.median(ratios), 2),
            "most": round(max(ratios), 2),
            "streams_above_1.5": sum(ratio > 1.5 for ratio in ratios),
        }
    return told


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]
