"""A hanging step is detected. Idle, loading and suspended engines are not mistaken for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rwkv_batch.engine import Engine
from rwkv_batch.ipc.watchdog import Watchdog
from rwkv_batch.request import FinishReason, Job
from rwkv_batch.runner.step_sampling import InFlightStep
from test.harness import RunningJob, make_request, run, started_engine, submit
from test.serving import wait_for


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def look(dog: Watchdog, clock: Clock, loop_count: list[int | None], every_s: float = 0.5) -> list[bool]:
    said = []
    for count in loop_count:
        clock.now += every_s
        said.append(dog.hangs(count))
    return said


def test_a_loop_without_progress_for_too_long_hangs(clock: Clock) -> None:
    assert look(Watchdog(2.0, clock, 0.5), clock, [7] * 6) == [False] * 4 + [True] * 2


def test_a_loop_with_occasional_progress_does_not_hang(clock: Clock) -> None:
    assert not any(look(Watchdog(2.0, clock, 0.5), clock, [i // 3 for i in range(60)]))


def test_loading_and_ending_do_not_count_as_hanging(clock: Clock) -> None:
    dog = Watchdog(2.0, clock, 0.5)
    assert not any(look(dog, clock, [1, 1, 1, *[None] * 100, 1, 1, 1]))


def test_time_without_checks_does_not_count(clock: Clock) -> None:
    """The process was stopped, or the machine slept: the engine gets the full time again."""
    dog = Watchdog(2.0, clock, 0.5)
    assert not any(look(dog, clock, [5, 5], every_s=3600.0))
    assert look(dog, clock, [5, 5, 5])[-1]


def test_zero_disables_it(clock: Clock) -> None:
    assert not any(look(Watchdog(0.0, clock, 0.5), clock, [1] * 1000))


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with started_engine(model) as engine:
        yield engine


def test_an_idle_loop_makes_progress(engine: Engine) -> None:
    before = engine.loop_count
    assert before is not None
    wait_for(lambda: engine.loop_count > before + 1, 30, "the loop comes round")  # type: ignore[operator]


def test_a_blocked_step_stops_the_count(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, gate, launch = threading.Event(), threading.Event(), engine.model_runner.launch

    def blocked(*arguments: Any) -> InFlightStep:
        entered.set()
        gate.wait()
        return launch(*arguments)

    monkeypatch.setattr(engine.model_runner, "launch", blocked)
    job = submit(engine, make_request("x", max_tokens=1))
    assert entered.wait(60)
    stuck = engine.loop_count
    submit(engine, make_request("y", max_tokens=1))
    assert engine.loop_count == stuck is not None
    gate.set()
    job.wait()
    wait_for(lambda: engine.loop_count > stuck, 30, "the loop comes round")  # type: ignore[operator]


def test_compiling_a_sampler_does_not_count_as_hanging(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int | None] = []

    def slowly(*arguments: object, **_: object) -> object:
        seen.append(engine.loop_count)
        return engine.model_runner.step_sampler.sampler(""), {}

    monkeypatch.setattr("rwkv_batch.runner.step_sampling.choose_sampler", slowly)
    run(engine, make_request("x", max_tokens=1), sampler="naive")
    assert seen == [None] and engine.loop_count is not None


def test_deadlines_of_ended_jobs_are_removed(engine: Engine) -> None:
    for _ in range(200):
        run(engine, make_request("x", max_tokens=1), timeout_s=86_400.0)
    assert len(engine.jobs._deadlines) <= 66


def test_an_old_deadline_does_not_end_a_new_job_of_the_same_id(engine: Engine) -> None:
    def submitted(tokens: int, timeout_s: float | None) -> RunningJob:
        running = RunningJob(
            Job(job_id="same", rows=[make_request("x", max_tokens=tokens, ignore_eos=True)], timeout_s=timeout_s)
        )
        engine.submit(running.job, running.sink, running.on_admitted)
        return running

    submitted(1, 0.2).wait()
    second = submitted(10**6, None)
    assert second.started.wait(60)
    end = submit(engine, make_request("y", max_tokens=10**6, ignore_eos=True), timeout_s=0.5).wait()
    assert end.finishes[0].reason is FinishReason.TIMEOUT
    assert not second.done.is_set()
    engine.cancel("same")
    second.wait()
