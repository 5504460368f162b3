"""Each file call of the pool fails once: nothing acknowledged is lost, errors are described, nothing leaks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from test.conftest import IS_LONG
from test.failing_calls import SYNCS, environment

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STEP = 1 if IS_LONG else 24
"""Every 24th call fails. Each run begins with another number, so together they try every fourth one."""
DURABILITIES = ("log", "turn", "lazy")
ALL = 10_000
FEWEST_CALLS = 150
"""The script makes more file calls than that."""
FEWEST_SYNCS = 15
"""And, with `--synchronous FULL`, more syncs than that."""


@pytest.mark.parametrize("count", [1, 12], ids=["one call", "a while"])
@pytest.mark.parametrize("durability", DURABILITIES)
def test_every_nth_file_call_fails(tmp_path: Path, durability: str, count: int) -> None:
    first = 1 + (4 * DURABILITIES.index(durability) + 2 * (count == 1)) % STEP
    summary = run_script(tmp_path, durability, (first, STEP, ALL, count), "NORMAL")
    assert summary["last"] > FEWEST_CALLS


@pytest.mark.parametrize("durability", DURABILITIES)
def test_a_disk_that_is_full_at_a_sync(tmp_path: Path, durability: str) -> None:
    """Writes succeed, and syncs fail from the Nth on.

    This happens on file systems that find room late.

    With `--synchronous FULL`, no turn is acknowledged meanwhile, unless it is kept in memory only (lazy).
    """
    count = 12 if durability == "lazy" else ALL
    summary = run_script(tmp_path, durability, (1, 1 if IS_LONG else 8, ALL, count), "FULL", SYNCS)
    assert summary["last"] > FEWEST_SYNCS


def run_script(folder: Path, durability: str, numbers: tuple[int, ...], synchronous: str, only: str = "") -> Any:
    data = folder / "data"
    data.mkdir()
    arguments = [str(data), durability, *map(str, numbers), synchronous]
    done = subprocess.run(
        [sys.executable, "-m", "test.state_pool.nth_failure", *arguments],
        cwd=ROOT,
        env=os.environ | environment(data, folder, only),
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
    )
    *violations, summary = [json.loads(line) for line in done.stdout.splitlines()]
    assert violations == []
    assert done.returncode == 0 and summary["exhausted"]
    return summary
