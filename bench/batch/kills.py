"""Kills `app.py batch` at random moments, again and again, and holds its output against an undisturbed run's.

    python -m bench.batch.kills [--lines 20000] [--kills 100] [--runs 1] [--seed 0]

A service with the tests' fake engine answers; the command runs at `--url`, so that a start takes a second and no
model. Each kill is SIGKILL: mostly within 0.15 s after the output has grown, one in ten after up to 2 s, one in ten
before it has grown; the command is the same each time. Then it runs to its end. Of `--runs` runs side by side, each
with a service, files and a seed of its own, every other one has `--order done`. Measured: lines lost, doubled or
different against a run that nobody disturbed, and against what the engine must have said; kills that met a run at work.
What bounds the time: the starts, and the fake engine's steps. The last line is JSON; the exit code is 1 if any line is
wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.tools.origin import origin
from test.bulk.runs import fake_service, read_jsonl, started, write_jsonl
from test.serving import Service

PATIENCE_S = 120.0


def kill_one(service: Service, source: Path, target: Path, order: str, dice: random.Random) -> bool:
    """Start the command and kill it; whether it was still at work."""
    length = target.stat().st_size if target.exists() else 0
    chance = dice.random()
    process = started(service, source, target, "--order", order)
    deadline = time.monotonic() + (dice.random() if chance < 0.1 else PATIENCE_S)
    while process.poll() is None and time.monotonic() < deadline:
        if target.exists() and target.stat().st_size != length:
            time.sleep(dice.random() * (2.0 if chance > 0.9 else 0.15))
            break
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return process.returncode == -signal.SIGKILL


def undisturbed(service: Service, source: Path, target: Path, order: str) -> int:
    """Run the command to its end; returns its exit code."""
    process = started(service, source, target, "--order", order)
    process.communicate()
    return int(process.returncode)


def run(options: argparse.Namespace, number: int) -> dict[str, Any]:
    """One run with all its kills."""
    seed, order = options.seed + number, ("keep", "done")[number % 2]
    dice = random.Random(seed)
    lines = [{"id": i, "text": f"n{i}" + " word" * (i % 11)} for i in range(options.lines)]
    wanted = {line["id"]: {**line, "completion": line["text"] * 3} for line in lines}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, target = write_jsonl(folder / "in.jsonl", lines), folder / "out.jsonl"
        service = fake_service(folder)
        try:
            at_work = 0
            for kill in range(options.kills):
                at_work += kill_one(service, source, target, order, dice)
                size = target.stat().st_size if target.exists() else 0
                print(json.dumps({"seed": seed, "kill": kill + 1, "bytes": size}), flush=True)
            code = undisturbed(service, source, target, order)
            whole = folder / "whole.jsonl"
            undisturbed(service, source, whole, order)
        finally:
            service.close()
        found = read_jsonl(target)
        is_equal = sorted(target.read_bytes().splitlines()) == sorted(whole.read_bytes().splitlines())
    ids = [line["id"] for line in found]
    return {
        "seed": seed,
        "order": order,
        "kills_at_work": at_work,
        "exit_code": code,
        "lost": len(set(wanted) - set(ids)),
        "doubled": len(ids) - len(set(ids)),
        "different": sum(wanted.get(line["id"]) != line for line in found),
        "out_of_order": order == "keep" and ids != sorted(ids),
        "as_undisturbed": is_equal,
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", default="", help="of the code, where git does not tell it")
    options = parser.parse_args()
    with ThreadPoolExecutor(options.runs) as pool:
        runs = list(pool.map(lambda number: run(options, number), range(options.runs)))
    is_whole = all(
        one["as_undisturbed"] and not (one["lost"] or one["doubled"] or one["different"] or one["out_of_order"])
        for one in runs
    )
    about = {"lines": options.lines, "kills": options.kills, "load": round(os.getloadavg()[0], 2)}
    print(json.dumps({"bench": "batch_kills", **origin(options.commit), **about, "runs": runs, "is_whole": is_whole}))
    return int(not is_whole)


if __name__ == "__main__":
    sys.exit(main())
