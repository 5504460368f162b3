"""Gaps between a stream's deltas while something happens, beside those before and after it."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.serve import percentile

Gap = tuple[int, float, float]
"""Stream, when it ended (monotonic s), how long it was (s)."""
Span = tuple[float, float]
"""From and to a moment (monotonic s)."""


def figures(gaps: list[Gap], before: Span, rounds: Span, after: Span, second_s: float) -> dict[str, Any]:
    """Gaps of the three times, and by how much those in the rounds are longer than in the two others together.

    `second_s`: length of the pieces of which each has a longest gap.
    """
    times = {"before": [before], "in_rounds": [rounds], "after": [after], "alone": [before, after]}
    found = {name: _of_streams(gaps, spans, second_s) for name, spans in times.items()}
    told: dict[str, Any] = {"streams_seen": len(found["in_rounds"])}
    for name in ("before", "in_rounds", "after"):
        every = [gap for stream in found[name].values() for gap in stream.gaps]
        longest = [gap for stream in found[name].values() for gap in stream.longest]
        told[f"{name}_gap_ms"] = {
            **{n: percentile(every, p) for n, p in (("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999), ("max", 1.0))},
            "longest_of_a_second": {n: percentile(longest, p) for n, p in (("p50", 0.5), ("p90", 0.9))},
        }
    told["grew"] = _grew(found["alone"], found["in_rounds"])
    told["after_by_before"] = _grew(found["before"], found["after"])
    return told


@dataclass
class Stream:
    """One stream's gaps (s) of some time, and the longest of each piece of it."""

    gaps: list[float]
    longest: list[float]


def _of_streams(gaps: list[Gap], spans: list[Span], second_s: float) -> dict[int, Stream]:
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
