"""Ended requests leave nothing for the garbage collector.

In the engine's process it runs only once in a hundred thousand objects, so cycles would grow memory with each request.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rwkv_batch.engine import Engine
from sampling.params import SamplingParams
from state_pool.config import PoolConfig
from test.harness import call, eventually_holds, make_request, run, started_engine, submit, turn

TIMES = 64
"""Requests per measurement. A few types of ctypes' arrays are always left over."""
SAMPLED = SamplingParams(temperature=1.0, top_p=0.5, presence_penalty=0.5, logit_bias={5: 1.0})


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    database = tmp_path_factory.mktemp("garbage") / "sessions.db"
    with started_engine(model, PoolConfig(state_db=str(database))) as engine:
        yield engine


def rows(engine: Engine, number: int) -> None:
    stops = [b"\n\n", b"aa%d" % number]
    run(engine, make_request("Once", sampling=SAMPLED, max_tokens=2, stop_strings=stops))


def cancelled(engine: Engine, number: int) -> None:
    running = submit(engine, make_request("Once", max_tokens=500, chunk_size=1))
    assert running.started.wait(60)
    engine.cancel(running.job.job_id)
    running.wait()


def turns(engine: Engine, number: int) -> None:
    run(engine, turn(f"talk {number}", "Once", max_tokens=2))
    run(engine, turn(f"talk {number}", "more", max_tokens=2))
    content = call(engine, "session_export", session_id=f"talk {number}", dialogue=None)
    call(engine, "session_import", session_id=f"brought {number}", content=content)
    for name in ("talk", "brought"):
        assert call(engine, "session_delete", session_id=f"{name} {number}", delete_prefix=False) == 1


@contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("one", [rows, cancelled, turns])
def test_a_request_leaves_no_reference_cycles(engine: Engine, one: Callable[[Engine, int], None]) -> None:
    one(engine, -1)  # one-time objects exist now
    with without_collector():
        for number in range(TIMES):
            one(engine, number)
        assert eventually_holds(engine, lambda: not engine.load.rows)
        left = gc.collect()
    assert left < TIMES
