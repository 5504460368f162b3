"""The state pool: cost of durability, and time to restore a session from each tier.

    python -m bench.state_pool [--out FILE] [--folder DIR] [--synchronous NORMAL|FULL]

Uses the pool alone, over slots in host memory, with states of 17.3 MB (7.2B, fp16 WKV state). DIR selects the disk.
- turns: durable turns/s, and milliseconds from `record` to `on_durable` (p50, p99), with `log`, `turn` and `lazy`, for
  one session and for 64 at once (group commit). A turn has 300 token ids. For comparison, SQLite alone: one blob per
  commit in an otherwise empty database.
- resume: milliseconds from `checkout` to READY, and the bytes moved, with the state in L1, L2 and L3 and from a log of
  2,048 tokens. The log time covers reading only; the prefill of 2,048 tokens is extra.

Prints one JSON line per measurement; the last line has all of them.
"""

from __future__ import annotations

import json
import os
import platform
import sqlite3
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.tools.pool_bench import TURN_TOKENS, Bench, HostArena
from bench.tools.record import Arguments, finish
from state_pool.layout import ZERO_SLOT
from state_pool.pool import StatePool
from state_pool.session_key import Tier

GROUP = 64
SECONDS = 6.0
TIERS = {None: "new", Tier.SLOT: "L1 (VRAM)", Tier.HOST: "L2 (RAM)", Tier.DISK: "Database (Disk)"}
"""Names in the results."""


def measure_turns(folder: Path, durability: str, sessions: int, synchronous: str) -> dict[str, Any]:
    """Measure durable turns per second and the latency of a turn."""
    bench = Bench(
        folder, slots=2 * sessions + 8, l1_sessions=sessions, durability=durability, synchronous=synchronous,
        checkpoint_tokens=1 << 30, checkpoint_idle_s=1e9,
    )  # fmt: skip
    names = [f"s{i}" for i in range(sessions)]
    tokens = [(7919 * i) % 65536 for i in range(TURN_TOKENS)]
    bench.turns(names, tokens)
    waits: list[float] = []
    started = time.perf_counter()
    while time.perf_counter() - started < SECONDS:
        waits += bench.turns(names, tokens)
    elapsed = time.perf_counter() - started
    bench.close_unsaved()
    return {
        "measure": "turns",
        "durability": durability,
        "sessions": sessions,
        "turns_per_s": round(len(waits) / elapsed, 1),
        "p50_ms": round(1e3 * statistics.median(waits), 3),
        "p99_ms": round(1e3 * float(np.quantile(waits, 0.99)), 3),
    }


def measure_disk(folder: Path, num_bytes: int, synchronous: str) -> dict[str, Any]:
    """Measure SQLite alone: one blob of a state's size per commit, replacing the previous one."""
    connection = sqlite3.connect(folder / "alone.db", isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute(f"PRAGMA synchronous={synchronous}")
    connection.execute("CREATE TABLE blobs(id INTEGER PRIMARY KEY, data BLOB)")
    blob = os.urandom(num_bytes)
    count, started = 0, time.perf_counter()
    while time.perf_counter() - started < SECONDS:
        connection.execute("INSERT OR REPLACE INTO blobs VALUES (1, ?)", (blob,))
        count += 1
    elapsed = time.perf_counter() - started
    connection.close()
    return {"measure": "sqlite alone", "bytes": num_bytes, "commits_per_s": round(count / elapsed, 1)}


def measure_resume(folder: Path, synchronous: str) -> list[dict[str, Any]]:
    """Measure checkout to READY from each tier, and from the log alone."""
    sizes = {
        "l1_sessions": 4,
        "l2_sessions": 4,
        "synchronous": synchronous,
        "checkpoint_idle_s": 1e9,
        "checkpoint_tokens": 4096,
    }
    bench = Bench(folder, slots=12, **sizes)
    for i in range(24):
        bench.turns([f"s{i}"], [1, 2, 3])
        bench.settle()
    found: dict[str, list[float]] = {}
    moved: dict[str, int] = {}
    for _ in range(4):
        for name in [entry.session_id for entry in bench.list_sessions().sessions]:
            before = counters(bench.pool)
            started = time.perf_counter()
            lease = bench.ready(bench.pool.turns.checkout(name))
            tier = TIERS[lease.tier]
            found.setdefault(tier, []).append(time.perf_counter() - started)
            moved[tier] = counters(bench.pool) - before
            bench.pool.turns.release(lease)
            bench.settle()
    bench.pool.close()
    found |= {"log": resume_from_log(folder, sizes)}
    return [
        {
            "measure": "resume",
            "from": tier,
            "count": len(times),
            "p50_ms": round(1e3 * statistics.median(times), 3),
            "max_ms": round(1e3 * max(times), 3),
            "bytes_moved": moved.get(tier, 0),
        }
        for tier, times in found.items()
    ]


def resume_from_log(folder: Path, sizes: dict[str, Any]) -> list[float]:
    """Measure resuming after a crash: no checkpoint, 2,048 tokens in the log."""
    bench = Bench(folder, slots=12, **sizes)
    for i in range(8):
        bench.turns([f"log{i}"], list(range(2048)))
    bench.close_unsaved()
    bench = Bench(folder, slots=12, **sizes)
    times: list[float] = []
    for i in range(8):
        started = time.perf_counter()
        lease = bench.ready(bench.pool.turns.checkout(f"log{i}"))
        times.append(time.perf_counter() - started)
        if lease.read_slot != ZERO_SLOT or len(lease.replay) != 2048:
            raise RuntimeError("the session did not come from the log")
        bench.pool.turns.release(lease)
    bench.pool.close()
    return times


def counters(pool: StatePool) -> int:
    """Return the bytes moved to slots so far."""
    found = pool.stats()["counters"]
    return int(found["bytes_to_device"] + found["bytes_from_disk"])


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--folder", type=Path, help="folder for the databases; default: a temporary one")
    parser.add_argument("--synchronous", default="NORMAL", choices=["NORMAL", "FULL"])
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []

    def note(result: dict[str, Any]) -> None:
        results.append(result)
        print(json.dumps(result), flush=True)

    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        sync = arguments.synchronous
        note({"measure": "machine", "cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(),
              "sqlite": sqlite3.sqlite_version, "synchronous": sync})  # fmt: skip
        note(measure_disk(folder, HostArena(1).state_bytes, sync))
        for durability, sessions in (
            ("turn", 1),
            ("turn", 8),
            ("log", 1),
            ("log", GROUP),
            ("lazy", 1),
            ("lazy", GROUP),
        ):
            here = folder / f"{durability}-{sessions}"
            here.mkdir()
            note(measure_turns(here, durability, sessions, sync))
        (folder / "resume").mkdir()
        for result in measure_resume(folder / "resume", sync):
            note(result)
    finish({"measure": "state_pool", "all": results}, arguments.out)


if __name__ == "__main__":
    main()
