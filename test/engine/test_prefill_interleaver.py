"""Prefill that overtakes a step with batch work. The tests count steps and pieces. No model."""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rwkv_batch.config import WHOLE_STEPS
from rwkv_batch.core.prefill_interleaver import MAX_INTERLEAVED_STEPS, PrefillInterleaver
from rwkv_batch.core.scheduler import ScheduledRow, Scheduler
from rwkv_batch.core.sequence import RunningJob, Sequence
from rwkv_batch.core.shares import Limits
from rwkv_batch.runner.graphs.pieces import MIN_PARAMETERS, Pieces, piece_layers
from rwkv_batch.runner.step_sampling import InFlightStep, Step
from test.engine.test_scheduler import Slots, job, read

PIECES = 16
PIECE_MS, PROMPT_MS = 0.75, 4.5
"""7.2B on an H200: two layers over 320 rows, and a prompt of eighty tokens."""


class Device:
    """A step loop with a virtual clock. The clock advances only while a piece runs."""

    def __init__(self, places: int = 320) -> None:
        self.plan = Scheduler(Limits(places, 10_000, 1024, 1024, 1024), Slots(10_000))
        self.prefill_interleaver: PrefillInterleaver[Step] = PrefillInterleaver(
            self._take, self.plan.schedule_interactive_prefill, self._launch, self._process_outputs
        )
        self.now = 0.0
        self.coming: list[tuple[float, Sequence]] = []
        """(when, row) of future requests"""
        self.first_at: dict[Sequence, float] = {}
        self.interleaved_within: list[list[ScheduledRow]] = []
        """steps launched within another one"""

    @classmethod
    def with_batch(cls) -> Device:
        """Return a device that has launched a step with 300 batch rows."""
        device = cls()
        device.batch(300)
        device.step()
        return device

    def chat_at(self, at: float, prompt_tokens: int = 80) -> Sequence:
        _, (sequence,) = job(1, prompt_tokens, client=f"chat at {at}")
        self.coming.append((at, sequence))
        return sequence

    def batch(self, rows: int) -> list[Sequence]:
        running, sequences = job(rows, client="bulk")
        self.plan.add(running, sequences)
        return sequences

    def step(self) -> list[ScheduledRow]:
        self._take()
        rows = self.plan.schedule()
        between = self.prefill_interleaver.begin(rows)
        self.prefill_interleaver.interleave_now()
        for _ in range(PIECES - 1 if between is not None else 0):
            self.now += PIECE_MS
            assert between is not None
            between()
        self._end(rows, PIECE_MS if between is not None else PROMPT_MS)
        self.prefill_interleaver.finish()
        return rows

    def _take(self) -> bool:
        taken = [(at, sequence) for at, sequence in self.coming if at <= self.now]
        for entry in taken:
            self.coming.remove(entry)
            self.plan.add(entry[1].job, [entry[1]])
        return bool(taken)

    def _launch(self, rows: list[ScheduledRow]) -> Step:
        self.interleaved_within.append(rows)
        self._end(rows, PROMPT_MS)
        return Step(0, [InFlightStep(rows, rows)])

    def _end(self, rows: list[ScheduledRow], ms: float) -> None:
        self.now += ms
        read(rows)
        for row in rows:
            if row.samples_token:
                self.first_at.setdefault(row.sequence, self.now)

    def _process_outputs(self, step: Step) -> None:
        assert step.parts


def waits(places: int, come_at: list[float]) -> list[float]:
    """Return the milliseconds to the first token of consecutive requests.

    They run next to a batch that uses all running slots.
    """
    device = Device(places)
    device.batch(2 * places)
    device.step()
    found = []
    for part in come_at:
        came = device.now + part
        chat = device.chat_at(came)
        while chat not in device.first_at:
            device.step()
        found.append(device.first_at[chat] - came)
        device.plan.remove(chat)
    return found


def test_a_first_token_waits_for_a_piece_and_not_for_the_step() -> None:
    step_ms = PIECES * PIECE_MS
    for wait in waits(320, [step_ms * part / 40 for part in range(1, 40)]):
        assert PROMPT_MS <= wait <= PROMPT_MS + 2 * PIECE_MS


def test_no_job_overtakes_a_step_with_its_own_rows() -> None:
    """If it failed there, its slots would be free. The rest of the step would still write to them."""
    device = Device.with_batch()
    chat = device.chat_at(device.now)
    device.step()
    rows = device.step()  # it decodes together with the batch
    asked: list[Collection[RunningJob]] = []

    def plan(running_jobs: Collection[RunningJob]) -> list[ScheduledRow]:
        asked.append(running_jobs)
        return []

    prefill_interleaver: PrefillInterleaver[Step] = PrefillInterleaver(
        lambda: True, plan, device._launch, device._process_outputs
    )
    between = prefill_interleaver.begin(rows)
    assert between is not None
    between()
    assert asked == [{row.sequence.job for row in rows}]
    assert chat.job in asked[0]
    later = device.chat_at(device.now)
    device._take()
    assert [row.sequence for row in device.plan.schedule_interactive_prefill(asked[0])] == [later]
    assert device.plan.schedule_interactive_prefill([*asked[0], later.job]) == []


