"""The acceptance programs of several engines, in small; RWKV_LONG_TESTS=1 runs them."""

from __future__ import annotations

import asyncio
import importlib.util
import os

import pytest

from bench.acceptance.__main__ import MODES, parse
from test import postgres


@pytest.mark.skipif("RWKV_LONG_TESTS" not in os.environ, reason="RWKV_LONG_TESTS=1 runs it")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["same-session", "deleted", "moved", "overload", "database-cut", "head-away"])
def test_it_withstands(mode: str) -> None:
    if mode == "database-cut" and (reason := postgres.missing()):
        pytest.skip(reason)
    if mode == "head-away" and importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is missing")
    small = [
        "--engines",
        "2",
        "--sessions",
        "6",
        "--rounds",
        "1",
        "--max-tokens",
        "256" if mode == "head-away" else "16",  # streams are to be alive when the head dies
        "--seconds",
        "3",
        "--streams",
        "8",
    ]
    options, flags = parse([mode, *small])
    figures = asyncio.run(MODES[mode](options, flags))
    assert figures["ok"], figures
