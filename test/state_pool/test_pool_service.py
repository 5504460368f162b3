"""The real service under kills: the short form of `bench.chaos.crash` with a random model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from demo.random_weights import write_random_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(900)
def test_acknowledged_turns_survive_kills_of_the_service(tmp_path: Path) -> None:
    """Kills all processes at random times under load. Each turn is compared with an uninterrupted run."""
    model = write_random_model(tmp_path / "tiny.pth", 2, 128)
    command = [sys.executable, "-m", "bench.chaos.crash", "--kills", "1"]
    command += ["--model", str(model), "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0, found
    assert found["acknowledged"] > 10
    assert (found["different"], found["bad_files"]) == (0, 0), found
