"""Share of mutants that the tests detect, of a random sample, by mutmut (`[tool.mutmut]` in pyproject.toml).

    python -m bench.mutants --sample 500 --seed 1 --folder /tmp/mutants
    python -m bench.mutants --sample 10 --only 'state_pool.turns.*' --tests test/state_pool

Clones HEAD into `--folder`. A second run there reuses the mutants and the map from functions to tests. mutmut runs the
tests that reach a mutant's function in pytest's process, so code that only child processes run counts as `no tests`.
The last line is JSON. `score`: detected mutants over mutants with tests. `mutmut show NAME` prints a mutant.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

from bench.tools.origin import origin

ROOT = Path(__file__).resolve().parent.parent
DETECTED = {"killed", "timeout", "segfault"}
TESTS = re.compile(r"^(pytest_add_cli_args_test_selection) = \[.*?\]", re.MULTILINE | re.DOTALL)


def clone(folder: Path, tests: list[str]) -> None:
    """Clone HEAD into the folder, unless it is already there."""
    if (folder / ".git").exists():
        return
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
    if tests:
        config = folder / "pyproject.toml"
        config.write_text(TESTS.sub(rf"\1 = {json.dumps(tests)}", config.read_text()))


def mutmut(folder: Path, *arguments: str, check: bool = True) -> str:
    """Run mutmut in the folder and return its output. Raises SystemExit if it fails."""
    command = [sys.executable, "-m", "mutmut", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise SystemExit(f"mutmut {arguments[0]} ended with {done.returncode}: {(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="*", help="a pattern of mutant names")
    parser.add_argument("--tests", nargs="+", default=[], help="tests to run instead of the configured ones")
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    folder = (args.folder or Path(tempfile.mkdtemp(prefix="rwkv-mutants-"))).resolve()
    clone(folder, args.tests)
    mutmut(folder, "run", "no-such-mutant", check=False)  # makes the mutants and maps functions to tests
    files = sorted(folder.glob("mutants/**/*.meta"))
    names = sorted(name for file in files for name in json.loads(file.read_text())["exit_code_by_key"])
    names = [name for name in names if fnmatch(name, args.only)]
    sample = random.Random(args.seed).sample(names, min(args.sample, len(names)))
    mutmut(folder, "run", *sample)
    lines = mutmut(folder, "results", "--all", "true").splitlines()
    found = dict(line.strip().split(": ") for line in lines if ": " in line)
    outcome = {name: found[name] for name in sorted(sample)}
    counts = Counter(outcome.values())
    tested = len(sample) - counts["no tests"]
    score = round(sum(counts[one] for one in DETECTED) / tested, 3) if tested else None
    report = {"bench": "mutants", **origin(), "seed": args.seed, "only": args.only, "mutants": len(names)}
    report |= {"sample": len(sample), "outcomes": dict(counts), "score": score}
    report["not_detected"] = {name: one for name, one in outcome.items() if one not in DETECTED}
    print(json.dumps(report, ensure_ascii=False))


if __name__ == "__main__":
    main()
