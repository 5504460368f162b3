"""Applies mutants to copies of the tree and runs tests there."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
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
NONE_LEFT = 5
"""pytest's exit status where every test was left out."""
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)
_UNKNOWN = re.compile(r"^ERROR: not found: (.*)\n\(no match in any of", re.MULTILINE)
_IS_TEST = re.compile(r"^test/\S+\.py(::|$)")


@dataclass(frozen=True)
class Limits:
    """How long tests may take, in seconds."""

    run_s: float = 600.0
    test_s: float = 120.0


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant."""

    mutant: Mutant
    seen_by: str
    """the test that failed first; "": none did"""
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        """ "killed", "survived", or "late": neither, for its tests did not end."""
        if self.seen_by.startswith(TOO_LATE):
            return "late"
        return "killed" if self.seen_by else "survived"


@dataclass(frozen=True)
class Tree:
    """A copy of the tree, and the cores that its tests run on."""

    path: Path
    cores: tuple[int, ...] = ()


class Trees:
    """Copies of the tree, one for each that runs at a time; they go at the end."""

    def __init__(self, count: int, cores: int = 0) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="mutants-"))
        self._free: queue.SimpleQueue[Tree] = queue.SimpleQueue()
        ours = sorted(os.sched_getaffinity(0))
        for number in range(count):
            path = self._folder / str(number)
            shutil.copytree(ROOT, path, ignore=shutil.ignore_patterns(*LEFT_OUT))
            for name in LINKED:
                if (ROOT / name).exists():
                    (path / name).symlink_to((ROOT / name).resolve())
            chosen = {ours[(number * cores + i) % len(ours)] for i in range(cores)}
            self._free.put(Tree(path, tuple(sorted(chosen))))

    def __enter__(self) -> Trees:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    @contextlib.contextmanager
    def taken(self) -> Iterator[Tree]:
        """A tree nobody else uses meanwhile."""
        tree = self._free.get()
        try:
            yield tree
        finally:
            self._free.put(tree)

    @contextlib.contextmanager
    def changed(self, mutant: Mutant) -> Iterator[Tree]:
        """A tree with the change. Raises ValueError if it does not apply."""
        with self.taken() as tree:
            file = tree.path / mutant.file
            source = file.read_text(encoding="utf-8")
            try:
                file.write_text(applied(mutant, source), encoding="utf-8")
                yield tree
            finally:
                file.write_text(source, encoding="utf-8")


class Unchanged:
    """Which tests fail without any change, on this machine: each is asked once, and then left out."""

    def __init__(self, limits: Limits) -> None:
        self.failing: set[str] = set()
        self._limits = limits
        self._known: dict[str, Future[bool]] = {}
        self._lock = threading.Lock()

    def passes(self, test: str, cores: tuple[int, ...]) -> bool:
        """Whether it does; whoever asks for it meanwhile waits."""
        with self._lock:
            first: Future[bool] = Future()
            answer = self._known.setdefault(test, first)
        if answer is first:
            passed = not first_failure(Tree(ROOT, cores), [test], self._limits)
            if not passed:
                print(f"left out, since it fails here without any change: {test}", flush=True)
                self.failing.add(test)
            answer.set_result(passed)
        return answer.result()


def applied(mutant: Mutant, source: str) -> str:
    """The file with the change. Raises ValueError unless the snippet occurs exactly once."""
    count = source.count(mutant.snippet)
    if count != 1:
        raise ValueError(f"{mutant.name}: its snippet occurs {count} times in {mutant.file}")
    return source.replace(mutant.snippet, mutant.replacement)


def try_mutant(trees: Trees, mutant: Mutant, unchanged: Unchanged, limits: Limits, wide: bool = False) -> Outcome:
    """Run the expected tests against a mutant, then the others if `wide`."""
    began = time.monotonic()
    with trees.changed(mutant) as tree:
        for tests in [*_runs(mutant.tests), *([list(WIDE)] if wide else [])]:
            if seen_by := confirmed_failure(tree, tests, unchanged, limits):
                break
    return Outcome(mutant, seen_by, round(time.monotonic() - began, 1))


def _runs(tests: Iterable[str]) -> list[list[str]]:
    """Single tests apart from files, in their order: a file that contains a test takes it to its own place in a run."""
    return [list(run) for _, run in itertools.groupby(tests, lambda test: "::" in test)]


def confirmed_failure(tree: Tree, tests: list[str], unchanged: Unchanged, limits: Limits) -> str:
    """The first test that the change fails: with it once more when alone, and not without it. "": all pass."""
    by_chance: set[str] = set()
    asked: set[str] = set()
    while True:
        left_out = unchanged.failing | by_chance
        test = first_failure(tree, [file for file in tests if file not in left_out], limits, left_out)
        if not _IS_TEST.match(test):  # none, too late, or pytest could not even begin
            return test
        if test in asked:
            raise RuntimeError(f"{test} fails without any change, and cannot be left out")
        asked.add(test)
        if not unchanged.passes(test, tree.cores):
            continue
        if first_failure(tree, [test], limits):
            return test
        by_chance.add(test)


def first_failure(tree: Tree, tests: list[str], limits: Limits, without: Iterable[str] = ()) -> str:
    """The first test that fails there; "": all pass, or there are none. Raises ValueError if one does not exist."""
    if not tests:
        return ""
    command = ["taskset", "-c", ",".join(map(str, tree.cores))] if tree.cores else []
    command += [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["-p", "pytest_timeout", "--timeout", f"{limits.test_s:g}"]
    command += [part for test in without for part in ("--deselect", test)]
    # The other plugins, which these tests do not need, take four times as long to load as a quick file of tests.
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment = {**os.environ, **alone, "PYTHONPATH": _path(tree.path)}
    with subprocess.Popen(
        [*command, *tests],
        cwd=tree.path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limits.run_s)
        except subprocess.TimeoutExpired:
            return f"{TOO_LATE} {limits.run_s:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # services that a test did not end
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode in (0, NONE_LEFT):
        return ""
    if (unknown := _UNKNOWN.search(output)) is not None:
        raise ValueError(f"there is no test {unknown.group(1)}")  # pytest runs none then: it says nothing of the change
    found = _FAILED.search(output)
    return found.group(1) if found else output[-300:].strip() or f"exit status {process.returncode}"


def _path(tree: Path) -> str:
    """The tree, then whatever packages come from there now."""
    return os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])
