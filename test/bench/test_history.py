"""The checker of linear histories: which histories it accepts, and a short run of the real thing."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.chaos.history import Operation, faults, run
from test.serving import Service


def turns(*places: int | None) -> list[Operation]:
    """Turns after each other."""
    return [Operation(2 * i, 2 * i + 1, place) for i, place in enumerate(places)]


@pytest.mark.parametrize(
    "history",
    [
        [],
        turns(0, 1, 2),
        turns(0, None, 1),
        turns(0, None, 2),
        turns(0, None, None, 2, None),
        [Operation(0, 9, 1), Operation(1, 8, 0)],
        [Operation(0, 9, None), Operation(1, 2, 1), Operation(3, 4, 2), Operation(0, 1, 0)],
    ],
    ids=str,
)
def test_linear_histories(history: list[Operation]) -> None:
    assert faults(history) == []


@pytest.mark.parametrize(
    ("history", "what"),
    [
        (turns(0, 0), "two turns"),
        (turns(0, 1, 1), "two turns"),
        (turns(1, 0), "after place 1"),
        (turns(0, 2), "place 1 belongs to no request"),
        (turns(0, 2, None), "place 1 belongs to no request"),
        (turns(0, None, 3), "belongs to no request"),
        ([*turns(0, 1, 2), Operation(10, 11, 1)], "two turns"),
        ([*turns(0, 3, None, None), Operation(20, 21, 2)], "after place 3"),
        (turns(-1), "after place -1"),
    ],
    ids=str,
)
def test_lost_doubled_and_reordered_turns_are_found(history: list[Operation], what: str) -> None:
    assert any(what in fault for fault in faults(history))


def test_turns_of_two_engines_with_kills_are_linear(tiny_model: Path, tmp_path: Path) -> None:
    service = Service(tmp_path, "--model-path", str(tiny_model), "--replicas", "2", "--threads", "1")
    try:
        found = run(service.wait_ready(), operations=160, clients=8, sessions=3, kill_every=60, seed=2)
    finally:
        service.close()
    assert found["wrong_sessions"] == 0, found["faults"]
    assert found["kills"] and found["answered"] > 80
