"""Kills `app.py batch` at random moments, again and again, and holds its output against an undisturbed run's.

    python -m bench.batch_kills [--lines 20000] [--kills 100] [--order keep] [--seed 0]

A service with the tests' fake engine answers; the command runs at `--url`, so that a start takes a second and no model.
Each kill is SIGKILL, between 0 and 2 s after the output has grown, one in ten before it has; the command is the same
each time. Then it runs to its end. Measured: lines lost, doubled or different against what the engine must have said,
kills that met a run at work. What bounds the time: the starts, and the fake engine's steps.
The last line is JSON; the exit code is 1 if any line is wrong.
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
from pathlib import Path
from typing import Any

from test.bulk.runs import fake_service, read_jsonl, started, write_jsonl
from test.serving import Service


def kill_one(service: Service, source: Path, target: Path, order: str, dice: random.Random) -> bool:
    """Start the command and kill it; whether it was still at work."""
    length = target.stat().st_size if target.exists() else 0
    process = started(service, source, target, "--order", order)
    patience = time.monotonic() + (0.5 if dice.random() < 0.1 else 120.0)
    while process.poll() is None and time.monotonic() < patience:
        if target.exists() and target.stat().st_size != length:
            break
        time.sleep(0.005)
    time.sleep(dice.random() ** 3 * 2.0)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return process.returncode == -signal.SIGKILL


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All of it."""
    dice = random.Random(options.seed)
    lines = [{"id": i, "text": f"n{i}" + " word" * (i % 11)} for i in range(options.lines)]
    wanted = {line["id"]: {**line, "completion": line["text"] * 3} for line in lines}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, target = write_jsonl(folder / "in.jsonl", lines), folder / "out.jsonl"
        service = fake_service(folder)
        try:
            at_work = 0
            for number in range(options.kills):
                at_work += kill_one(service, source, target, options.order, dice)
                print(
                    json.dumps({"kill": number + 1, "bytes": target.stat().st_size if target.exists() else 0}),
                    flush=True,
                )
            process = started(service, source, target, "--order", options.order)
            process.communicate()
        finally:
            service.close()
        found = read_jsonl(target)
    ids = [line["id"] for line in found]
    return {
        "bench": "batch_kills",
        "lines": options.lines,
        "kills": options.kills,
        "kills_at_work": at_work,
        "exit_code": process.returncode,
        "lost": len(set(wanted) - set(ids)),
        "doubled": len(ids) - len(set(ids)),
        "different": sum(wanted.get(line["id"]) != line for line in found),
        "out_of_order": options.order == "keep" and ids != sorted(ids),
        "load": round(os.getloadavg()[0], 2),
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--order", choices=("keep", "done"), default="keep")
    parser.add_argument("--seed", type=int, default=0)
    found = run(parser.parse_args())
    print(json.dumps(found))
    return int(bool(found["lost"] or found["doubled"] or found["different"] or found["out_of_order"]))


if __name__ == "__main__":
    sys.exit(main())
