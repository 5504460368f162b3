"""Durable turns a second of 1, 2 and 4 engines over one database: `python -m bench.state_store`.

Measured: turns of 300 tokens of sessions of their own (64 at once in each engine), each acquired and committed before
it counts. Bound by the database's commits and, as processes are in Python, by the cores: engines beyond their number
share them. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections import deque
from multiprocessing.queues import Queue
from pathlib import Path

from state_pool.sessions import Lease, LeaseState
from test.pool_fakes import Driver, FakeArena, Outcome, config_in

TOKENS = list(range(300))


def main() -> None:
    """Measure, print, and end with one line of JSON."""
    options = _options()
    figures: list[dict[str, float | int | str]] = []
    for engines in (0, 1, 2, 4):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            figures.append(_measured(engines, folder, options.seconds, options.at_once))
        print(figures[-1], flush=True)
    print(json.dumps({"bench": "state_store", "seconds": options.seconds, "figures": figures}))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--at-once", type=int, default=64, help="sessions with a turn under way in each engine")
    parser.add_argument("--folder", help="where the database is made (default: the system's folder for such)")
    return parser.parse_args()


def _measured(engines: int, folder: str, seconds: float, at_once: int) -> dict[str, float | int | str]:
    """`engines` 0: one engine that has the database for itself, as without replicas."""
    told: Queue[int] = multiprocessing.Queue()
    names = [""] if engines == 0 else [f"engine-{number}" for number in range(engines)]
    processes = [multiprocessing.Process(target=_engine, args=(name, folder, seconds, at_once, told)) for name in names]
    for process in processes:
        process.start()
    counts = sorted(told.get() for _ in processes)
    for process in processes:
        process.join()
    kind = "alone" if engines == 0 else "shared"
    return {
        "engines": len(names),
        "database": kind,
        "turns_per_s": round(sum(counts) / seconds),
        "least_share": counts[0] / counts[-1],
    }


def _engine(name: str, folder: str, seconds: float, at_once: int, told: Queue[int]) -> None:
    changes = {"engine": name, "service": "bench"} if name else {}
    driver = Driver(FakeArena(num_slots=2 * at_once + 8), config_in(Path(folder), **changes))
    waiting: deque[tuple[Lease, int]] = deque()
    running: list[Outcome] = []
    count, number, end = 0, 0, time.monotonic() + seconds
    while time.monotonic() < end:
        while len(waiting) + len(running) < at_once:
            waiting.append((driver.pool.checkout(f"{name} {number % at_once}"), number))
            number += 1
        driver.pool.poll()
        for _ in range(len(waiting)):
            lease, order = waiting.popleft()
            if lease.poll() is LeaseState.READY:
                running.append(_commit(driver, lease))
            else:
                waiting.append((lease, order))
        count += sum(outcome.ok for outcome in running)
        running = [outcome for outcome in running if not outcome.known]
        time.sleep(0.0002)  # as the engine's thread waits: one that spins would keep the writer's from its turn
    told.put(count)
    for lease, _ in waiting:
        driver.pool.release(lease)
    driver.pool.close()


def _commit(driver: Driver, lease: Lease) -> Outcome:
    """The end of a turn whose state is not computed: only the store is measured."""
    outcome = Outcome()
    driver.pool.record(lease, TOKENS, outcome)
    driver.pool.checkin(lease, driver.slot())
    return outcome


if __name__ == "__main__":
    main()
