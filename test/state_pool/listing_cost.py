"""Cost of lists, prefix deletes and /status on the engine thread.

The cost is measured by the number of stored sessions. `measure` counts the lines of Python that the engine thread runs
in each call (`lines_of`). This number has no noise. It must not grow with the sessions, because decoding waits for each
line.
"""

from __future__ import annotations

import gc
import sqlite3
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

from bench.tools.pool_bench import HostArena
from state_pool.config import PoolConfig
from state_pool.pool import StatePool

PAGE = 100
PARTS = {"stage0.wkv": ("float16", (64,))}


def lines_of(act: Callable[[], Any]) -> int:
    """Return how many Python lines the calling thread runs in `act`.

    Lines of other threads and of garbage collection are left out.
    """
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    gc.disable()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


def fill(path: Path, sessions: int) -> None:
    """Store sessions "s0000000", "s0000001", ... without a state in a database that a pool has created."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executemany(
            "INSERT INTO sessions(session_id, dialogue, fingerprint, turn, num_tokens, created, updated) "
            "VALUES (?, -1, 'bench', 1, 1, ?, ?)",
            ((f"s{number:07d}", 1e9 + number, 1e9 + number) for number in range(sessions)),
        )


def open_pool(folder: Path, sessions: int) -> StatePool:
    """Open a pool over a new database with this number of sessions."""
    config = PoolConfig(state_db=str(folder / f"{sessions}.db"), session_ttl=0)
    StatePool(HostArena(8, layout=dict(PARTS)), config).close()
    fill(Path(config.state_db), sessions)
    return StatePool(HostArena(8, layout=dict(PARTS)), config)


def measure_call(pool: StatePool, act: Callable[[Callable[[Any], None]], None]) -> dict[str, float]:
    """Return the engine thread's lines and milliseconds for a call.

    Those of the call's callback are included. `act` gets the callback.
    """
    results: list[Any] = []
    started = time.perf_counter()
    lines = lines_of(lambda: act(results.append))
    busy = time.perf_counter() - started
    while not (results or pool._deliver.waiting):
        time.sleep(0.0005)
    answered = time.perf_counter()
    lines += lines_of(pool._deliver.run)
    ended = time.perf_counter()
    if results and isinstance(results[0], Exception):
        raise results[0]
    return {
        "engine_lines": lines,
        "engine_ms": round(1e3 * (busy + ended - answered), 3),
        "whole_ms": round(1e3 * (ended - started), 3),
    }


def measure(folder: Path, sessions: int) -> dict[str, Any]:
    pool = open_pool(folder, sessions)
    deep = max(0, sessions - PAGE)
    found = {
        "measure": "listing",
        "sessions": sessions,
        "stats": measure_call(pool, lambda tell: tell(pool.stats())),
        "list": measure_call(pool, lambda tell: pool.listing.request(tell, PAGE, 0)),
        "list deep": measure_call(pool, lambda tell: pool.listing.request(tell, PAGE, deep)),
        "delete": measure_call(pool, lambda tell: void(pool.turns.delete("s000000", True, tell))),
    }
    pool.close()
    return found


def void(value: object) -> None: ...


def growth(few: dict[str, Any], many: dict[str, Any]) -> dict[str, float]:
    """Return the factor by which each call's lines grow. It compares many sessions with few."""
    calls = [name for name, part in few.items() if isinstance(part, dict)]
    return {name: round(many[name]["engine_lines"] / few[name]["engine_lines"], 3) for name in calls}
