"""Applies mutants to copies of the tree and runs tests there."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import queue
import re
import select
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

from bench.mutants import forms, http, ipc, jobs, output, pool_cache, pool_disk, pool_turns, sampling, scheduling
from bench.mutants.mutant import Mutant
from bench.mutants.warm import Wanted

ROOT = Path(__file__).resolve().parent.parent.parent
_ROOMS = (scheduling, jobs, output, pool_cache, pool_turns, pool_disk, sampling, ipc, http, forms)
MUTANTS: tuple[Mutant, ...] = tuple(mutant for room in _ROOMS for mutant in room.MUTANTS)
LINKED = (".venv", ".build")
LEFT_OUT = (".*", "__pycache__", "results", "*.db*")
"""What no test needs, or what tests that run meanwhile write: it may be gone when it is to be copied."""
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
    runs: int | None = None
    """of a mutant's tests, single ones and files apart; None: all"""


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


class WarmPython:
    """A process with what all tests load, which forks one for each run of them; one run at a time."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("warm.py")
        # Unbuffered: a line that was read ahead of is one for which `select` waits in vain.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(script)], bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def run(self, wanted: Wanted, timeout_s: float) -> int | None:
        """pytest's exit status, None if it had to be ended. What a run has started ends with it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(wanted).encode() + b"\n")
        pid = int(self._process.stdout.readline())
        ended, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        with contextlib.suppress(ProcessLookupError):  # also services that a test did not end
            os.killpg(pid, signal.SIGKILL)
        code = int(self._process.stdout.readline())
        return code if ended else None


@dataclass(frozen=True)
class Tree:
    """A copy of the tree, what runs its tests, and the cores on which they run."""

    path: Path
    python: WarmPython
    cores: tuple[int, ...] = ()

    @contextlib.contextmanager
    def written(self, file: str, source: str) -> Iterator[None]:
        """Another source of a file for a while. Times of files tell too little to trust bytecode kept from before."""
        path = self.path / file
        before = path.read_text(encoding="utf-8")
        kept = Path(importlib.util.cache_from_source(str(path)))
        try:
            path.write_text(source, encoding="utf-8")
            kept.unlink(missing_ok=True)
            yield
        finally:
            path.write_text(before, encoding="utf-8")
            kept.unlink(missing_ok=True)


class Trees:
    """Copies of the tree, one for each that runs at a time; they go at the end."""

    def __init__(self, count: int, cores: int = 0) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="mutants-"))
        self._free: queue.SimpleQueue[Tree] = queue.SimpleQueue()
        self._pythons = [WarmPython() for _ in range(count)]
        ours = sorted(os.sched_getaffinity(0))
        for number, python in enumerate(self._pythons):
            path = self._folder / str(number)
            shutil.copytree(ROOT, path, ignore=shutil.ignore_patterns(*LEFT_OUT))
            for name in LINKED:
                if (ROOT / name).exists():
                    (path / name).symlink_to((ROOT / name).resolve())
            chosen = {ours[(number * cores + i) % len(ours)] for i in range(cores)}
            self._free.put(Tree(path, python, tuple(sorted(chosen))))

    def __enter__(self) -> Trees:
        return self

    def __exit__(self, *_: object) -> None:
        for python in self._pythons:
            python.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @contextlib.contextmanager
    def taken(self) -> Iterator[Tree]:
        """A tree nobody else uses meanwhile."""
        tree = self._free.get()
        try:
            yield tree
        finally:
            self._free.put(tree)


class Unchanged:
    """Which tests fail without any change, on this machine: each is asked once, and then left out."""

    def __init__(self, limits: Limits) -> None:
        self.failing: set[str] = set()
        self._limits = limits
        self._known: dict[str, Future[bool]] = {}
        self._lock = threading.Lock()

    def passes(self, test: str, tree: Tree) -> bool:
        """Whether it does in a tree without a change; whoever asks for it meanwhile waits."""
        with self._lock:
            first: Future[bool] = Future()
            answer = self._known.setdefault(test, first)
        if answer is first:
            passed = not first_failure(tree, [test], self._limits)
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


def try_mutant(tree: Tree, mutant: Mutant, unchanged: Unchanged, limits: Limits, wide: bool = False) -> Outcome:
    """Run the expected tests against a mutant, then the others if `wide`. Raises ValueError if it does not apply."""
    began = time.monotonic()
    change = Change(tree, mutant)
    for tests in [*_runs(mutant.tests), *([list(WIDE)] if wide else [])][: limits.runs]:
        if seen_by := confirmed_failure(change, tests, unchanged, limits):
            break
    return Outcome(mutant, seen_by, round(time.monotonic() - began, 1))


def _runs(tests: Iterable[str]) -> list[list[str]]:
    """Single tests apart from files, in their order: a file that contains a test takes it to its own place in a run."""
    return [list(run) for _, run in itertools.groupby(tests, lambda test: "::" in test)]


@dataclass(frozen=True)
class Change:
    """A mutant in a tree, where it is while its tests run."""

    tree: Tree
    mutant: Mutant

    def first_failure(self, tests: list[str], limits: Limits, without: Iterable[str] = ()) -> str:
        """As the function of that name, with the change."""
        source = (self.tree.path / self.mutant.file).read_text(encoding="utf-8")
        with self.tree.written(self.mutant.file, applied(self.mutant, source)):
            return first_failure(self.tree, tests, limits, without)


def confirmed_failure(change: Change, tests: list[str], unchanged: Unchanged, limits: Limits) -> str:
    """The first test that the change fails: with it once more when alone, and not without it. "": all pass."""
    by_chance: set[str] = set()
    asked: set[str] = set()
    while True:
        left_out = unchanged.failing | by_chance
        test = change.first_failure([file for file in tests if file not in left_out], limits, left_out)
        if not _IS_TEST.match(test):  # none, too late, or pytest could not even begin
            return test
        if test in asked:
            raise RuntimeError(f"{test} fails without any change, and cannot be left out")
        asked.add(test)
        if not unchanged.passes(test, change.tree):
            continue
        if change.first_failure([test], limits):
            return test
        by_chance.add(test)


def first_failure(tree: Tree, tests: list[str], limits: Limits, without: Iterable[str] = ()) -> str:
    """The first test that fails there; "": all pass, or there are none. Raises ValueError if one does not exist."""
    if not tests:
        return ""
    own = tree.path.with_name(f"{tree.path.name}-own")
    own.mkdir(exist_ok=True)
    command = ["-q", "-x", "-p", "no:cacheprovider", f"--basetemp={own / 'base'}"]
    command += ["-p", "pytest_timeout", "--timeout", f"{limits.test_s:g}"]
    command += [part for test in without for part in ("--deselect", test)]
    # The other plugins, which these tests do not need, take four times as long to load as a quick file of tests.
    environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": _path(tree.path), "TMPDIR": str(own)}
    output = own / "output"
    wanted = Wanted(
        tree=str(tree.path),
        arguments=[*command, *tests],
        environment=environment,
        cores=list(tree.cores),
        output=str(output),
    )
    code = tree.python.run(wanted, limits.run_s)
    if code is None:
        return f"{TOO_LATE} {limits.run_s:g} s"
    if code in (0, NONE_LEFT):
        return ""
    said = output.read_text(errors="replace")
    if (unknown := _UNKNOWN.search(said)) is not None:
        raise ValueError(f"there is no test {unknown.group(1)}")  # pytest runs none then: it says nothing of the change
    found = _FAILED.search(said)
    return found.group(1) if found else said[-300:].strip() or f"exit status {code}"


def _path(tree: Path) -> str:
    """The tree, then whatever packages come from there now."""
    return os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])
