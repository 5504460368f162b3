"""What is counted of the steps: tokens drawn and read, time that steps share, rates of the last seconds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rwkv_batch.core import throughput
from rwkv_batch.core.scheduler import ScheduledRow
from rwkv_batch.core.throughput import WINDOW_S, Throughput


class Clock:
    """In place of `time`."""

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
    return [ScheduledRow(sequence, count, draws=False) for count in num_tokens]


def test_rows_that_only_read_have_generated_nothing(clock: Clock) -> None:
    counted = Throughput()
    counted.count(rows(30, 5, 1), 1, started=99.0, launched=99.1)
    figures = counted.figures()
    assert (figures["generated_tokens"], figures["computed_tokens"]) == (1, 36)


def test_time_that_two_steps_share_counts_once(clock: Clock) -> None:
    counted = Throughput()
    counted.count(rows(1), 1, started=98.0, launched=98.1)  # ends at 100
    clock.now = 101.0
    counted.count(rows(1), 1, started=99.0, launched=99.1)  # began before the first had ended
    clock.now = 110.0
    counted.count(rows(1), 1, started=109.5, launched=109.6)  # after a pause
    assert counted.figures()["busy_s"] == 3.5


def test_rates_are_of_the_last_seconds_and_what_is_older_is_forgotten(clock: Clock) -> None:
    counted = Throughput()
    for _ in range(300):
        clock.now += 1.0
        counted.count(rows(3), 1, started=clock.now - 0.1, launched=clock.now)
    assert len(counted._window) <= WINDOW_S + 1
    clock.now += 1.0
    figures = counted.figures()
    assert 0.8 <= figures["generated_tokens_per_s"] <= 1.2
    assert 2.4 <= figures["computed_tokens_per_s"] <= 3.6
    clock.now += WINDOW_S
    assert counted.figures()["generated_tokens_per_s"] == 0.0
