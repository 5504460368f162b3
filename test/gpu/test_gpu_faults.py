"""GPU faults: graphs that cannot be captured, out of memory, a kernel that breaks the device."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from demo.files import ensure_model
from rwkv_batch.errors import ErrorKind, StartupError
from rwkv_batch.kernels.cuda.hopper_gemm import MAX_MULTI_TILE_ROWS
from rwkv_batch.model.step_inputs import StepInputs
from rwkv_batch.request import GenerateRequest
from rwkv_batch.runner.pipeline import Pipeline
from test.gpu.test_gpu_engine import same, translations
from test.harness import RunningJob, call, make_request, run, started_engine, submit

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ON_GPU: dict[str, Any] = {"devices": ("cuda:0",), "max_running": 128, "prefill_tokens_per_step": 2048}


@pytest.fixture(scope="module")
def model() -> Path:
    return ensure_model()


@pytest.fixture(scope="module")
def wanted(model: Path) -> list[bytes]:
    with started_engine(model, **ON_GPU) as engine:
        assert call(engine, "status")["decode_graphs"] == "used"
        return run(engine, *translations(30)).all_texts


def no_memory_while_capturing(patch: pytest.MonkeyPatch, where: str) -> None:
    """Memory runs out during a capture: while sampling, or inside a layer, on a side stream."""
    from rwkv_batch.kernels.cuda.library import Kernels
    from sampling.rapid import RapidSampler

    def refuse() -> None:
        if torch.cuda.is_current_stream_capturing():
            raise torch.OutOfMemoryError("CUDA out of memory (for a test)")

    if where == "sampling":
        rng = RapidSampler.sample_on_device

        def failing_sample(self: RapidSampler, logits: Tensor, req_slots: Tensor, out: Tensor) -> None:
            refuse()
            rng(self, logits, req_slots, out)

        patch.setattr(RapidSampler, "sample_on_device", failing_sample)
        return
    launch = Kernels.call

    def calling(self: Kernels, name: str, *args: object) -> None:
        if name == "rwkv_low_rank_act":
            refuse()
        launch(self, name, *args)

    patch.setattr(Kernels, "call", calling)


@pytest.mark.parametrize(
    ("where", "warmup"),
    [("sampling", True), ("sampling", False), ("side stream", True)],
    ids=["sampling, at start", "sampling, at first use", "a side stream, at start"],
)
def test_the_engine_runs_without_graphs_if_capture_fails(
    model: Path, wanted: list[bytes], warmup: bool, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_memory_while_capturing(monkeypatch, where)
    many = {**ON_GPU, "max_running": MAX_MULTI_TILE_ROWS + 16}  # side streams are for more than that
    with started_engine(model, warmup=warmup, **many) as engine:
        first = run(engine, *translations(30)).all_texts
        assert same(first, wanted) >= 0.95
        assert "OutOfMemoryError: CUDA out of memory (for a test)" in call(engine, "status")["decode_graphs"]
        assert run(engine, *translations(30)).all_texts == first


@contextmanager
def no_memory_left() -> Iterator[None]:
    """Take the GPU's free memory without torch's allocator. So torch keeps its reserved memory.

    Less than 64 MiB are left: CUDA loads a kernel when it is first used.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    taken: list[ctypes.c_uint64] = []
    size = 1 << 34
    with torch.cuda.device(0):
        while size >= 1 << 26:
            place = ctypes.c_uint64()
            if driver.cuMemAlloc_v2(ctypes.byref(place), ctypes.c_size_t(size)) == 0:
                taken.append(place)
            else:
                size >>= 1
        try:
            yield
        finally:
            for place in taken:
                assert driver.cuMemFree_v2(place) == 0


def prompts(rows: int, tokens: int) -> list[GenerateRequest]:
    return [make_request([300 + i] * tokens, max_tokens=3, use_prefix_cache=False) for i in range(rows)]


def ended(job: RunningJob) -> ErrorKind | None:
    """Return the kind of error that a job ends with."""
    error = job.wait().events[-1].error
    return None if error is None else error.kind


def test_warmed_up_steps_need_no_more_memory(model: Path) -> None:
    """The largest step and many others, with almost no free memory."""
    with started_engine(model, **ON_GPU) as engine, no_memory_left():
        before = torch.cuda.memory_reserved(0)
        shapes = ((128, 64), (40, 3), (7, 300), (1, 900), (100, 1))
        jobs = [submit(engine, *prompts(rows, tokens)) for rows, tokens in shapes]
        jobs.append(submit(engine, *translations(60)))
        assert [ended(job) for job in jobs] == [None] * len(jobs)
        assert torch.cuda.memory_reserved(0) <= before + (16 << 20)


def test_too_little_memory_for_the_largest_step_is_reported_at_start(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Pipeline.forward

    def limited(self: Pipeline, inputs: StepInputs, out: Tensor | None) -> Tensor:
        if len(inputs.tokens) > 1000:
            raise torch.OutOfMemoryError("CUDA out of memory (for a test)")
        return forward(self, inputs, out)

    monkeypatch.setattr(Pipeline, "forward", limited)
    with pytest.raises(StartupError, match="Lower --max-running"), started_engine(model, **ON_GPU):
        pass


def test_out_of_memory_ends_a_step_and_not_the_engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large step takes 1 GiB more than it needs; the demo model's own needs fit into the free memory."""
    forward = Pipeline.forward

    def hungry(self: Pipeline, inputs: StepInputs, out: Tensor | None) -> Tensor:
        if len(inputs.tokens) > 1000:
            torch.empty(1 << 30, dtype=torch.uint8, device="cuda:0")
        return forward(self, inputs, out)

    monkeypatch.setattr(Pipeline, "forward", hungry)
    large = {**ON_GPU, "max_running": 512, "prefill_tokens_per_step": 16384}
    with started_engine(model, warmup=False, **large) as engine:
        run(engine, make_request("x", max_tokens=3))
        free = call(engine, "status")["free_slots"]
        torch.cuda.empty_cache()
        with no_memory_left():
            refused = submit(engine, *prompts(480, 32)).wait()
        error = refused.events[-1].error
        assert error is not None and error.kind is ErrorKind.OVERLOADED and error.retry_after_s
        torch.cuda.empty_cache()
        assert ended(submit(engine, *prompts(480, 32))) is None
        assert call(engine, "status")["free_slots"] == free


BROKEN = """
import os
from test.harness import make_request, started_engine, submit
from demo.files import ensure_model

def breaking(engine):
    # An invalid token: reading its embedding breaks the device inside a graph.
    engine.model_runner._tokens.sampled_tokens.fill_(10**9)

with started_engine(ensure_model(), devices=("cuda:0",), max_running=8, prefill_tokens_per_step=256) as engine:
    job = submit(engine, make_request("x", max_tokens=10**6, ignore_eos=True, chunk_size=1))
    assert job.started.wait(60)
    engine._inbox.put(lambda: breaking(engine))
    print("ended", job.wait().events[-1].error.kind, flush=True)
    engine._thread.join(60)
    late = submit(engine, make_request("x"))
    print("alive", engine.is_alive, late.refusal.info.kind, flush=True)
    os._exit(7)
"""


def test_a_graph_that_breaks_the_device_ends_the_engine_in_order() -> None:
    """All jobs fail, then the process ends (`server.run_engine`). The supervisor starts another."""
    done = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True, timeout=240, check=False)
    assert "ended engine_lost" in done.stdout, done.stdout + done.stderr[-3000:]
    assert "alive False engine_lost" in done.stdout
    assert done.returncode == 7, done.stderr[-3000:]
