"""Which tests see which wrong change.

    python -m bench.mutants [--only TEXT] [--jobs 2] [--wide] [--timeout 600] [--ci]

Each mutant of `bench/mutants/*.py` is applied alone to a copy of the tree, never in place, and its expected tests run
until the first failure. `--wide`: a survivor also meets every other test that starts no service. `--only`: those whose
name contains the text; `--ci`: those that CI runs. A run that takes longer than `--timeout` is told apart: the change
made something wait for ever, or the machine is slow. The table says which test saw what; the last line is JSON, exit status 1 if
fewer than nine in ten were seen.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor

from bench.mutants.runner import MUTANTS, TOO_LATE, Outcome, Trees, try_mutant

ENOUGH = 0.9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of a mutant's name")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for the tests of one mutant")
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--ci", action="store_true")
    arguments = parser.parse_args()
    chosen = [m for m in MUTANTS if arguments.only in m.name and (m.in_ci or not arguments.ci)]
    outcomes: list[Outcome] = []
    with Trees(arguments.jobs) as trees, ThreadPoolExecutor(arguments.jobs) as pool:
        for outcome in pool.map(lambda m: try_mutant(trees, m, arguments.timeout, arguments.wide), chosen):
            outcomes.append(outcome)
            said = f"seen by {outcome.seen_by}" if outcome.seen_by else "SURVIVED"
            print(f"{len(outcomes):4}/{len(chosen)} {outcome.mutant.name}: {said}", flush=True)
    survivors = [outcome.mutant.name for outcome in outcomes if not outcome.seen_by]
    late = [outcome.mutant.name for outcome in outcomes if outcome.seen_by.startswith(TOO_LATE)]
    killed = len(outcomes) - len(survivors) - len(late)
    print(
        json.dumps(
            {
                "measure": "mutants",
                "mutants": len(outcomes),
                "killed": killed,
                "survived": survivors,
                "timed_out": late,
            },
            ensure_ascii=False,
        )
    )
    sys.exit(0 if killed >= ENOUGH * len(outcomes) else 1)


if __name__ == "__main__":
    main()
