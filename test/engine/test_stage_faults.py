"""A failing stage of a pipeline: out of memory is a 429, a lost device ends the engine, and a new one serves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rwkv_batch.engine import Engine
from rwkv_batch.errors import ErrorKind
from state_pool.config import PoolConfig
from test.harness import call, free_slots, make_request, run, started_engine, submit, turn

STAGES: dict[str, Any] = {"devices": ("cpu",) * 3, "micro_batches": 3, "overlap_on_cpu": True, "max_running": 12}
PARTS = pytest.mark.parametrize("stage", [0, 1, 2], ids=["first stage", "middle stage", "last stage"])


@pytest.fixture
def engine(model: Path, tmp_path: Path) -> Iterator[Engine]:
    with started_engine(model, PoolConfig(state_db=str(tmp_path / "s.db")), **STAGES) as engine:
        yield engine


class Faulty:
    """A stage's forward that raises `error` while it is set."""

    def __init__(self, engine: Engine, stage: int, patch: pytest.MonkeyPatch) -> None:
        self.error: Exception | None = None
        self._forward = engine.model_runner.pipeline.stages[stage].forward
        self.raised = threading.Event()
        patch.setattr(engine.model_runner.pipeline.stages[stage], "forward", self)

    def __call__(self, *args: Any) -> Any:
        if self.error is not None:
            self.raised.set()
            raise self.error
        return self._forward(*args)


@PARTS
def test_out_of_memory_on_any_stage_is_a_429(engine: Engine, stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Running jobs end in every group. Sessions are unchanged, and later jobs are served."""
    expected = run(engine, turn("s", "hello", max_tokens=8)).texts[0]
    free = free_slots(engine)
    faulty = Faulty(engine, stage, monkeypatch)
    jobs = [submit(engine, make_request(f"row {i}", max_tokens=10**6, ignore_eos=True)) for i in range(9)]
    for job in jobs:
        assert job.started.wait(60)
    faulty.error = torch.OutOfMemoryError("CUDA out of memory (for a test)")
    for job in [*jobs, submit(engine, turn("s", "more", max_tokens=8))]:
        error = job.wait().events[-1].error
        assert error is not None and error.kind is ErrorKind.OVERLOADED and error.retry_after_s
    faulty.error = None
    assert call(engine, "status")["free_slots"] == free and engine.is_alive
    assert run(engine, turn("t", "hello", max_tokens=8)).texts[0] == expected


@PARTS
def test_a_lost_device_ends_the_engine_and_the_next_one_serves(
    model: Path, stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All jobs get an error. Sessions continue in a new engine as if the turn had not run."""
    config = PoolConfig(state_db=str(tmp_path / "s.db"))
    with started_engine(model, config, **STAGES) as engine:
        expected = [run(engine, turn("a", text, max_tokens=8)).texts[0] for text in ("hello", "more")]
        assert run(engine, turn("s", "hello", max_tokens=8)).texts[0] == expected[0]
        faulty = Faulty(engine, stage, monkeypatch)
        monkeypatch.setattr(engine.model_runner, "is_device_lost", lambda: faulty.raised.is_set())
        jobs = [submit(engine, make_request(f"row {i}", max_tokens=10**6, ignore_eos=True)) for i in range(9)]
        for job in jobs:
            assert job.started.wait(60)
        faulty.error = RuntimeError("CUDA error: an illegal memory access was encountered")
        for job in [*jobs, submit(engine, turn("s", "more", max_tokens=8))]:
            running = job.wait()
            error = running.refusal.info if running.refusal is not None else running.events[-1].error
            assert error is not None and error.kind is ErrorKind.ENGINE_LOST
        engine._thread.join(60)
        assert not engine.is_alive
        engine.model_runner.pool.close()  # the process that holds it is replaced
    with started_engine(model, config, **STAGES) as engine:
        assert run(engine, turn("s", "more", max_tokens=8)).texts[0] == expected[1]
