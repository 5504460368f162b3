"""What all programs share: their flags, the origin of a figure, the last line."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any


class Arguments(argparse.ArgumentParser):
    """The flags of a program; `about`: its docstring."""

    def __init__(self, about: str | None) -> None:
        super().__init__(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.add_argument("--out", type=file_to_write, help="a file for the last line, kept if the run is interrupted")
        self.add_argument("--commit", default="", help="the commit to record where git is not available")


def file_to_write(text: str) -> Path:
    """Return a path in an existing folder. Raises ArgumentTypeError."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in an existing folder, got {text!r}")
    return path


def commit(given: str = "") -> str:
    """Return the commit of the code: `given`, or what git says, or `unknown`."""
    command = ["git", "describe", "--always", "--dirty"]
    if given:
        return given
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def origin(given_commit: str = "", *packages: str) -> dict[str, Any]:
    """Return processor, cores, commit, and the versions of Python and packages."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0].partition(": ")[2] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
        "commit": commit(given_commit),
    }


def save(record: Any, out: Path | None) -> str:
    """Return a record as one line of JSON; write it to `out`, so that an interrupted run keeps it."""
    line = json.dumps(record)
    if out is not None:
        part = out.with_name(f"{out.name}.part")
        part.write_text(line + "\n")
        part.replace(out)
    return line


def finish(record: Any, out: Path | None) -> None:
    """Print the last line and save it."""
    print(save(record, out))
