"""The memory growth test of `bench.chaos`."""

from __future__ import annotations

import random

import pytest

from bench.chaos.health import FLAT, FLAT_COUNT, FLAT_THREADS, slope

MIB = 1 << 20


def memory(an_hour: float, seconds: int = 2400, noise: float = 0.002, seed: int = 1) -> list[tuple[float, float]]:
    """Return one sample per second of a 300 MiB process. The samples have noise and occasional bursts."""
    rng = random.Random(seed)
    samples = []
    for i in range(seconds):
        burst = 0.2 if rng.random() < 0.02 else 0.0
        samples.append((float(i), 300 * MIB * (1 + an_hour * i / 3600 + rng.gauss(0, noise) + burst)))
    return samples


@pytest.mark.parametrize("an_hour", [0.0, 0.005, 0.02, 0.05])
def test_growth_is_found_despite_noise_and_bursts(an_hour: float) -> None:
    for seed in range(20):
        found = slope(memory(an_hour, seed=seed))
        assert found is not None
        assert found.low <= found.an_hour <= found.high
        assert found.grows == (an_hour > FLAT), found
        assert abs(found.an_hour - an_hour) < 0.005


def test_a_single_step_is_not_growth() -> None:
    """A table that doubles once does not grow for ever."""
    found = slope([(float(i), 300.0 * MIB if i < 200 else 300.3 * MIB) for i in range(2400)])
    assert found is not None and not found.grows


def test_a_short_run_needs_a_significant_slope() -> None:
    found = slope(memory(0.012, seconds=120))
    assert found is not None and not found.grows
    found = slope(memory(0.5, seconds=120, noise=0.0005))
    assert found is not None and found.grows


@pytest.mark.parametrize("left_an_hour", [0, 12])
def test_files_that_come_and_go_are_flat_unless_some_stay(left_an_hour: int) -> None:
    """Busy clients have up to seven files for a while. The medians of such numbers grew by a third in an hour."""
    rng = random.Random(1)
    samples = [(2.0 * i, 20.0 + int(i * left_an_hour / 1800) + rng.choice((0, 0, 1, 4, 7))) for i in range(1350)]
    found = slope(samples, FLAT_COUNT)
    assert found is not None and found.grows == (left_an_hour > 0)


@pytest.mark.parametrize(("left_an_hour", "grows"), [(0, False), (1, False), (4, True)])
def test_one_descriptor_more_is_no_leak(left_an_hour: int, grows: bool) -> None:
    """One of thirty descriptors is 3 % of them, which a bound on the share took for growth."""
    rng = random.Random(2)
    samples = [(2.0 * i, 30.0 + int(i * left_an_hour / 1800) + rng.choice((0,) * 40 + (1, 4))) for i in range(1350)]
    samples = [(at, count + (at > 1500)) for at, count in samples]
    found = slope(samples, FLAT_COUNT)
    assert found is not None and found.grows == grows, found


@pytest.mark.parametrize(("more", "grows"), [(FLAT_THREADS - 3, False), (2 * FLAT_THREADS, True)])
def test_a_pool_of_threads_that_fills_is_no_leak(more: float, grows: bool) -> None:
    samples = [(2.0 * i, 30.0 + int(i * more / 1350)) for i in range(1350)]
    found = slope(samples, FLAT_THREADS)
    assert found is not None and found.grows == grows, found


def test_too_few_samples_give_no_slope() -> None:
    assert slope(memory(0.5, seconds=30)) is None
