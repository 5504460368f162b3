"""A model that loads while others serve: its use of the cores."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from multiprocessing import Pipe
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from native.priority import NICENESS
from rwkv_batch import load_progress
from rwkv_batch.config import EngineConfig
from rwkv_batch.errors import StartupError
from rwkv_batch.ipc import server
from rwkv_batch.ipc.process import LogConfig
from rwkv_batch.runner.low_priority import CORES_PER_THREAD, run_at_low_priority
from rwkv_batch.runner.pipeline import Pipeline
from rwkv_batch.runner.step_sampling import StepSampler
from test.harness import make_request, run, started_engine


@pytest.mark.parametrize(("threads", "few"), [(1, 1), (CORES_PER_THREAD * 2, 2)])
def test_low_priority_work_uses_few_threads_of_its_own(threads: int, few: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert run_at_low_priority(torch.get_num_threads) == few and torch.get_num_threads() == threads
        with pytest.raises(ZeroDivisionError):
            run_at_low_priority(lambda: 1 // 0)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_no_compute_thread_is_started_before_it_is_needed() -> None:
    """Torch's own pool is not used (`set_compute_threads`). Runs in a process of its own, which has none yet."""
    counted = (
        "import os, torch; from rwkv_batch.runner.low_priority import set_compute_threads as use\n"
        "before = os.listdir('/proc/self/task'); use(5)\n"
        "print(os.listdir('/proc/self/task') == before, torch.get_num_threads())"
    )
    seen = subprocess.run([sys.executable, "-c", counted], check=True, capture_output=True, text=True)
    assert seen.stdout.split() == ["True", "5"]


def priority() -> tuple[int, int]:
    """Return policy and niceness of the calling thread."""
    return os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.parametrize(("loads_at_low_priority", "only_idle"), [(True, True), (True, False), (False, False)])
def test_loading_runs_at_low_priority(
    loads_at_low_priority: bool, only_idle: bool, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serving then uses threads of normal priority."""
    monkeypatch.setattr(os, "SCHED_IDLE", os.SCHED_BATCH)  # truly idle, it would wait for the other tests
    seen: dict[str, tuple[int, int]] = {}

    def noting(owner: type, name: str) -> None:
        plain = getattr(owner, name)

        def noted(*arguments: object, **named: object) -> object:
            seen.setdefault(name, priority())
            return plain(*arguments, **named)

        monkeypatch.setattr(owner, name, noted)

    for owner, name in ((Pipeline, "__init__"), (Pipeline, "allocate_slots"), (StepSampler, "sampler")):
        noting(owner, name)
    noting(Pipeline, "forward")
    usual = priority()
    threads = torch.get_num_threads()
    fields: dict[str, Any] = {"loads_at_low_priority": loads_at_low_priority, "only_idle_cores": only_idle}
    with started_engine(model, max_running=2, **fields) as engine:
        assert (
            run(engine, make_request("abc", max_tokens=2, ignore_eos=True)).all_texts
            and torch.get_num_threads() == threads
        )
    back = (os.SCHED_OTHER, min(19, usual[1] + NICENESS)) if loads_at_low_priority else usual
    back = (os.SCHED_IDLE, usual[1]) if only_idle else back
    assert seen == {"__init__": back, "allocate_slots": back, "sampler": back, "forward": usual}


def test_a_model_on_the_cpu_looks_for_no_gpu(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The query would wake the driver in each new engine. This would then keep a core busy."""
    for name in ("is_available", "device_count", "init"):
        monkeypatch.setattr(torch.cuda, name, Mock(side_effect=AssertionError(f"torch.cuda.{name} was asked")))
    with started_engine(model, max_running=2, loads_at_low_priority=True) as engine:
        assert run(engine, make_request("abc", max_tokens=2, ignore_eos=True)).all_texts


@pytest.mark.parametrize("is_there", [True, False])
def test_a_failed_start_is_reported_to_the_supervisor_or_logged(
    is_there: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(load_progress, "listeners", [])  # later loads would fill the pipe, and wait
    monkeypatch.setattr(server, "become_child", Mock())
    monkeypatch.setattr(server, "started_engine", Mock(side_effect=StartupError("no such file: model.pth")))
    ours, theirs = Pipe()
    if not is_there:
        ours.close()
    with pytest.raises(SystemExit, match="1"):
        server.run_engine(EngineConfig(model_path=""), "", "", LogConfig(), "engine-2", theirs)
    if is_there:
        assert ours.recv() == ("failed", "no such file: model.pth") and not caplog.records
    else:
        assert "the supervisor is gone" in caplog.text and "no such file: model.pth" in caplog.text


@pytest.mark.parametrize("loads_at_low_priority", [True, False])
def test_an_engine_frees_memory_at_low_priority_after_storing(
    loads_at_low_priority: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_progress, "listeners", [])
    seen: list[str] = []
    for name in ("become_child", "started_engine", "EngineServer"):
        monkeypatch.setattr(server, name, Mock())
    monkeypatch.setattr(server, "_follow_supervisor", lambda *arguments: seen.append("drained"))
    monkeypatch.setattr(server, "lower_process_priority", lambda only_idle: seen.append(f"stands back {only_idle}"))
    config = EngineConfig(model_path="", loads_at_low_priority=loads_at_low_priority, only_idle_cores=True)
    ours, theirs = Pipe()
    server.run_engine(config, "", "", LogConfig(), "engine-2", theirs)
    assert server.EngineServer.return_value.finish.called, "the last events are sent before the process ends"  # type: ignore[attr-defined]
    assert ours.recv() == ("ready", None) and seen == ["drained", "stands back True"][: 1 + loads_at_low_priority]
