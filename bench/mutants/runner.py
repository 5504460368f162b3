"""Applies mutants to copies of the tree and runs tests there."""

from __future__ import annotations

import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bench.mutants import edges, engine, pool
from bench.mutants.mutant import Mutant

ROOT = Path(__file__).resolve().parent.parent.parent
MUTANTS: tuple[Mutant, ...] = (*engine.MUTANTS, *pool.MUTANTS, *edges.MUTANTS)
LINKED = (".venv", ".build")
LEFT_OUT = (".git", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", "results", "*.db", *LINKED)
WIDE = ("test/engine", "test/state_pool", "test/sampling", "test/simulation")
TOO_LATE = "none within"
"""How `Outcome.seen_by` begins when the tests did not end in time."""
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant."""

    mutant: Mutant
    seen_by: str
    """the test that failed first; "": none did"""


class Trees:
    """Copies of the tree, one for each that runs at a time; they go at the end."""

    def __init__(self, count: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="mutants-"))
        self._free: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(count):
            tree = self._folder / str(number)
            shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*LEFT_OUT))
            for name in LINKED:
                if (ROOT / name).exists():
                    (tree / name).symlink_to((ROOT / name).resolve())
            self._free.put(tree)

    def __enter__(self) -> Trees:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def take(self) -> Path:
        """A tree nobody else uses."""
        return self._free.get()

    def give_back(self, tree: Path) -> None:
        """It is as it was."""
        self._free.put(tree)


def applied(mutant: Mutant, source: str) -> str:
    """The file with the change. Raises ValueError unless the snippet occurs exactly once."""
    count = source.count(mutant.snippet)
    if count != 1:
        raise ValueError(f"{mutant.name}: its snippet occurs {count} times in {mutant.file}")
    return source.replace(mutant.snippet, mutant.replacement)


def try_mutant(trees: Trees, mutant: Mutant, timeout: float, wide: bool = False) -> Outcome:
    """Run the expected tests against a mutant, then the others if `wide`."""
    tree = trees.take()
    file = tree / mutant.file
    source = file.read_text(encoding="utf-8")
    try:
        file.write_text(applied(mutant, source), encoding="utf-8")
        seen_by = first_failure(tree, [test for test in mutant.tests if (ROOT / test).exists()], timeout)
        if not seen_by and wide:
            seen_by = first_failure(tree, list(WIDE), timeout)
    finally:
        file.write_text(source, encoding="utf-8")
        trees.give_back(tree)
    return Outcome(mutant, seen_by)


def first_failure(tree: Path, tests: list[str], timeout: float) -> str:
    """The first test that fails there; "": all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout", "120", *tests]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tree)}
    with subprocess.Popen(
        command, cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            return f"{TOO_LATE} {timeout:g} s"
    if process.returncode == 0:
        return ""
    found = _FAILED.search(output)
    return found.group(1) if found else output[-300:].strip() or f"exit status {process.returncode}"
