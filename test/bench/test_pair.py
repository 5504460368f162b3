"""Figures of two engines compared with one."""

from __future__ import annotations

from bench import pair


def test_two_engines_pass_with_each_number_of_streams_or_not_at_all() -> None:
    one = pair.Figures(tokens_per_s=[100.0, 110.0, 100.0], steady=[120.0] * 3)
    two = pair.Figures(tokens_per_s=[195.0, 190.0, 200.0], steady=[240.0] * 3)
    figures = pair.compared({"http_1": one, "http_2": two})
    assert (figures["ok"], figures["ratio"], figures["steady_ratio"]) == (True, 1.95, 2.0)
    two.errors = 1
    assert not pair.compared({"http_1": one, "http_2": two})["ok"]
