"""Origin of a figure for the record: processor, cores, Python, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any


def commit() -> str:
    """Return the commit of the code, or `unknown`."""
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def origin(given_commit: str = "") -> dict[str, Any]:
    """Return machine and commit. `given_commit`: the commit where git is not available."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0].partition(": ")[2] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "commit": given_commit or commit(),
    }
