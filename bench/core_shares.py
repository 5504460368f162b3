"""Which part of a core a thread of low priority gets beside threads of usual priority in other processes.

`--threads` processes of one session compute, each on a core of its own; one more, of a niceness of ten, on the last of
those cores. Told: CPU seconds of that one, and of the usual one on the same core, over `--seconds`, where the low one
is in a session of its own and where it is in the same. Linux compares niceness within a session only, where
/proc/sys/kernel/sched_autogroup_enabled is 1 and the processes are in no CPU group of their own (/proc/self/cgroup).
Bounds: what else runs on that core takes its part of both.

    python -m bench.core_shares --threads 2
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.origin import origin
from native.priority import NICENESS

AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")


def compute(core: int, niceness: int, leads: bool, seconds: float, parent: Connection) -> None:
    """Main function of a process: computes from when it is told to, then says for how long it had the core."""
    if leads:
        os.setsid()
    os.sched_setaffinity(0, {core})
    os.nice(niceness)
    parent.send("ready")
    until = parent.recv() + seconds
    before = time.process_time()
    while time.monotonic() < until:
        pass
    parent.send(time.process_time() - before)


def shares(threads: int, seconds: float, is_apart: bool) -> dict[str, float]:
    """CPU seconds of the low process and of the usual one on its core."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    wanted = [(core, 0, False) for core in cores] + [(cores[-1], NICENESS, is_apart)]
    spawn = multiprocessing.get_context("spawn")
    pipes = []
    for core, niceness, leads in wanted:
        ours, theirs = spawn.Pipe()
        spawn.Process(target=compute, args=(core, niceness, leads, seconds, theirs), daemon=True).start()
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()
    for pipe in pipes:
        pipe.send(time.monotonic())
    told: list[float] = [pipe.recv() for pipe in pipes]
    return {"low": round(told[-1], 3), "usual": round(told[-2], 3)}


def main() -> None:
    """Measure and print; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--commit", default="", help="of the code, where git is not at hand")
    args = parser.parse_args()
    about: dict[str, Any] = {
        "threads": args.threads,
        "autogroup": AUTOGROUP.read_text().strip() if AUTOGROUP.exists() else "",
        "cpu_group": [
            line for line in Path("/proc/self/cgroup").read_text().splitlines() if "cpu:" in line or "::" in line
        ],
    }
    found = {name: shares(args.threads, args.seconds, is_apart) for name, is_apart in (("apart", True), ("one", False))}
    print(json.dumps({"bench": "core_shares", **origin(args.commit), **about, "sessions": found}))


if __name__ == "__main__":
    main()
