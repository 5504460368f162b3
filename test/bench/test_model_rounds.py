"""What `bench.model_rounds` makes of gaps and of memory."""

from __future__ import annotations

from bench.gaps import Gap, figures
from bench.model_rounds import Look, kept_mb

BEFORE, ROUNDS, AFTER = (0.0, 10.0), (10.0, 30.0), (33.0, 43.0)


def gaps(every_s: float, span: tuple[float, float], longer: dict[int, float]) -> list[Gap]:
    """Of two streams, a gap every so often; in some seconds of the span the first is longer."""
    found: list[Gap] = []
    for number in range(int((span[1] - span[0]) / every_s)):
        at = span[0] + number * every_s
        first = number % int(1 / every_s) == 0
        gap = longer.get(int(at - span[0]), every_s) if first else every_s
        found += [(stream, at, gap) for stream in (0, 1)]
    return found


def test_one_long_gap_that_was_met_alone_does_not_hide_those_of_every_round() -> None:
    found = gaps(0.01, BEFORE, {3: 0.08}) + gaps(0.01, AFTER, {})
    found += gaps(0.01, ROUNDS, dict.fromkeys(range(20), 0.03))
    told = figures(found, BEFORE, ROUNDS, AFTER, 1.0)
    assert told["grew"]["longest"]["most"] < 0.5
    assert told["grew"]["longest_of_a_second"] == {"median": 3.0, "most": 3.0, "streams_above_1.5": 2}
    assert told["grew"]["median"]["most"] == 1.0 and told["streams_seen"] == 2
    assert told["after_by_before"]["longest"]["most"] == 0.12
    assert told["in_rounds_gap_ms"]["longest_of_a_second"] == {"p50": 30.0, "p90": 30.0}


def test_while_the_rounds_go_on_there_are_figures_of_what_was() -> None:
    found = gaps(0.01, BEFORE, {}) + gaps(0.01, ROUNDS, dict.fromkeys(range(20), 0.03))
    told = figures(found, BEFORE, ROUNDS, (ROUNDS[1], ROUNDS[1]), 1.0)
    assert told["grew"]["longest_of_a_second"]["median"] == 3.0
    assert told["after_by_before"] == {} and told["after_gap_ms"]["p50"] is None


def test_what_streams_draw_is_not_lost_by_rounds() -> None:
    """A tenth of a megabyte a thousand tokens alone; in the rounds that and three megabytes."""
    drawn = (0, 10_000, 40_000, 50_000)
    memory = (100.0, 101.0, 107.0, 108.0)
    looks = [Look({"all": mb, "engine": mb}, tokens) for mb, tokens in zip(memory, drawn, strict=True)]
    assert kept_mb(looks) == 3.0
