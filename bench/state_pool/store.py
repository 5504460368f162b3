"""What the stores of sessions carry: `python -m bench.state_pool.store --postgres --checkpoint-store file:///mnt/shared`.

Measured, for each database (SQLite's file, with --postgres a server of the bench's own): durable turns a second of 1, 2
and 4 engines, each turn of 300 tokens of a session of its own (64 at once in an engine), acquired and committed before
it counts. And for each place of whole states (the database, and each --checkpoint-store): states of --state-mb stored a
second, four at once, and how long one alone takes to be stored and to be read back. Bound by the database's commits,
the disk and the network, and, as processes are in Python, by the cores: engines beyond their number share them. Short:
`--seconds 0.5 --engines 1 --state-mb 1`. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

from state_pool.sessions import Lease, LeaseState
from test.pool_fakes import Driver, FakeArena, Outcome, config_in
from test.postgres import Server

TOKENS = list(range(300))
STATES = 8
"""Sessions whose states are stored in turn."""
Figure = dict[str, float | int | str]
_spawn = multiprocessing.get_context("spawn")  # a fork would have the locks of this process's other threads as they are


def main() -> None:
    """Measure, print, and end with one line of JSON."""
    asked = options()
    turns: list[Figure] = []
    states: list[Figure] = []
    with contextlib.ExitStack() as opened:
        servers = [opened.enter_context(contextlib.closing(Server()))] if asked.postgres else []
        for server in [None, *servers]:
            for engines in asked.engines if server is None else [number for number in asked.engines if number]:
                with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
                    address = "" if server is None else server.database()
                    turns.append(turns_of(engines, folder, address, asked))
                print(turns[-1], flush=True)
            for store in ["", *(asked.checkpoint_store if server is None else [])]:
                with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
                    address = "" if server is None else server.database()
                    states.append(states_in(Path(folder), address, store, asked))
                print(states[-1], flush=True)
    print(json.dumps({"bench": "state_store", "seconds": asked.seconds, "turns": turns, "states": states}))


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """What the command line, or a list of its arguments, says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each figure is measured")
    parser.add_argument("--engines", type=int, nargs="*", default=[0, 1, 2, 4], help="0: one, alone with its file")
    parser.add_argument("--at-once", type=int, default=64, help="sessions with a turn under way in each engine")
    parser.add_argument("--state-mb", type=float, default=17.3, help="of one state; 17.3: of a 7.2B model")
    parser.add_argument("--postgres", action="store_true", help="measure a PostgreSQL server, too")
    parser.add_argument("--checkpoint-store", action="append", default=[], help="file:///… or s3://…; any number")
    parser.add_argument("--folder", help="where the databases are made (default: the system's folder for such)")
    return parser.parse_args(arguments)


def turns_of(engines: int, folder: str, address: str, asked: argparse.Namespace) -> Figure:
    """Durable turns; `engines` 0: one engine that has the file for itself, as without replicas."""
    told: Queue[int] = _spawn.Queue()
    names = [""] if engines == 0 else [f"engine-{number}" for number in range(engines)]
    given = (folder, address, asked.seconds, asked.at_once, _spawn.Barrier(len(names)), told)
    processes = [_spawn.Process(target=_engine, args=(name, *given)) for name in names]
    for process in processes:
        process.start()
    counts = sorted(told.get() for _ in processes)
    for process in processes:
        process.join()
    return {
        "engines": len(names),
        "database": "postgres" if address else "sqlite, alone" if engines == 0 else "sqlite",
        "turns_per_s": round(sum(counts) / asked.seconds),
        "least_share": counts[0] / max(1, counts[-1]),
    }


def _engine(
    name: str, folder: str, address: str, seconds: float, at_once: int, all_there: Barrier, told: Queue[int]
) -> None:
    changes: dict[str, object] = {"engine": name, "service": "bench"} if name or address else {}
    changes |= {"state_db": address} if address else {}
    driver = Driver(FakeArena(num_slots=2 * at_once + 8), config_in(Path(folder), **changes))
    all_there.wait()
    told.put(sum(_turns(driver, [f"{name} {number}" for number in range(at_once)], at_once, seconds)))
    driver.pool.close()


def _turns(driver: Driver, names: list[str], at_once: int, seconds: float) -> Iterator[int]:
    """Turns of these sessions, one after another; yields how many have become durable."""
    waiting: deque[Lease] = deque()
    running: list[Outcome] = []
    number, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        while len(waiting) + len(running) < at_once:
            waiting.append(driver.pool.checkout(names[number % len(names)]))
            number += 1
        driver.pool.poll()
        for _ in range(len(waiting)):
            lease = waiting.popleft()
            if lease.poll() is LeaseState.READY:
                running.append(_commit(driver, lease))
            else:
                waiting.append(lease)
        yield sum(outcome.ok for outcome in running)
        running = [outcome for outcome in running if not outcome.known]
        time.sleep(0.0002)  # as the engine's thread waits: one that spins would keep the writer's from its turn
    for lease in waiting:
        driver.pool.release(lease)


def _commit(driver: Driver, lease: Lease) -> Outcome:
    """The end of a turn whose state is not computed: only the store is measured."""
    outcome = Outcome()
    driver.pool.record(lease, TOKENS, outcome)
    driver.pool.checkin(lease, driver.slot())
    return outcome


def states_in(folder: Path, address: str, store: str, asked: argparse.Namespace) -> Figure:
    """Whole states, one a turn."""
    given: dict[str, object] = {"state_db": address} if address else {}
    given |= {"checkpoint_store": store, "checkpoint_store_min_mb": 0.0, "durability": "turn", "l1_sessions": STATES}
    words = max(64, int(asked.state_mb * 1e6) // 4)
    driver = Driver(FakeArena(num_slots=2 * STATES + 8, words=words), config_in(folder, **given))
    names = [f"s{number}" for number in range(STATES)]
    many = sum(_turns(driver, names, 4, asked.seconds)) / asked.seconds
    driver.settle()
    put = statistics.median(_timed(driver, name) for name in names)
    driver.settle()
    driver.pool.close()
    again = Driver(FakeArena(num_slots=2 * STATES + 8, words=words), config_in(folder, **given))
    got = statistics.median(_read(again, name) for name in names)
    again.settle()
    again.pool.close()
    return {
        "place": store.partition("?")[0] or ("postgres" if address else "sqlite"),
        "state_mb": asked.state_mb,
        "states_per_s": round(many, 1),
        "put_ms": round(1e3 * put, 3),
        "get_ms": round(1e3 * got, 3),
    }


def _timed(driver: Driver, name: str) -> float:
    lease = driver.ready(driver.pool.checkout(name))
    begun = time.perf_counter()
    outcome = _commit(driver, lease)
    driver.until(lambda: outcome.known)
    return time.perf_counter() - begun


def _read(driver: Driver, name: str) -> float:
    begun = time.perf_counter()
    lease = driver.ready(driver.pool.checkout(name))
    took = time.perf_counter() - begun
    driver.pool.release(lease)
    return took


if __name__ == "__main__":
    main()
