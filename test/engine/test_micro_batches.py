"""Micro-batches: order, balance, no idle stage, and the same text as on one stage."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rwkv_batch.core.scheduler import ScheduledRow, Scheduler
from rwkv_batch.core.sequence import PENDING, Sequence
from rwkv_batch.core.shares import Limits
from rwkv_batch.engine import Engine
from rwkv_batch.request import FinishReason, GenerateRequest
from rwkv_batch.runner.memory import Memory
from sampling.params import SamplingParams
from state_pool.config import PoolConfig
from test.engine.test_scheduler import Slots, job
from test.harness import make_request, run, started_engine, submit, turn

pytestmark = pytest.mark.slow

LAYOUTS: list[dict[str, Any]] = [
    {"devices": ("cpu",) * 3, "micro_batches": 3},
    {"devices": ("cpu",) * 3, "micro_batches": 3, "overlap_on_cpu": True},
    {"devices": ("cpu",) * 2, "micro_batches": 5, "overlap_on_cpu": True},
    {"devices": ("cpu",) * 2, "micro_batches": 2, "overlap_on_cpu": True, "layers": (1.5, 1.5)},
]
KINDS = ["plain", "overlapped", "two stages", "a layer cut in half"]


def mixed_requests() -> list[GenerateRequest]:
    """Greedy and sampled rows of many lengths, shared prompts, stops, log-probabilities."""
    dice = random.Random(3)
    rows = []
    for i in range(24):
        prompt = [dice.randrange(1, 60_000) for _ in range(dice.choice([1, 2, 40, 90]))]
        sampling = SamplingParams(temperature=i % 3 / 2, seed=i, top_k=40, presence_penalty=0.5)
        rows.append(
            make_request(
                prompt, max_tokens=dice.choice([1, 2, 9, 30]), sampling=sampling, stop_ids=[dice.randrange(99)]
            )
        )
    rows.append(make_request([5, 6, 7], n=5, sampling=SamplingParams(seed=11)))
    rows.append(make_request([9], sampling=SamplingParams(temperature=0.0, top_logprobs=2)))
    return rows


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[bytes]]:
    """One stage's answers to each row alone."""
    with started_engine(model) as engine:
        return [run(engine, row).all_texts for row in mixed_requests()]


