"""Routing of requests to engines."""

from __future__ import annotations

import random
from collections import Counter
from statistics import mean

import pytest

from rwkv_batch.fleet.routing import SLACK_ROWS, RoutingHints, choose, load_of


def chosen(loads: list[float], holder: int | None = None, preferred: int | None = None) -> Counter[int]:
    rng = random.Random(1)
    return Counter(choose(RoutingHints(preferred), loads, holder, rng) for _ in range(400))


def test_the_only_engine_gets_all_requests() -> None:
    assert chosen([500.0]) == {0: 400}


def test_the_busiest_engine_gets_no_request() -> None:
    shares = chosen([10.0, 0.0, 5.0])
    assert shares[1] > shares[2] > 0 and 0 not in shares
    assert chosen([1.0, 0.0]) == {1: 400}


def test_a_holder_keeps_its_sessions_unless_it_is_clearly_busier() -> None:
    assert chosen([20.0, 20.0, 20.0], holder=2) == {2: 400}
    assert chosen([20.0, 20.0, 20.0 * 1.25 + SLACK_ROWS], holder=2) == {2: 400}
    assert chosen([20.0, 20.0, 300.0], holder=2)[2] < 400 / 2


def test_among_equals_the_engine_with_the_prefix_is_chosen() -> None:
    assert chosen([3.0, 3.0, 3.0], preferred=1) == {1: 400}
    assert chosen([3.0, 9.0, 3.0], preferred=1)[1] < 400 / 4


def test_on_a_near_tie_the_engine_with_less_assigned_work_is_chosen() -> None:
    def chosen_with(assigned_rows: list[int], loads: list[float]) -> set[int]:
        return {
            choose(RoutingHints(assigned_rows=assigned_rows), loads, None, random.Random(seed)) for seed in range(40)
        }

    assert chosen_with([3, 4], [100.0, 96.0]) == {0}
    assert chosen_with([3, 3], [100.0, 96.0]) == {1}
    assert chosen_with([3, 4], [100.0, 90.0]) == {1}, "a tenth is no near-tie"
    assert chosen_with([3, 4], [1009.0, 1000.0]) == {1}, "nor are nine rows"


@pytest.mark.parametrize("slow", [24, 200])
def test_a_burst_to_many_routers_is_split_evenly(slow: int) -> None:
    """Eight routers. Reports of engine 0 are up to 24 requests old, those of engine 1 up to `slow`."""
    excesses = []
    for seed in range(20):
        rng = random.Random(seed)
        order: list[tuple[int, int]] = []
        for _ in range(640):
            asker = rng.randrange(8)
            loads, assigned_rows, unanswered = [0.0, 0.0], [0, 0], [0, 0]
            for number, (other, engine) in enumerate(order):
                has_arrived = number < len(order) - (24, slow)[engine]
                loads[engine] += other == asker or has_arrived
                assigned_rows[engine] += other == asker
                unanswered[engine] += other == asker and not has_arrived
            order.append(
                (asker, choose(RoutingHints(None, assigned_rows, unanswered, num_routers=8), loads, None, rng))
            )
        excesses.append(max(Counter(engine for _, engine in order).values()) - 320)
    assert mean(excesses) < 2 and max(excesses) <= 4


def test_reported_loads_count_more_than_assigned_rows() -> None:
    def chosen_with(unanswered: list[int], num_routers: int) -> int:
        hints = RoutingHints(assigned_rows=[9, 3], unanswered=unanswered, num_routers=num_routers)
        return choose(hints, [10.0, 60.0], None, random.Random(1))

    assert chosen_with([0, 0], 1) == chosen_with([0, 1], 8) == 0
    assert chosen_with([8, 0], 8) == 1, "without a report, assigned rows decide"


def test_a_request_on_its_way_does_not_hide_a_full_engine() -> None:
    """Nor do those of a burst: two routers have thirty of sixty requests each."""
    for unanswered in ([0, 1], [1, 0], [0, 30]):
        hints = RoutingHints(assigned_rows=[0, 30], unanswered=unanswered, num_routers=2)
        assert {choose(hints, [1000.0, 32.0], None, random.Random(seed)) for seed in range(20)} == {1}


def test_queued_prompt_tokens_count_as_rows() -> None:
    assert load_of(3, 512) == 5.0
