"""Rows that continue a shared prompt, and the slots they hold. No model."""

from __future__ import annotations

import pytest

from rwkv_batch.core.scheduler import Scheduler
from rwkv_batch.core.sequence import Phase, RunningJob, SharedSlot
from test.engine.test_fairness import end
from test.engine.test_scheduler import job, per_job, read, scheduler


def test_continuations_do_not_use_the_reserve() -> None:
    plan, _ = scheduler(req_slots=16)
    for _ in range(2):
        running, rows = job(8, client="a")
        running.num_running += 1  # another row of the job
        plan.add_forked(rows)
    assert len(plan.schedule()) == 15
    newcomer, rows = job(1, client="b")
    plan.add(newcomer, rows)
    assert per_job(plan.schedule())[newcomer] == 1


def test_queued_continuations_of_a_cancelled_job_are_removed() -> None:
    plan, _ = scheduler(req_slots=1)
    plan.add(*job(1))
    plan.schedule()
    running, children = job(3, prompt_tokens=2)
    before = plan.queued_tokens
    plan.add_forked(children)
    assert (plan.admission.waiting_rows, plan.queued_tokens) == (3, before + 6)
    assert plan.remove_waiting(running) == children
    assert (plan.admission.waiting_rows, plan.queued_tokens) == (0, before)
    assert not plan.admission.interactive.forked


def jobs_with_shared_prompts(plan: Scheduler, count: int, client: str, rows: int) -> list[RunningJob]:
    made = []
    for _ in range(count):
        running, sequences = job(rows, prompt_tokens=5, client=client)
        sequences[0].may_sample = False
        plan.add(running, sequences[:1])
        made.append(running)
    return made


def test_no_further_shared_prompt_starts_while_continuations_wait() -> None:
    plan, _ = scheduler(req_slots=16)
    _, children = job(20, client="a")
    plan.add_forked(children)
    plan.schedule()
    assert children[-1].phase is Phase.WAITING
    jobs_with_shared_prompts(plan, 5, "a", 20)
    assert all(row.sequence.may_sample for row in plan.schedule())


def test_shared_batch_prompts_do_not_delay_interactive_ones() -> None:
    plan, _ = scheduler(req_slots=16)
    _, children = job(20, client="a")
    plan.add_forked(children)
    plan.schedule()
    chat = jobs_with_shared_prompts(plan, 1, "b", 4)[0]
    assert per_job(plan.schedule())[chat] == 1


def test_a_clients_continuations_do_not_delay_other_clients() -> None:
    """Its rows may run for hours. The other continuations then wait for hours."""
    plan, slots = scheduler(req_slots=16)
    _, children = job(8, client="hog")
    _, more = job(8, client="hog")
    plan.add_forked(children)
    plan.add_forked(more)
    read(plan.schedule())
    assert plan.admission.waiting_rows
    hog, other = jobs_with_shared_prompts(plan, 1, "hog", 2)[0], jobs_with_shared_prompts(plan, 1, "other", 2)[0]
    rows = per_job(plan.schedule())
    assert rows[other] == 1 and rows[hog] == 0, "its own continuations start first"
    for sequence in [*children, *more]:
        end(plan, slots, sequence) if sequence.phase is Phase.RUNNING else plan.remove_waiting(sequence.job)
    assert per_job(plan.schedule())[hog] == 1
    assert not plan.admission.interactive.num_held_shared_prefixes


def test_shared_prompts_with_waiting_continuations_are_limited_over_all_clients() -> None:
    plan, _ = scheduler(req_slots=16)
    plan.add(*job(8, client="a"))
    plan.add(*job(8, client="b"))
    plan.schedule()
    for number in range(4):
        _, children = job(8, client=f"c{number}")
        for child in children:
            child.shared = (
                SharedSlot(90 + number, lambda: None, len(children)) if child.row == 0 else children[0].shared
            )
        plan.add_forked(children)
    for number in range(30):
        jobs_with_shared_prompts(plan, 1, f"late{number}", 2)
    assert all(row.sequence.may_sample for row in plan.schedule())


@pytest.mark.parametrize("req_slots", [1, 2, 3, 4, 6, 8, 16, 64, 160])
def test_waiting_turns_and_shared_prompts_leave_a_slot_free(req_slots: int) -> None:
    """Waiting turns hold half the slots. All other waiting rows, of both classes, must not hold the other half."""
    plan, slots = scheduler(req_slots=req_slots, slots=10_000)
    usable = req_slots + max(4, req_slots // 8)  # the minimum of a runner
    first = len(slots.free)
    for number in range(4 * req_slots):
        jobs_with_shared_prompts(plan, 1, f"talk{number}", 2)
        jobs_with_shared_prompts(plan, 1, f"bulk{number}", 9)
    for _ in range(4 * req_slots):
        rows = [row.sequence for row in plan.schedule()]
        reading = [sequence for sequence in rows if not sequence.may_sample]
        if not reading:
            break
        for sequence in reading:
            _, children = job(len(sequence.job.spec.rows), client=sequence.job.client)
            shared = SharedSlot(sequence.slot, lambda: None, len(children))
            for child in children:
                child.shared = shared
            plan.remove(sequence)
            slots.blocked.update(children)  # no continuation can start
            plan.add_forked(children)
    held = first - len(slots.free)
    assert 0 < held <= usable - usable // 2 - 1
