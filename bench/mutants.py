"""Share of generated mutants that the tests detect, of a random sample.

    python -m bench.mutants --sample 500 --seed 1 --workers 14 --out /tmp/mutants
    python -m bench.mutants --only '*Turns.commit*' --tests test/state_pool/test_pool_turns.py --out /tmp/turns

mutmut makes the mutants of `[tool.mutmut]` in pyproject.toml. coverage.py records which tests run which lines, also in
the child processes of a test. A mutant gets a fresh process and the tests that run its statement, cheapest file first,
for `--test-s` seconds. A test that exceeds its time limit detects the mutant. A test that fails without mutants is left
out. `--tests`: all tests of these files run instead, and nothing is recorded before.

`--out` gets `record.json` and `not_detected.diff`. `score`: detected mutants over all that ran.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

from bench.tools.mutant_maker import (
    ROOT,
    Mutant,
    diff,
    make_mutants,
    mutant_names,
    scope_files,
    statement_lines,
    test_paths,
)
from bench.tools.mutant_tests import RECORD, SELECT
from bench.tools.record import origin

DETECTED = {"killed", "timeout"}
NOT_RUN = "not run"
TEST_LIMIT_S, TEST_FACTOR = 20.0, 6.0
"""Time limit of a test: so many seconds, plus so many times its usual duration."""
FILE_LIMIT_S = 150.0
PYTEST = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", "bench.tools.mutant_tests", "-p", "no:cacheprovider"]
PYTEST += ["-p", "no:xdist", "-m", "not (browser or cluster or proxy or gpu)"]
COVERAGE = """[run]
core = ctrace
parallel = true
patch = _exit, fork
data_file = {data}
include = {include}
"""
CHILD = """import coverage, os, threading, time
def save():
    while True:
        time.sleep(1.0)  # a child may be killed
        if (running := coverage.Coverage.current()) is not None:
            running.save()
def start():
    threading.Thread(target=save, daemon=True).start()
if "COVERAGE_PROCESS_START" in os.environ:
    coverage.process_startup()
    os.register_at_fork(after_in_child=start)
    if os.getppid() != int(os.environ["MUTANT_RUNNER"]):  # pytest itself ends by itself
        start()