@pytest.mark.parametrize("layout", LAYOUTS, ids=KINDS)
def test_the_text_is_that_of_one_stage(model: Path, expected: list[list[bytes]], layout: dict[str, Any]) -> None:
    with started_engine(model, max_running=24, **layout) as engine:
        running = [submit(engine, row) for row in mixed_requests() for _ in range(2)]
        for i, one in enumerate(running):
            assert one.wait().all_texts == expected[i // 2]


def test_the_text_is_the_same_if_every_group_carries_prefill(
    model: Path, expected: list[list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Memory.limits
    monkeypatch.setattr(Memory, "limits", lambda memory: replace(limits(memory), mixed_rows=512))
    test_the_text_is_that_of_one_stage(model, expected, LAYOUTS[1])


def talk(engine: Engine, turns: range) -> list[bytes]:
    """Run turns of a session that end by stops and by length."""
    stops = [b"a", b"the ", b"\n\n"]
    return [run(engine, turn("s", f"turn {i} of many", max_tokens=12, stop_strings=stops)).texts[0] for i in turns]


@pytest.fixture(scope="module")
def expected_talk(model: Path) -> list[bytes]:
    with started_engine(model) as engine:
        return talk(engine, range(6))


@pytest.mark.parametrize("layout", LAYOUTS, ids=KINDS)
def test_sessions_continue_as_on_one_stage(
    model: Path, expected_talk: list[bytes], layout: dict[str, Any], tmp_path: Path
) -> None:
    """Turns among other rows. Then the same from the log on one stage."""
    for durability in ("log", "turn"):
        config = PoolConfig(
            state_db=str(tmp_path / f"{durability}.db"), durability=durability, l1_sessions=1, retain_tokens=-1
        )
        with started_engine(model, config, **layout) as engine:
            others = submit(engine, *[make_request([i, 2], max_tokens=200, ignore_eos=True) for i in range(20)])
            assert talk(engine, range(4)) == expected_talk[:4]
            engine.cancel(others.job.job_id)
            assert {finish.reason for finish in others.wait().finishes.values()} <= {
                FinishReason.CANCELLED,
                FinishReason.LENGTH,
                FinishReason.STOP,
            }
        with started_engine(model, config) as engine:
            assert talk(engine, range(4, 6)) == expected_talk[4:]


class Pipe:
    """Stages with delays in virtual time under the engine's loop."""

    def __init__(self, stages: list[float], limits: Limits, lead: int = 1) -> None:
        self.plan = Scheduler(limits, Slots(limits.max_running * 2))
        self.times = stages
        self.depth = limits.groups + lead
        self.busy = [0.0] * len(stages)
        """seconds of work of each stage"""
        self.free_at = [0.0] * len(stages)
        self.idle: list[tuple[float, float]] = []
        """(when, how long) the first stage was idle"""
        self.sampled_at: dict[Sequence, float] = {}
        self.flight: list[tuple[int, list[ScheduledRow], float]] = []
        self.number = 0
        self.host = 0.0
        self.steps: Counter[Sequence] = Counter()

    def turn(self) -> bool:
        rows = self.plan.schedule(self.flight[0][0] if self.flight else self.number)
        if rows:
            self.flight.append((self.number, rows, self._launch(rows)))
            self.number += 1
        if self.flight and (not rows or len(self.flight) >= self.depth):
            self._process_outputs(*self.flight.pop(0)[1:])
        return bool(rows or self.flight)

    def _launch(self, rows: list[ScheduledRow]) -> float:
        """Compute when the step is sampled: each stage runs after the previous stage and its own previous step."""
        at = max([self.host, *(self.sampled_at.get(row.sequence, 0.0) for row in rows)])
        for stage, seconds in enumerate(self.times):
            start = max(at, self.free_at[stage])
            if stage == 0 and start > self.free_at[0]:
                self.idle.append((start, start - self.free_at[0]))
            at = self.free_at[stage] = start + seconds
            self.busy[stage] += seconds
        for row in rows:
            sequence = row.sequence
            self.steps[sequence] += 1
            sequence.num_computed_tokens += row.num_tokens
            if row.samples_token:
                self.sampled_at[sequence] = at
                sequence.token_ids.append(PENDING)
                sequence.last_sample_step = self.number
        return at

    def _process_outputs(self, rows: list[ScheduledRow], sampled: float) -> None:
        self.host = max(self.host, sampled)
        for row in rows:
            sequence = row.sequence
            if row.samples_token:
                known = sequence.token_ids.index(PENDING)
                sequence.token_ids[known] = 7
                sequence.output.tokens.append(7)
                if len(sequence.output.tokens) >= sequence.request.max_tokens:
                    self.plan.remove(sequence)


def limits(groups: int, req_slots: int = 64, budget: int = 64) -> Limits:
    return Limits(req_slots, 10_000, budget, 16, budget, groups)


def rows_of(count: int, max_tokens: int, prompt_tokens: int = 1) -> tuple[Any, list[Sequence]]:
    running, rows = job(count, prompt_tokens)
    for row in rows:
        row.request = GenerateRequest(prompt=[1] * prompt_tokens, max_tokens=max_tokens, sampling=SamplingParams())
    return running, rows


@pytest.mark.parametrize("stages", [[1.0] * 2, [1.0] * 4, [0.9, 1.0, 1.0, 0.8]])
def test_no_stage_idles_longer_than_one_stage_takes(stages: list[float]) -> None:
    pipe = Pipe(stages, limits(len(stages)))
    pipe.plan.add(*rows_of(40, max_tokens=60))
    while pipe.turn():
        pass
    began, ended = len(stages) * max(stages), pipe.host - len(stages) * max(stages) * 3
    assert all(long <= max(stages) for when, long in pipe.idle if began < when < ended)
    slowest = stages.index(max(stages))
    assert pipe.busy[slowest] > 0.95 * (pipe.host - len(stages) * max(stages) * 2)


def test_one_row_is_not_delayed_by_the_number_of_groups() -> None:
    pipe = Pipe([1.0] * 4, limits(4))
    pipe.plan.add(*rows_of(1, max_tokens=50))
    while pipe.turn():
        pass
    assert pipe.host == 4.0 * 50


@pytest.mark.parametrize(("mixed_rows", "groups"), [(0, 1), (9, 1), (10, 4)])
def test_one_group_carries_prefill_unless_graphs_are_shared(mixed_rows: int, groups: int) -> None:
    """Prompts arrive before every step. Groups have ten rows."""
    pipe = Pipe([1.0] * 4, Limits(64, 10_000, 64, 16, 64, 4, mixed_rows=mixed_rows))
    pipe.plan.add(*rows_of(40, max_tokens=1000))
    for _ in range(20):
        pipe.turn()
    reading = set()
    for _ in range(8):
        pipe.plan.add(*rows_of(1, max_tokens=1, prompt_tokens=12))
        pipe.turn()
        number, rows, _ = pipe.flight[-1]
        if any(row.num_tokens > 1 for row in rows):
            reading.add(number % 4)
    assert len(reading) == groups


@pytest.mark.parametrize(
    ("held", "tokens", "waits"), [(0, 9, [1, 1]), (100, 9, [1, 5]), (9, 9, [1, 1]), (100, 10, [1, 1])]
)
def test_few_prompts_are_read_in_every_fifth_round(held: int, tokens: int, waits: list[int]) -> None:
    """Counts the first group's steps until each of two prompts is read.

    The steps have ten rows. The second prompt comes right after the first is read.
    """
    pipe = Pipe([1.0] * 4, Limits(64, 10_000, 64, 16, 64, 4, min_gathered_prefill_tokens=held))
    pipe.plan.add(*rows_of(40, max_tokens=1000))
    for _ in range(20):
        pipe.turn()
    found = []
    for _ in range(2):
        while pipe.plan._next_group != 0:  # the next step is the first group's
            pipe.turn()
        newcomer, rows = rows_of(1, max_tokens=1, prompt_tokens=tokens)
        pipe.plan.add(newcomer, rows)
        turns = 0
        while rows[0].num_computed_tokens == 0:
            turns += pipe.plan._next_group == 0
            pipe.turn()
        found.append(turns)
    assert found == waits


@pytest.mark.parametrize("lead", [0, 1])
@pytest.mark.parametrize("groups", [2, 3, 4])
def test_prompts_are_read_although_the_first_group_is_empty(groups: int, lead: int) -> None:
    """The other groups' rows are in every step. They are too few to be rebalanced."""
    pipe = Pipe([1.0] * groups, limits(groups), lead)
    pipe.plan.add(*rows_of(groups, max_tokens=1000))
    for _ in range(20):
        pipe.turn()
    pipe.plan.remove(next(iter(pipe.plan._groups[0])))
    newcomer, rows = rows_of(1, max_tokens=1, prompt_tokens=12)
    pipe.plan.add(newcomer, rows)
    for _ in range(3 * groups):
        pipe.turn()
    assert rows[0].num_computed_tokens == 12


def test_groups_take_turns_and_none_falls_behind() -> None:
    pipe = Pipe([1.0] * 3, limits(3))
    pipe.plan.add(*rows_of(30, max_tokens=1000))
    for _ in range(200):
        pipe.turn()
    assert max(pipe.steps.values()) - min(pipe.steps.values()) <= 1


def test_groups_even_out_as_rows_end() -> None:
    pipe = Pipe([1.0] * 2, limits(2))
    running, rows = rows_of(40, max_tokens=400)
    pipe.plan.add(running, rows)
    for _ in range(20):
        pipe.turn()
    first = {row.sequence for row in pipe.flight[-1][1]}
    for sequence in list(first)[:-1]:  # all but one of a group end at once
        pipe.plan.remove(sequence)
    for _ in range(20):
        pipe.turn()
    sizes = [len([row for row in step[1] if row.sequence.phase.name == "RUNNING"]) for step in pipe.flight[-2:]]
    assert abs(sizes[0] - sizes[1]) <= 2


def test_a_row_is_launched_at_most_one_step_ahead() -> None:
    """With any number of steps in flight. Further steps would sample in vain when the row ends."""
    pipe = Pipe([1.0] * 4, limits(4))
    pipe.plan.add(*rows_of(1, max_tokens=100))
    ahead = set()
    for _ in range(50):
        pipe.turn()
        ahead.add(len(pipe.flight))
    assert max(ahead) == 2


def test_prompts_are_read_in_chunks_that_follow_each_other_through_the_stages() -> None:
    """A long prompt's chunks do not wait for each other's tokens."""
    pipe = Pipe([1.0] * 4, limits(4, budget=16))
    pipe.plan.add(*rows_of(1, max_tokens=1, prompt_tokens=16 * 8))
    while pipe.turn():
        pass
    assert pipe.host == 4 + 8 - 1


def test_a_row_waits_for_its_token_only_until_its_step_is_the_oldest() -> None:
    """A prompt is read after the steps of other groups.

    Its row joins the next step of its group that the first device can begin.
    """
    pipe = Pipe([1.0] * 4, limits(4))
    pipe.plan.add(*rows_of(37, max_tokens=1000))  # the smallest group follows the one that reads prompts
    for _ in range(50):
        pipe.turn()
    newcomer, rows = rows_of(1, max_tokens=5, prompt_tokens=12)
    pipe.plan.add(newcomer, rows)
    for _ in range(60):
        pipe.turn()
    assert rows[0].phase.name == "DONE"
    assert all(long <= 1.0 for when, long in pipe.idle if when > 8)
