"""What a running stream notices of the pool's work: the p99 between its tokens, with and without sessions."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

LAYERS, WIDTH = 6, 512
STREAM_TOKENS = 500
CLIENTS = 4
ROUNDS = 7
SESSIONS = 24
"""Sessions that take turns."""


class Load:
    """Four clients, each a short turn after the other, on sessions or without."""

    def __init__(self, engine: Any, prompt: list[int], sessions: bool) -> None:
        self.turns = 0
        self._engine = engine
        self._prompt = prompt
        self._sessions = sessions
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(CLIENTS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _run(self, client: int) -> None:
        for number in itertools.count():
            if self._stopping.is_set():
                return
            name = f"s{(client + CLIENTS * number) % SESSIONS}" if self._sessions else None
            run_row(self._engine, self._prompt, 4, name)
            self.turns += 1


def run_row(engine: Any, prompt: list[int], max_tokens: int, session: str | None) -> list[float]:
    """One row to its end; returns when each token came."""
    from rwkv_batch.request import GenerateRequest, Job, JobEvents, SessionTurn
    from sampling.params import SamplingParams

    done = threading.Event()
    times: list[float] = []

    def sink(events: JobEvents) -> None:
        times.extend(time.perf_counter() for delta in events.deltas if delta.num_tokens)
        if events.done:
            done.set()

    turn = None if session is None else SessionTurn(session_id=session, resume_prompt=prompt)
    row = GenerateRequest(
        prompt=prompt,
        max_tokens=max_tokens,
        sampling=SamplingParams(temperature=1.0, seed=1),
        ignore_eos=True,
        chunk_size=1,
        session=turn,
        use_prefix_cache=False,
    )
    refusals: list[Any] = []

    def admitted(refusal: Any) -> None:
        if refusal is not None:
            refusals.append(refusal)
            done.set()

    engine.submit(Job(job_id=f"{time.perf_counter_ns()}-{session}", rows=[row]), sink, admitted)
    done.wait()
    if refusals:
        raise refusals[0]
    return times


def measure_stream(folder: Path) -> list[dict[str, Any]]:
    """p99 between tokens under the same load with sessions and without, in alternating rounds.

    Once with every session parked in a slot (what the default sizes do for so many), once with places for a third
    of them, so that nearly every turn moves a state; the log is committed in both.
    """
    from demo.random_weights import write_random_model

    model = write_random_model(folder / "model.pth", LAYERS, WIDTH)
    return [
        {"measure": "stream", "sessions": "parked", **alternate(folder, model, {"l1_sessions": SESSIONS})},
        {"measure": "stream", "sessions": "moving", **alternate(folder, model, {"l1_sessions": 4, "l2_sessions": 4})},
    ]


def alternate(folder: Path, model: Path, sizes: dict[str, int]) -> dict[str, Any]:
    """Rounds with sessions and without on one engine."""
    from rwkv_batch.config import EngineConfig
    from rwkv_batch.engine import Engine
    from state_pool.config import PoolConfig

    p99: dict[bool, list[float]] = {True: [], False: []}
    turns = {True: 0, False: 0}
    prompt = list(range(100, 116))
    with tempfile.TemporaryDirectory(dir=folder) as place:
        pool = PoolConfig(state_db=str(Path(place) / "s.db"), **sizes)
        engine = Engine(EngineConfig(model_path=str(model), max_running=16, pool=pool))
        engine.start()
        for number in range(2 * ROUNDS):
            sessions = number % 2 == 0
            with Load(engine, prompt, sessions) as load:
                times = run_row(engine, prompt, STREAM_TOKENS, None)
            turns[sessions] += load.turns
            p99[sessions].append(float(np.quantile(np.diff(times), 0.99)))
        counters = engine.machine.pool.stats()["counters"]
        state_bytes = engine.machine.pipeline.slot_bytes
        engine.stop()
    with_sessions, without = (statistics.median(p99[kind]) for kind in (True, False))
    ratios = [round(a / b, 3) for a, b in zip(p99[True], p99[False], strict=True)]
    return {
        "p99_ms_with_sessions": round(1e3 * with_sessions, 2),
        "p99_ms_without": round(1e3 * without, 2),
        "p99_ratio": statistics.median(ratios),
        "p99_ratio_by_round": ratios,
        "turns": [turns[True], turns[False]],
        "state_bytes": state_bytes,
        "moved": counters,
    }
