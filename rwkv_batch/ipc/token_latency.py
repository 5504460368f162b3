"""Two histograms: time to first token and time between tokens. Cheap enough for every delta."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from rwkv_batch.request import JobEvents

FIRST_TOKEN_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
INTER_TOKEN_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.1, 0.2, 0.5, 1.0, 5.0)
"""Seconds; inclusive upper bounds of the buckets."""


class Buckets:
    """Counts of values by upper bound. One thread writes; a reader may see a value half added."""

    def __init__(self, name: str, meaning: str, bounds: Sequence[float]) -> None:
        self._name, self._meaning, self._bounds = name, meaning, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def count(self, value: float, times: int = 1) -> None:
        """Add `value` (seconds) `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self) -> HistogramMetricFamily:
        """Return Prometheus' cumulative buckets."""
        so_far, buckets = 0, []
        for bound, count in zip((*self._bounds, float("inf")), self._counts.copy(), strict=True):
            so_far += count
            buckets.append((floatToGoString(bound), so_far))
        return HistogramMetricFamily(self._name, self._meaning, buckets=buckets, sum_value=self._sum)


class TokenLatency(Collector):
    """Measures jobs from their arrival. `arrived` and `forget` on any thread, `observe` on the engine's."""

    def __init__(self) -> None:
        self._first_token = Buckets(
            "rwkv_first_token_seconds",
            "Seconds from a job's arrival to the first tokens of a row that are sent (chunk_size gathers them).",
            FIRST_TOKEN_BOUNDS,
        )
        self._inter_token = Buckets(
            "rwkv_inter_token_seconds",
            "Seconds from token to token of a row: the time between two deltas by the tokens of the second.",
            INTER_TOKEN_BOUNDS,
        )
        self._last: dict[str, tuple[float, dict[int, float]]] = {}
        """per job its arrival, and per row the time of its last delta"""

    def arrived(self, job_id: str, now: float) -> None:
        """Record a submitted job. `now` is time.monotonic()."""
        self._last[job_id] = (now, {})

    def forget(self, job_id: str) -> None:
        """Drop a job that was refused or whose client has gone."""
        self._last.pop(job_id, None)

    def observe(self, events: Sequence[JobEvents], now: float) -> None:
        """Record the events of one step. `now` is time.monotonic()."""
        delta_counts: dict[tuple[float, int], int] = {}
        """deltas by time of the row's previous delta and number of tokens: few keys, because rows share their steps"""
        for event in events:
            known = self._last.get(event.job_id)
            if known is None:
                continue
            arrival, rows = known
            for delta in event.deltas:
                tokens = delta.num_tokens
                if not tokens:
                    continue
                before = rows.get(delta.row)
                if before is not None:
                    delta_counts[before, tokens] = delta_counts.get((before, tokens), 0) + 1
                elif delta.finish is None or tokens == 1:  # a whole row in one delta shows no first token
                    self._first_token.count(now - arrival)
                rows[delta.row] = now
            if event.done:
                self.forget(event.job_id)
        for (before, tokens), deltas in delta_counts.items():
            self._inter_token.count((now - before) / tokens, tokens * deltas)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """See Collector."""
        yield self._first_token.family()
        yield self._inter_token.family()
