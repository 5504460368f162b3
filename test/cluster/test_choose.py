"""Who gets a request."""

from __future__ import annotations

import random
from collections import Counter
from statistics import mean

import pytest

from bench.fleet_simulation import Fleet, Traffic, simulate
from cluster.choose import SLACK_ROWS, Wish, choose, load_of


def chosen(
    loads: list[float], holder: int | None = None, prefers: int | None = None, rounds: int = 400
) -> Counter[int]:
    rng = random.Random(1)
    return Counter(choose(Wish(prefers), loads, holder, rng) for _ in range(rounds))


def test_the_only_one_gets_everything() -> None:
    assert chosen([500.0]) == {0: 400}


def test_the_busiest_gets_nothing() -> None:
    shares = chosen([10.0, 0.0, 5.0])
    assert shares[1] > shares[2] > 0 and 0 not in shares
    assert chosen([1.0, 0.0]) == {1: 400}


def test_a_holder_keeps_its_sessions_unless_it_is_clearly_busier() -> None:
    assert chosen([20.0, 20.0, 20.0], holder=2) == {2: 400}
    assert chosen([20.0, 20.0, 20.0 * 1.25 + SLACK_ROWS], holder=2) == {2: 400}
    assert chosen([20.0, 20.0, 300.0], holder=2)[2] < 400 / 2


def test_who_has_read_the_prompts_beginning_gets_it_among_equals() -> None:
    assert chosen([3.0, 3.0, 3.0], prefers=1) == {1: 400}
    assert chosen([3.0, 9.0, 3.0], prefers=1)[1] < 400 / 4


def test_unread_prompts_weigh_as_rows() -> None:
    assert load_of(3, 512) == 5.0


def test_the_simulated_fleet_does_as_well_as_planned() -> None:
    """Within a tenth of another program's figures for the same policy and traffic, means of six runs of 10 s."""
    runs = [simulate(Fleet(8, seed), Traffic(load=0.8), seed + 1) for seed in range(4)]
    assert mean(run.tokens_per_s for run in runs) == pytest.approx(84_960, rel=0.1)
    assert mean(run.ttft_p50_ms for run in runs) == pytest.approx(16.4, rel=0.1)
    assert mean(run.ttft_p99_ms for run in runs) == pytest.approx(103.6, rel=0.1)
    assert all(run.moved < 0.01 and not run.refused for run in runs)
