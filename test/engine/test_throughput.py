"""Counts of steps: sampled and read tokens, shared time, rates of the last seconds."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from rwkv_batch.core import throughput
from rwkv_batch.core.scheduler import ScheduledRow
from rwkv_batch.core.throughput import WINDOW_S, Throughput


class Clock:
    """Replaces `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(throughput, "time", clock)
    return clock


def rows(*num_tokens: int) -> list[ScheduledRow]:
    sequence: Any = SimpleNamespace()
    return [ScheduledRow(sequence, count, samples_token=False) for count in num_tokens]


def test_rows_that_only_read_have_generated_nothing(clock: Clock) -> None:
    counted = Throughput()
    counted.count(rows(30, 5, 1), 1, started=99.0)
    stats = counted.stats()
    assert (stats["generated_tokens"], stats["computed_tokens"]) == (1, 36)


def test_time_that_two_steps_share_counts_once(clock: Clock) -> None:
    counted = Throughput()
    counted.count(rows(1), 1, started=98.0)  # ends at 100
    clock.now = 101.0
    counted.count(rows(1), 1, started=99.0)  # began before the first had ended
    clock.now = 110.0
    counted.count(rows(1), 1, started=109.5)  # after a pause
    assert counted.stats()["busy_s"] == 3.5


def test_counters_have_their_former_names_too(clock: Clock) -> None:
    counted = Throughput()
    assert counted.prefill_time_s(100) == 0.0, "no prompt was read yet"
    counted.count(rows(30, 5), 2, started=98.0)
    counted.count_added(3)
    clock.now = 100.2
    counted.count(rows(4), 1, started=100.1)
    assert counted.stats() == {
        "steps": 2,
        "busy_s": 2.1,
        "generated_tokens": 6,
        "computed_tokens": 39,
        "generated_tokens_per_s": 24.0,
        "computed_tokens_per_s": 156.0,
        "drawn_tokens": 6,
        "read_tokens": 39,
        "drawn_tokens_per_s": 24.0,
        "read_tokens_per_s": 156.0,
    }
    assert len(counted._window) == 1, "steps within a quarter of a second share an entry"
    clock.now = 101.0
    assert counted.stats()["generated_tokens_per_s"] == 6.0


def test_the_prefill_speed_follows_steps_with_prompts(clock: Clock) -> None:
    counted = Throughput()
    counted.count(rows(200), 1, started=98.0)
    assert counted.prefill_time_s(50) == pytest.approx(0.5)  # 100 tokens a second
    clock.now = 101.0
    counted.count(rows(15), 1, started=100.5)  # too few tokens to tell
    assert counted.prefill_time_s(50) == pytest.approx(0.5)
    clock.now = 102.0
    counted.count(rows(16), 1, started=101.0)
    assert counted.prefill_time_s(50) == pytest.approx(50 / (0.9 * 100 + 0.1 * 16))
    decoding = [dataclasses.replace(row, uses_device_token=True) for row in rows(1, 1, 1)]
    clock.now = 103.0
    counted.count([*rows(1000), *decoding], 3, started=102.0)
    assert counted.prefill_time_s(50) == pytest.approx(50 / (0.9 * (0.9 * 100 + 0.1 * 16) + 0.1 * 1000))


def test_rates_cover_only_the_last_seconds(clock: Clock) -> None:
    counted = Throughput()
    for _ in range(300):
        clock.now += 1.0
        counted.count(rows(3), 1, started=clock.now - 0.1)
    assert len(counted._window) <= WINDOW_S + 1
    clock.now += 1.0
    stats = counted.stats()
    assert 0.8 <= stats["generated_tokens_per_s"] <= 1.2
    assert 2.4 <= stats["computed_tokens_per_s"] <= 3.6
    clock.now += WINDOW_S - 1.0
    assert counted.stats()["generated_tokens_per_s"] == 0.0
