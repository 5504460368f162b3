"""What work that stands back leaves to other processes on one core: shares of it, and how soon who wakes there has it.

Who stands back does so by a niceness of ten ("low") or by SCHED_IDLE ("idle"), in a session of its own or in the same
as the others. Told for each of these four:

* `cpu_s`: `--threads` processes compute, each on a core of its own, and who stands back on the last of those: CPU
  seconds of it and of the usual one there, over `--seconds`;
* `late_ms`: nobody else computes, and a process sleeps and wakes there `--wakes` times, as threads of HTTP workers do
  (SCHED_BATCH) and as usual ones do: how late it runs, at the median and the 90th of a hundred.

Linux compares priorities within a session only, where /proc/sys/kernel/sched_autogroup_enabled is 1 and the processes
are in no CPU group of their own (/proc/self/cgroup). Bounds: what else runs on that core takes its part of everything.

    python -m bench.engine.core_shares --threads 2
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.tools.origin import origin
from bench.tools.service import percentile
from native.priority import stand_back

AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")
NAP_S = 0.004
SPAWN = multiprocessing.get_context("spawn")


def compute(core: int, stands_back: str, is_apart: bool, pipe: Connection) -> None:
    """Main function of a process: computes for as long as it is told to, then says for how long it had the core."""
    if is_apart:
        os.setsid()
    os.sched_setaffinity(0, {core})
    if stands_back:
        stand_back(only_idle_cores=stands_back == "idle")
    pipe.send("ready")
    until = pipe.recv()
    before = time.process_time()
    while time.monotonic() < until:
        pass
    pipe.send(time.process_time() - before)


def wake(core: int, policy: int, count: int, pipe: Connection) -> None:
    """Main function of a process: sleeps and wakes so often, then says how late it was each time (s)."""
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, policy, os.sched_param(0))
    pipe.send("ready")
    pipe.recv()
    late = []
    for _ in range(count):
        due = time.monotonic() + NAP_S
        time.sleep(NAP_S)
        late.append(time.monotonic() - due)
    pipe.send(late)


@contextmanager
def ready(target: Any, *arguments: Any) -> Iterator[Connection]:
    """The pipe of a process that has begun; it is ended on exit."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=target, args=(*arguments, theirs), daemon=True)
    process.start()
    ours.recv()
    try:
        yield ours
    finally:
        process.kill()
        process.join()


def shares(cores: list[int], seconds: float, stands_back: str, is_apart: bool) -> dict[str, float]:
    """CPU seconds of who stands back and of the usual one on the last of these cores."""
    with ExitStack() as stack:
        pipes = [stack.enter_context(ready(compute, core, "", False)) for core in cores]
        pipes.append(stack.enter_context(ready(compute, cores[-1], stands_back, is_apart)))
        for pipe in pipes:
            pipe.send(time.monotonic() + seconds)
        told = [pipe.recv() for pipe in pipes]
    return {"stands_back": round(told[-1], 3), "usual": round(told[-2], 3)}


def lateness(core: int, policy: int, count: int, stands_back: str, is_apart: bool) -> dict[str, float | None]:
    """How late (ms) who wakes on this core runs, beside one that stands back."""
    with ready(wake, core, policy, count) as waker, ready(compute, core, stands_back, is_apart) as behind:
        behind.send(time.monotonic() + 60)
        waker.send("begin")
        late = waker.recv()
    return {"p50": percentile(late, 0.5), "p90": percentile(late, 0.9)}


def main() -> None:
    """Measure and print; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--wakes", type=int, default=50)
    parser.add_argument("--commit", default="", help="of the code, where git is not at hand")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[: args.threads]
    found: dict[str, Any] = {}
    for stands_back, (session, is_apart) in product(("low", "idle"), (("apart", True), ("one", False))):
        found[f"{stands_back}, {session}"] = {
            "cpu_s": shares(cores, args.seconds, stands_back, is_apart),
            "late_ms": {
                name: lateness(cores[-1], policy, args.wakes, stands_back, is_apart)
                for name, policy in (("batch", os.SCHED_BATCH), ("usual", os.SCHED_OTHER))
            },
        }
    groups = [line for line in Path("/proc/self/cgroup").read_text().splitlines() if "cpu:" in line or "::" in line]
    autogroup = AUTOGROUP.read_text().strip() if AUTOGROUP.exists() else ""
    about = {"threads": len(cores), "autogroup": autogroup, "cpu_groups": groups}
    print(json.dumps({"bench": "core_shares", **origin(args.commit), **about, "stands_back, session": found}))


if __name__ == "__main__":
    main()