def test_a_scored_prompt_does_not_overtake() -> None:
    """A step in flight may contain an earlier part of it. The scores of that part would be reported later."""
    device = Device.with_batch()
    scored, other = (device.chat_at(device.now + 0.1) for _ in range(2))
    scored.scored = range(80)
    device.step()
    assert [[row.sequence for row in rows] for rows in device.interleaved_within] == [[other]]
    while scored not in device.first_at:
        device.step()


def test_overtaking_steps_are_limited_per_step() -> None:
    device = Device()
    bulk = device.batch(300)
    device.step()
    for number in range(10):
        device.chat_at(device.now + 0.1 + number * 0.01 + PROMPT_MS * number)
    began = device.now
    rows = device.step()
    assert {row.sequence for row in rows} == set(bulk)
    assert len(device.interleaved_within) == MAX_INTERLEAVED_STEPS
    assert device.now - began == PIECES * PIECE_MS + MAX_INTERLEAVED_STEPS * PROMPT_MS


def test_batch_work_has_one_launch_in_seven_however_many_requests_come() -> None:
    device = Device.with_batch()
    for number in range(2000):
        device.chat_at(device.now + number * 0.2)
    of_batch = []
    for _ in range(30):
        of_batch.append(any(row.sequence.job.is_batch for row in device.step()))
        for sequence in [sequence for sequence in device.first_at if not sequence.job.is_batch]:
            device.plan.remove(sequence)
            del device.first_at[sequence]
    assert device.coming, "more requests arrive than are answered"
    launches = len(of_batch) + len(device.interleaved_within)
    assert launches >= sum(of_batch) * 5, "prefill overtakes, and batch rows skip steps"
    assert sum(of_batch) * (2 * MAX_INTERLEAVED_STEPS + 1) >= launches - MAX_INTERLEAVED_STEPS


def test_a_long_prompt_continues_between_the_next_pieces() -> None:
    device = Device.with_batch()
    chat = device.chat_at(device.now + 1, prompt_tokens=2500)
    device.step()
    assert [row.num_tokens for (row,) in device.interleaved_within] == [1024, 1024, 452]
    assert chat in device.first_at


def test_batch_prompts_and_decoding_rows_do_not_overtake() -> None:
    device = Device()
    bulk = device.batch(20)
    device.step()
    chat = device.chat_at(device.now + 1)
    _, (late, *_) = job(12, 500, client="bulk")
    device.coming.append((device.now + 1, late))
    device.step()
    assert [[row.sequence for row in rows] for rows in device.interleaved_within] == [[chat]]
    device.step()
    assert len(device.interleaved_within) == 1, "its second token is sampled in a normal step"
    assert all(len(sequence.token_ids) > 1 for sequence in bulk)


def test_rows_of_a_job_in_the_step_do_not_overtake() -> None:
    """The job might fail with them. Then the rest of the step would write to a free slot."""
    plan = Scheduler(Limits(32, 10_000, 256, 256, 256), Slots(100))
    running, rows = job(3, 40, client="chat")
    plan.add(running, rows)
    other, (single,) = job(1, 40, client="chat")
    plan.add(other, [single])
    assert [row.sequence for row in plan.schedule_interactive_prefill({running})] == [single]
    assert {row.sequence for row in plan.schedule_interactive_prefill(set())} == {*rows, single}


def test_a_step_without_batch_rows_is_not_in_pieces() -> None:
    device = Device()
    device.chat_at(0.0)
    device.step()
    chat = device.chat_at(device.now + 0.1)
    device.step()
    assert not device.interleaved_within and chat not in device.first_at


def test_overtaking_outputs_are_processed_after_the_next_piece_is_launched() -> None:
    calls: list[str] = []
    _, (chat,) = job(1, 5)
    _, batch = job(9)
    comes = [False, True, True]
    prefill_interleaver: PrefillInterleaver[Step] = PrefillInterleaver(
        lambda: comes.pop(0),
        lambda _: [ScheduledRow(chat, 5, samples_token=True)],
        lambda rows: calls.append("prompt") or Step(7, [InFlightStep(rows, rows)]),  # type: ignore[func-returns-value]
        lambda step: calls.append(f"process {step.number}"),
    )
    between = prefill_interleaver.begin([ScheduledRow(sequence, 1, samples_token=True) for sequence in batch])
    assert between is not None
    between()
    calls.append("piece")
    between()
    assert calls == ["piece", "prompt"]
    calls.append("piece")
    between()
    assert calls == ["piece", "prompt", "piece", "process 7", "prompt"]
    prefill_interleaver.finish()
    assert calls[5:] == ["process 7"]


