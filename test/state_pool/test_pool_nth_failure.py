"""Each file call of the pool fails once: nothing acknowledged is lost, errors are described, nothing leaks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from test.conftest import IS_LONG
from test.failing_calls import environment

ROOT = Path(__file__).parents[2]
STEP = 1 if IS_LONG else 6
ALL = 10_000
FEWEST_CALLS = 150
"""The script makes more file calls than that."""


@pytest.mark.parametrize("count", [1, 12], ids=["one call", "a while"])
@pytest.mark.parametrize("durability", ["log", "turn", "lazy"])
def test_every_nth_file_call_fails(tmp_path: Path, durability: str, count: int) -> None:
    data = tmp_path / "data"
    data.mkdir()
    arguments = [str(data), durability, *map(str, (1 + count % STEP, STEP, ALL, count))]
    done = subprocess.run(
        [sys.executable, "-m", "test.state_pool.nth_failure", *arguments],
        cwd=ROOT,
        env=os.environ | environment(data, tmp_path),
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
    )
    *violations, summary = [json.loads(line) for line in done.stdout.splitlines()]
    assert violations == []
    assert done.returncode == 0 and summary["exhausted"] and summary["last"] > FEWEST_CALLS
