"""Many more sessions than memory holds: turns per second with 1, 10 and 100 times as many as L1 and L2 take.

    python -m bench.state_pool.crowd [--times 1 10 100] [--seconds 60] [--running 16] [--folder DIR] [--out FILE]

The pool itself over slots in host memory, with states of 17.3 MB (7.2B, fp16 WKV), 16 sessions in slots, 32 in host
memory and `--durability log`. `--running` rows run at once, each a turn of 300 token ids of a session drawn at random;
a row's own computing takes no time, so the figure is what the pool and the disk allow. Beside it: states that the
writer stored per second (the disk's own limit: `sqlite alone` of `bench.state_pool`), turns' wait from checkout to
READY and from record to durable, sessions that left memory for their log, and tokens to be read again per turn
(mean, most). Reading again is the model's time: tokens / prefill speed.

Then memory: bytes of RAM for each session that is only on disk (tracemalloc over an index of 100,000), and the time
that a page of 100 sessions behind 90,000 others costs the engine's thread.

DIR decides which disk; it needs up to 20 GB with `--times 100`. Prints one JSON line per measurement; the last line is
JSON with all of them.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
import tracemalloc
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.state_pool.driver import TURN_TOKENS, Bench
from bench.tools.origin import origin
from state_pool.sessions import Lease, LeaseState, Session, SessionIndex, SessionKey

L1, L2 = 16, 32
INDEXED = 100_000


@dataclass
class Crowd:
    """Rows that run at once, each with a turn of its own session."""

    bench: Bench
    names: list[str]
    draw: random.Random = field(default_factory=lambda: random.Random(7))
    waiting: list[tuple[Lease, float]] = field(default_factory=list)
    storing: set[str] = field(default_factory=set)
    ready_s: list[float] = field(default_factory=list)
    durable_s: list[float] = field(default_factory=list)
    replays: list[int] = field(default_factory=list)

    def begin(self) -> None:
        """A turn of a session that has none under way."""
        busy = self.storing | {lease.session.key.session_id for lease, _ in self.waiting}
        name = self.draw.choice(self.names)
        while name in busy:
            name = self.draw.choice(self.names)
        self.waiting.append((self.bench.pool.checkout(name), time.perf_counter()))

    def step(self, tokens: list[int]) -> None:
        """As an engine's step: what is ready runs and ends, if there is a slot for it."""
        self.bench.pool.poll()
        for entry in list(self.waiting):
            lease, since = entry
            if lease.error is not None:
                raise lease.error
            slot = self.bench.pool.allocate() if lease.poll() is LeaseState.READY else None
            if slot is not None:
                self.waiting.remove(entry)
                self.ready_s.append(time.perf_counter() - since)
                self.replays.append(len(lease.replay))
                self._end(lease, slot, tokens)

    def _end(self, lease: Lease, slot: int, tokens: list[int]) -> None:
        name, started = lease.session.key.session_id, time.perf_counter()
        self.storing.add(name)

        def durable(error: Exception | None) -> None:
            if error is not None:
                raise error
            self.storing.discard(name)
            self.durable_s.append(time.perf_counter() - started)

        self.bench.pool.record(lease, tokens, durable)
        self.bench.pool.checkin(lease, slot)


def measure_crowd(folder: Path, times: int, running: int, seconds: float) -> dict[str, Any]:
    """Durable turns per second over so many times more sessions than memory holds."""
    bench = Bench(folder, slots=L1 + 2 * running + 8, l1_sessions=L1, l2_sessions=L2, checkpoint_idle_s=1e9)
    crowd = Crowd(bench, [f"s{i}" for i in range(times * (L1 + L2))])
    tokens = [(7919 * i) % 65536 for i in range(TURN_TOKENS)]
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        while len(crowd.waiting) + len(crowd.storing) < running:
            crowd.begin()
        crowd.step(tokens)
    elapsed = time.perf_counter() - started
    stats = bench.pool.stats()
    bench.pool._flush = lambda store: None  # type: ignore[method-assign]
    bench.pool.close()
    milliseconds = {"ready": crowd.ready_s, "durable": crowd.durable_s}
    return {
        "measure": "crowd",
        "sessions": len(crowd.names),
        "times_memory": times,
        "turns_per_s": round(len(crowd.durable_s) / elapsed, 1),
        "states_stored_per_s": round(stats["database"]["states"] / elapsed, 2),
        "left_to_log": stats["counters"]["left_to_log"],
        "loads": stats["counters"]["loads"],
        "replayed_tokens_mean": round(float(np.mean(crowd.replays)), 1),
        "replayed_tokens_most": max(crowd.replays),
        **{f"{name}_p50_ms": round(1e3 * float(np.quantile(s, 0.5)), 2) for name, s in milliseconds.items()},
        **{f"{name}_p99_ms": round(1e3 * float(np.quantile(s, 0.99)), 2) for name, s in milliseconds.items()},
    }


def measure_memory() -> dict[str, Any]:
    """Bytes of RAM per session on disk, and what finding one costs."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    index = SessionIndex()
    for row in range(INDEXED):
        session = Session(SessionKey(f"session-{row:030d}"), row, 1e9 + row, 1e9 + row)
        session.turn, session.num_tokens = 1000 + row, 5000 + row
        session.disk_turn, session.disk_tokens = session.turn, session.num_tokens
        index.add(session)
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    keys = [SessionKey(f"session-{row:030d}") for row in range(10_000)]
    started = time.perf_counter()
    found = sum(index.get(key) is not None for key in keys)
    elapsed = time.perf_counter() - started
    return {
        "measure": "memory",
        "sessions": INDEXED,
        "bytes_per_session": round(used / INDEXED),
        "look_up_us": round(1e6 * elapsed / found, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--running", type=int, default=16)
    parser.add_argument("--folder", type=Path, help="where the databases go; default: a temporary folder")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="", help="to be written down where git is not at hand")
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    for times in arguments.times:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
            results.append(measure_crowd(Path(name), times, arguments.running, arguments.seconds))
            print(json.dumps(results[-1]), flush=True)
    results.append(measure_memory())
    print(json.dumps(results[-1]), flush=True)
    shape = {"seconds": arguments.seconds, "running": arguments.running}
    last = {"measure": "state_pool_crowd", **origin(arguments.commit), **shape, "all": results}
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(last, indent=1) + "\n")
    print(json.dumps(last))


if __name__ == "__main__":
    main()