"""
"""A sitecustomize.py that measures each Python process."""


@dataclass
class TestMap:
    """Which passing tests run which line. A test that runs it in a child process stands for its whole file."""

    seconds: dict[str, float]
    failed: list[str]
    lines: dict[str, dict[int, set[str]]]
    unreadable: int = 0
    """coverage files of processes that were killed while they wrote"""

    def of(self, mutant: Mutant, budget_s: float) -> list[str]:
        """Return the tests for a mutant, cheapest file first."""
        by_line = self.lines.get(mutant.path, {})
        found = {name for line in statement_lines(mutant) for name in by_line.get(line, ())}
        files: dict[str, list[str]] = {}
        for test in self.seconds:
            file = test.partition("::")[0]
            if test in found or file in found:
                files.setdefault(file, []).append(test)
        cost = {file: sum(self.seconds[test] for test in tests) for file, tests in files.items()}
        direct = {file: not found.isdisjoint(tests) for file, tests in files.items()}
        chosen: list[str] = []
        for file in sorted(files, key=lambda file: (not direct[file], cost[file])):
            for test in files[file] if not direct[file] else sorted(files[file], key=self.seconds.__getitem__):
                if budget_s > 0:
                    chosen.append(test)
                    budget_s -= self.seconds[test]
        return chosen


class Trees:
    """Copies of the working tree, one per worker. Runs pytest in them."""

    def __init__(self, folder: Path, workers: int) -> None:
        self._folder, self.workers = folder, workers
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._written = time.time_ns()
        (folder / "site").mkdir(parents=True)
        (folder / "site" / "sitecustomize.py").write_text(CHILD)
        for worker in range(workers):
            shutil.copytree(
                ROOT, folder / f"{worker}", symlinks=True, ignore=shutil.ignore_patterns(".*", "build", "dist")
            )
            self._free.put(worker)

    def pytest(
        self, arguments: list[str], limit_s: float, mutant: Mutant | None = None, **environment: str
    ) -> tuple[int | None, str]:
        """Run pytest in a free copy with the mutant. Return its exit code, None after `limit_s`, and its output."""
        worker = self._free.get()
        tree, scratch = self._folder / f"{worker}", self._folder / f"t{worker}"
        file = tree / mutant.path if mutant is not None else None
        plain = file.read_text() if file is not None else ""
        try:
            if file is not None and mutant is not None:
                self._write(file, mutant.text)
            scratch.mkdir()
            return self._run(worker, tree, scratch, arguments, limit_s, environment)
        finally:
            if file is not None:
                self._write(file, plain)
            shutil.rmtree(scratch, ignore_errors=True)
            self._free.put(worker)

    def _run(
        self, worker: int, tree: Path, scratch: Path, arguments: list[str], limit_s: float, environment: dict[str, str]
    ) -> tuple[int | None, str]:
        paths = [str(self._folder / "site"), os.environ.get("PYTHONPATH", "")]
        environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "TMPDIR": str(scratch)}
        environment |= {"PYTEST_XDIST_WORKER": f"gw{worker}", "PYTEST_XDIST_WORKER_COUNT": str(self.workers)}
        output = scratch / "output"
        with output.open("w") as sink:
            process = subprocess.Popen(
                [*PYTEST, "--basetemp", str(scratch / "b"), *arguments],
                cwd=tree,
                env={**os.environ, **environment},
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )
            code: int | None = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(limit_s)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return code, output.read_text(errors="replace")

    def _write(self, file: Path, text: str) -> None:
        """Write a module, with a new time: otherwise Python may use the compiled code of the last one."""
        file.write_text(text)
        self._written += 2_000_000_000
        os.utime(file, ns=(self._written, self._written))


def map_tests(trees: Trees, folder: Path, scope: list[str], tests: list[str]) -> TestMap:
    """Return which tests run which lines of the scope. Runs each test file by itself."""
    result = TestMap({}, [], {})
    files = sorted({str(file.relative_to(ROOT)) for one in tests for file in test_files(ROOT / one)})

    def measure(file: str) -> None:
        data = folder / "data" / file.replace("/", "-")
        data.mkdir(parents=True)
        config = data / "rc"
        config.write_text(COVERAGE.format(data=data / "lines", include=",".join(f"*/{one}" for one in scope)))
        environment = {"COVERAGE_PROCESS_START": str(config), RECORD: str(data / "tests.json")}
        environment["MUTANT_RUNNER"] = str(os.getpid())
        trees.pytest([file], FILE_LIMIT_S, **environment)
        if not (data / "tests.json").exists():
            result.failed.append(file)
            return
        record = json.loads((data / "tests.json").read_text())
        result.seconds |= record["passed"]
        result.failed += record["failed"]

    sizes = {file: (ROOT / file).stat().st_size for file in files}
    order = sorted(files, key=lambda file: (not _is_long(file), -sizes[file]))
    in_parallel(trees.workers, measure, order)
    for file in files:
        for data in (folder / "data" / file.replace("/", "-")).glob("lines*"):
            _add_lines(result, file, data)
    return result


def _is_long(file: str) -> bool:
    from test.longest_files import LONGEST

    return file.removeprefix("test/") in LONGEST


def _add_lines(result: TestMap, file: str, source: Path) -> None:
    import coverage

    data = coverage.CoverageData(str(source))
    try:
        data.read()
        found = {measured: data.contexts_by_lineno(measured) for measured in data.measured_files()}
    except coverage.exceptions.CoverageException:  # its process was killed while it wrote
        result.unreadable += 1
        return
    for measured, contexts_by_line in found.items():
        path = next((one for one in scope_files() if measured.endswith(f"/{one}")), None)
        if path is None:
            continue
        by_line = result.lines.setdefault(path, {})
        for line, contexts in contexts_by_line.items():
            names = {context if "::" in context else file for context in contexts}
            by_line.setdefault(line, set()).update(name for name in names if name == file or name in result.seconds)


def test_files(path: Path) -> list[Path]:
    """Return the test files in a folder, or the file."""
    return sorted(path.glob("test_*.py")) if path.is_dir() else [path]


def in_parallel(workers: int, call: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """Call for all items, with so many threads."""
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(call, items))


def try_mutant(
    trees: Trees, folder: Path, mutant: Mutant, tests: TestMap, chosen: list[str], rest_s: float
) -> tuple[str, str]:
    """Return a mutant's outcome and the test that detects it. Ends within `rest_s` seconds."""
    if not chosen:
        return "no tests", ""
    limits = {test: TEST_LIMIT_S + TEST_FACTOR * tests.seconds.get(test, 10.0) for test in chosen}
    handle, name = tempfile.mkstemp(".json", dir=folder)
    with os.fdopen(handle, "w") as file:
        json.dump(list(limits.items()), file)
    files = list(dict.fromkeys(test.partition("::")[0] for test in chosen))
    limit_s = 60.0 + TEST_FACTOR / 2 * sum(tests.seconds.get(test, 10.0) for test in chosen)
    code, output = trees.pytest(["-x", *files], min(limit_s, rest_s), mutant, **{SELECT: name})
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if code is None and rest_s < limit_s:
        return NOT_RUN, ""
    if code is None or "+++ Timeout +++" in output:
        return "timeout", ""
    outcomes = {0: "survived", 4: "error", 5: "error"}
    return outcomes.get(code, "killed"), failed[0][:200] if failed else output[-200:] if code else ""


