"""Worlds with a virtual clock from seeds: checks invariants, answers and sessions.

    python -m bench.simulate [--seeds 5000] [--first 0] [--steps 140] [--jobs 2]
                             [--without KIND ...] [--minimise]
                             [--out FILE]

A world is the real scheduler, job table, state manager and state pool (prefix cache, SQLite file) on a fake device with
numbers as states. The seed decides sizes, traffic, thread order, faults of disk, device and threads, kills, restarts,
power losses with lost and torn writes, and clocks that are set (`test/simulation/`). Every sixth world also loads and
removes tuned states, mixtures and adapters. In every third, steps verify drafts. Every fourth has two engines that
share the file, two HTTP workers with fleet and ledger, and a network that delays, stalls and cuts.

After every step, slots, running rows, queues and tiers are recounted. Every answer is compared with a prediction from
prompt and seed. After every restart each session must have exactly its acknowledged turns. In a fleet, one linear
history must explain all answers of a session. Figures are counts, not times.

`--out` keeps the record after every 50 worlds, and the seeds done: the same command continues after an interruption.
`--minimise`: runs a failing world again with fewer kinds of faults and fewer steps, and prints the smallest that still
fails. The last line is JSON, and `failures` in it has every failed seed with its reason. The exit status is 1 if any
world failed.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from typing import Any

from bench.tools.record import Arguments, origin, save
from test.simulation.faults import KINDS
from test.simulation.runs import WorldFailed, run
from test.simulation.world import STEPS

Result = tuple[int, dict[str, int], str, float]
"""seed, counts, failure, seconds of CPU"""
SAVED_AFTER = 50
"""Worlds between two writes of `--out`: an interrupted run keeps its results."""


MAX_WORLD_S = 120.0
"""CPU seconds of a world that hangs."""


class _Hangs(BaseException):
    """A world took too long. The product's handlers must not catch it."""


def _end_world(*_: object) -> None:
    raise _Hangs(f"the world still runs after {MAX_WORLD_S:g} s of CPU")


def run_seed(seed: int, steps: int, without: frozenset[str]) -> Result:
    """Run a world. Any error is its failure, so that one world never ends a run of many."""
    began, counts, failure = time.process_time(), {}, ""
    signal.signal(signal.SIGVTALRM, _end_world)
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_WORLD_S)
    try:
        counts = run(seed, steps, without)
    except WorldFailed as failed:
        failure = str(failed)
    except (Exception, _Hangs) as error:  # noqa: BLE001 - one world's fault must not end a run of many
        failure = f"seed {seed}: {type(error).__name__}: {error}\n{traceback.format_exc()}"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return seed, counts, failure, time.process_time() - began


def minimise(seed: int, steps: int, without: frozenset[str]) -> dict[str, Any]:
    """Return the fewest kinds of faults with which the seed still fails. Also returns nearly the fewest steps."""
    for kind in KINDS:
        if kind not in without and run_seed(seed, steps, without | {kind})[2]:
            without |= {kind}
    while steps > 1 and run_seed(seed, steps // 2, without)[2]:
        steps //= 2
    while steps > 1 and run_seed(seed, steps - 1, without)[2]:
        steps -= 1
    return {
        "seed": seed,
        "steps": steps,
        "faults": sorted(set(KINDS) - without),
        "found": run_seed(seed, steps, without)[2],
    }


def summary(
    arguments: argparse.Namespace, done: int, counts: Counter[str], failed: dict[int, str], cpu_s: float, seconds: float
) -> str:
    """Return the record so far as JSON, and write it to `--out`."""
    last = {
        "measure": "simulation",
        **origin(arguments.commit),
        "seeds": done,
        "first": arguments.first,
        "world_steps": arguments.steps,
        "cpu_s": round(cpu_s, 1),
        "seconds": round(seconds, 1),
        "counts": dict(counts),
        "failed": len(failed),
        "failures": {str(seed): failed[seed].partition("\n")[0] for seed in failed},
    }
    return save(last, arguments.out)


def record_so_far(arguments: argparse.Namespace) -> tuple[int, Counter[str], dict[int, str], float, float]:
    """Return the record of an interrupted run. It has the worlds done, counts, failures, CPU seconds and seconds."""
    if arguments.out is None or not arguments.out.exists():
        return 0, Counter(), {}, 0.0, 0.0
    record = json.loads(arguments.out.read_text())
    if (record["first"], record["world_steps"]) != (arguments.first, arguments.steps):
        sys.exit(f"{arguments.out} is the record of another run: name another file, or delete it")
    failures = {int(seed): failure for seed, failure in record["failures"].items()}
    return record["seeds"], Counter(record["counts"]), failures, record["cpu_s"], record["seconds"]


def parse_arguments() -> argparse.Namespace:
    parser = Arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--without", nargs="*", default=[], choices=KINDS, help="kinds of faults to leave out")
    parser.add_argument("--minimise", action="store_true")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    without = frozenset(arguments.without)
    begun, counts, failed, cpu_s, earlier_s = record_so_far(arguments)
    began = time.monotonic() - earlier_s
    seeds = range(arguments.first + begun, arguments.first + arguments.seeds)
    with ProcessPoolExecutor(arguments.jobs) as pool:
        results = pool.map(run_seed, seeds, repeat(arguments.steps), repeat(without), chunksize=10)
        for done, (seed, counted, failure, seconds) in enumerate(results, begun + 1):
            counts.update({name: count for name, count in counted.items() if name != "digest"})
            cpu_s += seconds
            if failure:
                failed[seed] = failure
                print(failure, flush=True)
            if failure or done % SAVED_AFTER == 0:
                summary(arguments, done, counts, failed, cpu_s, time.monotonic() - began)
    if arguments.minimise:
        for seed in list(failed)[:5]:
            print(json.dumps(minimise(seed, arguments.steps, without)), flush=True)
    print(summary(arguments, begun + len(seeds), counts, failed, cpu_s, time.monotonic() - began))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