def test_prefill_before_the_first_piece_is_processed_after_it() -> None:
    calls: list[str] = []
    _, (chat,) = job(1, 5)
    _, batch = job(9)
    rows = [ScheduledRow(sequence, 1, samples_token=True) for sequence in batch]
    comes = [True, False, True, True, True]
    prefill_interleaver: PrefillInterleaver[Step] = PrefillInterleaver(
        lambda: comes.pop(0),
        lambda _: [ScheduledRow(chat, 5, samples_token=True)],
        lambda rows: calls.append("prompt") or Step(7, [InFlightStep(rows, rows)]),  # type: ignore[func-returns-value]
        lambda step: calls.append(f"process {step.number}"),
    )
    prefill_interleaver.interleave_now()
    assert not calls and len(comes) == 5, "no step with batch work has begun"
    between = prefill_interleaver.begin(rows)
    assert between is not None
    prefill_interleaver.interleave_now()
    calls.append("first piece")
    prefill_interleaver.interleave_now()
    assert calls == ["prompt", "first piece"], "one overtaking step at a time"
    between()
    assert calls[2:] == ["process 7", "prompt"], "there may be more prefill than a step holds"
    prefill_interleaver.finish()
    prefill_interleaver.interleave_now()
    prefill_interleaver.finish()
    assert calls[4:] == ["process 7", "prompt", "process 7"], "nothing is left until the next step"
    prefill_interleaver.interleave_now()
    assert calls[7:] == [], "the maximum per step"
    assert prefill_interleaver.begin([ScheduledRow(chat, 5, samples_token=True)]) is None
    prefill_interleaver.interleave_now()
    assert calls[7:] == [], "a step without batch work has no pieces"


def test_pieces_are_launched_one_ahead_of_the_device() -> None:
    calls: list[str] = []

    def launch(graph: object) -> Callable[[], None]:
        calls.append(f"launch {graph}")
        return lambda: calls.append(f"wait {graph}")

    def between() -> None:
        calls.append("between")
        assert not torch.is_inference_mode_enabled(), "a tensor from inference mode could not be written later"

    pieces = Pieces(32, ["a", "b", "c"], launch)  # type: ignore[list-item]
    with torch.inference_mode():
        ended = pieces.run(between, lambda: calls.append("wait for the step before"))
    before = ["launch a", "wait for the step before", "between"]
    assert calls == [*before, "launch b", "wait a", "between", "launch c"]
    ended()
    assert calls[-1] == "wait c"
    calls.clear()
    pieces.run(lambda: calls.append("between"), lambda: None, 3)()
    assert calls == ["launch a", "between", "launch b", "launch c", "wait c"], "three are queued on return"


def test_a_step_holds_a_first_token_until_it_is_known() -> None:
    _, (chat,) = job(1, 5)
    _, (bulk, *_) = job(9)
    row = ScheduledRow(chat, 5, samples_token=True)
    assert Step(0, [InFlightStep([row], [row])]).samples_first_token
    assert not Step(0, [InFlightStep([ScheduledRow(chat, 3, samples_token=False)], [])]).samples_first_token
    other = ScheduledRow(bulk, 1, samples_token=True)
    assert not Step(0, [InFlightStep([other], [other])]).samples_first_token
    chat.output.append_token(5, None)
    assert not Step(0, [InFlightStep([row], [row])]).samples_first_token


@pytest.mark.parametrize(
    ("configured", "layers", "streamed", "stages", "parameters", "found"),
    [
        (0, 32, 0, 1, MIN_PARAMETERS, 2),
        (0, 61, 0, 1, MIN_PARAMETERS, 4),
        (0, 24, 0, 1, MIN_PARAMETERS - 1, 0),
        (3, 24, 0, 1, 10**8, 3),
        (WHOLE_STEPS, 32, 0, 1, MIN_PARAMETERS, 0),
        (2, 32, 1, 1, MIN_PARAMETERS, 0),
        (2, 16, 0, 2, MIN_PARAMETERS, 0),
    ],
)
def test_steps_of_large_models_on_one_gpu_have_pieces_by_default(
    configured: int, layers: int, streamed: int, stages: int, parameters: int, found: int
) -> None:
    place: Any = SimpleNamespace(stage=SimpleNamespace(layers=range(layers), num_streamed=streamed))
    assert piece_layers(configured, [place] * stages, parameters) == found