def sample(args: argparse.Namespace) -> tuple[dict[str, Mutant], int]:
    with ProcessPoolExecutor(args.workers) as pool:
        names = sorted(name for found in pool.map(mutant_names, scope_files()) for name in found)
        total = len(names)
        names = [name for name in names if fnmatch(name, args.only)]
        names = random.Random(args.seed).sample(names, min(args.sample, len(names)))
        paths = sorted({name.partition(":")[0] for name in names})
        expected = [{name for name in names if name.startswith(f"{path}:")} for path in paths]
        made = {one.name: one for found in pool.map(make_mutants, paths, expected) for one in found}
    return {name: made[name] for name in names}, total


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="*", help="a pattern of mutant names")
    parser.add_argument("--tests", nargs="+", help="run the tests of these files for each mutant")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--test-s", type=float, default=40.0, help="duration of the tests of one mutant")
    parser.add_argument("--limit-s", type=float, default=1e9, help="seconds after which mutants are left out")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    start = time.monotonic()
    os.chdir(ROOT)
    args.out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="mutants-"))
    print(f"in {folder}", file=sys.stderr)
    mutants, total = sample(args)
    names = list(mutants)
    print(f"{time.monotonic() - start:.0f} s: {len(names)} of {total} mutants", file=sys.stderr)
    trees = Trees(folder, args.workers)
    tests = TestMap({}, [], {}) if args.tests else map_tests(trees, folder, scope_files(), test_paths())
    print(f"{time.monotonic() - start:.0f} s: {len(tests.seconds)} tests, {len(tests.failed)} failed", file=sys.stderr)

    def run(name: str) -> tuple[str, str]:
        if (rest_s := args.limit_s - (time.monotonic() - start)) <= 0:
            return NOT_RUN, ""
        mutant = mutants[name]
        chosen = _collected(*args.tests) if args.tests else tests.of(mutant, args.test_s)
        try:
            return try_mutant(trees, folder, mutant, tests, chosen, rest_s)
        except OSError as error:
            return "error", str(error)

    outcomes = dict(zip(names, in_parallel(args.workers, run, names), strict=True))
    record = {"bench": "mutants", **origin(args.commit), "seed": args.seed, "only": args.only, "mutants": total}
    record |= {"tests": len(tests.seconds)}
    record |= {"seconds": round(time.monotonic() - start)}
    report(args.out, record, mutants, outcomes)
    record |= {"unreadable_coverage_files": tests.unreadable}
    details = {"failed_tests": tests.failed, "outcomes": outcomes}
    (args.out / "record.json").write_text(json.dumps(record | details, ensure_ascii=False, indent=1))
    shutil.rmtree(folder, ignore_errors=True)


@cache
def _collected(*paths: str) -> list[str]:
    command = [*PYTEST, "--collect-only", "-v", *paths]  # names, not counts, although -q is given twice
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.splitlines()
    return [line for line in lines if "::" in line]


def report(out: Path, record: dict[str, Any], mutants: dict[str, Mutant], outcomes: dict[str, Any]) -> None:
    """Add the score to the record and print it. Write the diffs of mutants that were not detected."""
    counts = Counter(outcome for outcome, _ in outcomes.values())
    ran = len(outcomes) - counts[NOT_RUN]
    record |= {"sample": len(outcomes), "counts": dict(counts)}
    record |= {"score": round(sum(counts[one] for one in DETECTED) / ran, 3) if ran else None}
    print(json.dumps(record, ensure_ascii=False))
    missed = {name: outcome for name, (outcome, _) in sorted(outcomes.items()) if outcome not in DETECTED | {NOT_RUN}}
    diffs = (f"# {name}: {outcome}\n{diff(mutants[name])}\n" for name, outcome in missed.items() if name in mutants)
    (out / "not_detected.diff").write_text("".join(diffs))


if __name__ == "__main__":
    main()
