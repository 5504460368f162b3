"""Which tests see which wrong change.

    python -m bench.mutants [--only TEXT] [--jobs 2] [--wide] [--ci] [--out FILE [--again FILE ...]]
                            [--timeout 600] [--test-timeout 120] [--seconds S] [--runs N] [--cores-each 0]

Each mutant of `bench/mutants/*.py` is applied alone to a copy of the tree, never in place, and its expected tests run,
single tests and files apart, until the first failure; it counts if the test fails again alone, and passes without the
change. A test that takes longer than `--test-timeout` has failed. `--wide`: a survivor also meets every other test that
starts no service. `--only`: those whose name contains the text; `--ci`: those that CI runs. A run that takes longer
than `--timeout` is told apart: the change made something wait for ever, or the machine is slow. After `--seconds` no
further mutant is begun. `--cores-each`: each copy of the tree runs on so many cores of its own.

`--out` is written after each mutant, so that a run that is cut keeps what it has; what the files of `--again` have as
killed is not tried again but goes into `--out` (with `--seconds 0` they are merged). With `--runs 1` a mutant meets the
first of its tests only and stays untried if they do not see it: so the quick tests of all come first.

The table says which test saw what; the last line is JSON (`mutants`: those tried, `of`: those there are), exit status 1
if fewer than nine in ten of the tried were seen.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from bench.mutants.mutant import Mutant
from bench.mutants.runner import MUTANTS, Limits, Outcome, Trees, Unchanged, try_mutant
from bench.tools.origin import origin

ENOUGH = 0.9
Result = dict[str, Any]


def parse_arguments() -> argparse.Namespace:
    """Flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of a mutant's name")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one run of tests")
    parser.add_argument("--test-timeout", type=float, default=120.0, help="seconds for one test")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no mutant is begun")
    parser.add_argument(
        "--runs", type=int, help="runs of a mutant's tests, the first; what they do not see stays untried"
    )
    parser.add_argument("--cores-each", type=int, default=0)
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--ci", action="store_true")
    parser.add_argument("--out", type=Path, help="a file for all results, written after each")
    parser.add_argument("--again", type=Path, nargs="+", default=[], help="files of earlier runs, the last counts")
    parser.add_argument("--commit", default="", help="to be written down where git is not at hand")
    return parser.parse_args()


def seen_before(files: Iterable[Path]) -> dict[str, Result]:
    """What earlier runs have as killed, the last of them where several have. What took no time was not tried."""
    results: dict[str, Result] = {}
    for file in files:
        earlier = json.loads(file.read_text())["results"]
        results |= {one["name"]: one for one in earlier if one["verdict"] == "killed" and one["seconds"] > 0}
    return results


def outcomes(chosen: list[Mutant], arguments: argparse.Namespace) -> Iterator[Outcome]:
    """Try all, as many at a time as asked for; in the order in which they end."""
    limits = Limits(arguments.timeout, arguments.test_timeout, arguments.runs)
    unchanged, until = Unchanged(limits), time.monotonic() + arguments.seconds
    with Trees(arguments.jobs, arguments.cores_each) as trees, ThreadPoolExecutor(arguments.jobs) as pool:

        def attempt(mutant: Mutant) -> Outcome | None:
            if time.monotonic() > until:
                return None
            try:
                with trees.taken() as tree:
                    outcome = try_mutant(tree, mutant, unchanged, limits, arguments.wide)
            except (RuntimeError, ValueError) as error:  # of this mutant's tests alone: the others are tried
                print(f"NOT TRIED {mutant.name}: {error}", flush=True)
                return None
            if arguments.runs is None or outcome.verdict == "killed":
                return outcome
            print(f"not seen by its first tests: {mutant.name} ({outcome.seconds:g} s)", flush=True)
            return None

        for done in as_completed([pool.submit(attempt, mutant) for mutant in chosen]):
            if (outcome := done.result()) is not None:
                yield outcome


def summary(results: dict[str, Result], here: dict[str, Any]) -> dict[str, Any]:
    """The last line: of the mutants that exist now, what became of each."""
    known = [results[mutant.name] for mutant in MUTANTS if mutant.name in results]
    named = {verdict: [one["name"] for one in known if one["verdict"] == verdict] for verdict in ("survived", "late")}
    return {
        "measure": "mutants",
        **here,
        "mutants": len(known),
        "of": len(MUTANTS),
        "killed": sum(one["verdict"] == "killed" for one in known),
        "survived": named["survived"],
        "timed_out": named["late"],
    }


def write(file: Path | None, last: dict[str, Any], results: dict[str, Result]) -> None:
    """Results so far of the mutants that exist now, whole or not at all."""
    if file is not None:
        known = {mutant.name for mutant in MUTANTS}
        kept = [one for name, one in results.items() if name in known]
        part = file.with_suffix(".part")
        part.write_text(json.dumps({**last, "results": kept}, ensure_ascii=False, indent=1) + "\n")
        part.replace(file)


def main() -> None:
    arguments = parse_arguments()
    here = origin(arguments.commit)
    results = seen_before(arguments.again)
    wanted = [m for m in MUTANTS if arguments.only in m.name and (m.in_ci or not arguments.ci)]
    # Those that a single test is known to see take a few seconds each: a run that is cut has tried most.
    chosen = sorted((m for m in wanted if m.name not in results), key=lambda mutant: "::" not in mutant.tests[0])
    for number, outcome in enumerate(outcomes(chosen, arguments), 1):
        name, seen_by, verdict = outcome.mutant.name, outcome.seen_by, outcome.verdict
        one = {"name": name, "verdict": verdict, "seen_by": seen_by, "seconds": outcome.seconds}
        results[name] = {**one, "commit": here["commit"]}
        said = f"seen by {seen_by}" if seen_by else "SURVIVED"
        print(f"{number:4}/{len(chosen)} {name}: {said} ({outcome.seconds:g} s)", flush=True)
        write(arguments.out, summary(results, here), results)
    last = summary(results, here)
    write(arguments.out, last, results)
    print(json.dumps(last, ensure_ascii=False))
    sys.exit(0 if last["killed"] >= ENOUGH * last["mutants"] else 1)


if __name__ == "__main__":
    main()
