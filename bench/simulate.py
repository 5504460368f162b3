"""The engine on one thread with a virtual clock: how many worlds, drawn from seeds, hold what is promised.

    python -m bench.simulate [--seeds 5000] [--first 0] [--steps 140] [--jobs 2]
                                    [--without KIND ...] [--minimise]
                             [--out FILE]

Each world is the real scheduler, job table, state manager and state pool (prefix cache, SQLite file) over a device
whose states are numbers; sizes, traffic, the order in which threads go on, faults of disk, device and threads, kills
and restarts come from the seed (`test/simulation/`), and in every sixth world tuned states, mixtures and adapters,
which are loaded and removed meanwhile. After every step slots, places, queues and tiers are counted afresh; every
answer is compared with a prediction from prompt and seed; after every restart each session must hold
exactly its acknowledged turns. Nothing here is a measurement of time: figures are counts.

`--minimise`: a world that fails is run again without ever more kinds of faults and with fewer steps; what still fails
is told. The last line is JSON; exit status 1 if anything was found.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

from bench.tools.origin import origin
from test.simulation.faults import KINDS
from test.simulation.world import STEPS, WorldFailed, run

Result = tuple[int, dict[str, int], str]
SAVED_AFTER = 50
"""Worlds from one writing of `--out` to the next: a run that is cut keeps what it has."""


def one(seed: int, steps: int, without: frozenset[str]) -> Result:
    """(seed, counts, what was found)."""
    try:
        return seed, run(seed, steps, without), ""
    except WorldFailed as failure:
        return seed, {}, str(failure)


def minimise(seed: int, steps: int, without: frozenset[str]) -> dict[str, Any]:
    """The fewest kinds of faults, and nearly the fewest steps, with which the seed still fails."""
    for kind in KINDS:
        if kind not in without and one(seed, steps, without | {kind})[2]:
            without |= {kind}
    while steps > 1 and one(seed, steps // 2, without)[2]:
        steps //= 2
    while steps > 1 and one(seed, steps - 1, without)[2]:
        steps -= 1
    return {"seed": seed, "steps": steps, "faults": sorted(set(KINDS) - without), "found": one(seed, steps, without)[2]}


def summary(arguments: argparse.Namespace, done: int, counts: Counter[str], failed: list[tuple[int, str]]) -> str:
    """The last line, or what it would be if nothing more came."""
    last = {
        "measure": "simulation",
        **origin(arguments.commit),
        "seeds": done,
        "first": arguments.first,
        **counts,
        "failed": len(failed),
        "failed_seeds": [seed for seed, _ in failed[:20]],
        "first_failures": [failure.partition("\n")[0] for _, failure in failed[:5]],
    }
    if arguments.out is not None:
        part = arguments.out.with_suffix(".part")
        part.write_text(json.dumps(last, indent=1) + "\n")
        part.replace(arguments.out)
    return json.dumps(last)


def parse_arguments() -> argparse.Namespace:
    """Flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--without", nargs="*", default=[], choices=KINDS, help="faults that do not happen")
    parser.add_argument("--minimise", action="store_true")
    parser.add_argument("--out", type=Path, help="a file for the last line, written as the worlds end")
    parser.add_argument("--commit", default="", help="to be written down where git is not at hand")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    without = frozenset(arguments.without)
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    counts: Counter[str] = Counter()
    failed: list[tuple[int, str]] = []
    with ProcessPoolExecutor(arguments.jobs) as pool:
        results = pool.map(one, seeds, repeat(arguments.steps), repeat(without), chunksize=10)
        for done, (seed, counted, failure) in enumerate(results, 1):
            counts.update({name: count for name, count in counted.items() if name != "digest"})
            if failure:
                failed.append((seed, failure))
                print(failure, flush=True)
            if failure or done % SAVED_AFTER == 0:
                summary(arguments, done, counts, failed)
    if arguments.minimise:
        for seed, _ in failed[:5]:
            print(json.dumps(minimise(seed, arguments.steps, without)), flush=True)
    print(summary(arguments, len(seeds), counts, failed))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
