"""Running slots between clients and classes, and preemption. No model."""

from __future__ import annotations

import random
from collections import Counter
from itertools import groupby

import pytest

from rwkv_batch.core.admission import BATCH_TURN_STEPS
from rwkv_batch.core.fair_queue import FairQueue
from rwkv_batch.core.scheduler import Scheduler
from rwkv_batch.core.sequence import Phase, Sequence
from test.conftest import IS_LONG, rest_slow
from test.engine.test_scheduler import Slots, job, per_job, read, scheduler


def end(plan: Scheduler, slots: Slots, sequence: Sequence) -> None:
    """End a row as the job table does."""
    if sequence.slot >= 0:
        slots.free.append(sequence.slot)
    plan.remove(sequence)


def clients(plan: Scheduler) -> Counter[str]:
    return Counter(row.sequence.job.client for row in plan.schedule())


def test_an_interactive_row_starts_at_once_next_to_three_batch_jobs() -> None:
    """32 running slots, all taken by one client's batch rows."""
    plan, _ = scheduler(req_slots=32)
    for _ in range(3):
        plan.add(*job(200, client="bulk"))
        read(plan.schedule())
    chat, rows = job(1, client="chat")
    plan.add(chat, rows)
    assert per_job(plan.schedule())[chat] == 1, "it is in the next step"


@pytest.mark.parametrize("bulk_clients", [1, 3, 40])
def test_interactive_rows_preempt_batch_rows_down_to_a_quarter(bulk_clients: int) -> None:
    plan, _ = scheduler(req_slots=32, slots=1000)
    for number in range(bulk_clients):
        plan.add(*job(200, client=f"bulk{number}"))
    read(plan.schedule())
    chats = [job(1, client=f"chat{number}") for number in range(40)]
    for running, rows in chats:
        plan.add(running, rows)
    rows = plan.schedule()
    interactive = [row for row in rows if not row.sequence.job.is_batch]
    assert len(rows) == 32
    assert len(interactive) == 2 + 16, "the reserve and the maximum of paused rows"
    assert plan.admission.paused_rows == 16


def test_paused_rows_keep_their_slots_and_resume_first() -> None:
    plan, slots = scheduler(req_slots=16, slots=100)
    bulk, bulk_rows = job(50, client="bulk")
    plan.add(bulk, bulk_rows)
    before = [row.sequence for row in plan.schedule()]
    admission = {sequence: (sequence.slot, sequence.req_slot) for sequence in before}
    chats = [job(1, client="chat") for _ in range(6)]
    for running, rows in chats:
        plan.add(running, rows)
    now = {row.sequence for row in plan.schedule()}
    paused = [sequence for sequence in before if sequence not in now]
    assert len(paused) == 5 and set(bulk_rows[10:15]) == set(paused), "the youngest rows are preempted"
    assert all((s.slot, s.req_slot, s.phase) == (*admission[s], Phase.RUNNING) for s in paused)
    used = [(s.slot, s.req_slot) for s in {*now, *paused}]
    assert len({slot for slot, _ in used}) == len({req_slot for _, req_slot in used}) == len(used)
    for _, rows in chats:
        end(plan, slots, rows[0])
    assert {row.sequence for row in plan.schedule()} == set(before), "they resume before waiting rows start"
    assert plan.admission.paused_rows == 0


def test_clients_share_the_running_slots() -> None:
    plan, _ = scheduler(req_slots=32, slots=1000)
    plan.add(*job(500, client="early"))
    assert clients(plan) == {"early": 30}
    for _ in range(5):
        plan.add(*job(500, client="late"))
    shares = clients(plan)
    assert shares["early"] + shares["late"] == 30
    assert shares["late"] == 8, "batch rows may use half of the paused rows"


def test_on_a_tie_the_client_served_longest_ago_is_next() -> None:
    queue = FairQueue()
    for client in ("a", "b", "c"):
        queue.add(*job(4, client=client))
    served = []
    for _ in range(6):
        rows = queue.waiting_clients().pop()
        served.append(rows.client)
        queue.end(queue.start(rows.jobs[0], 0))
    assert served == ["a", "b", "c"] * 2


def test_jobs_of_a_lost_engine_start_before_new_ones() -> None:
    queue = FairQueue()
    jobs = [job(1, was_admitted=was_admitted) for was_admitted in (False, False, True, True, False)]
    for running, rows in jobs:
        queue.add(running, rows)
    order = list(queue.waiting_clients().pop().jobs)
    assert order == [jobs[number][0] for number in (2, 3, 0, 1, 4)]


def test_a_client_with_many_jobs_gets_no_larger_share() -> None:
    plan, _ = scheduler(req_slots=32, slots=1000)
    for _ in range(20):
        plan.add(*job(9, client="many"))
    plan.add(*job(100, client="one"))
    assert clients(plan) == {"many": 15, "one": 15}


def test_interactive_clients_share_too() -> None:
    plan, _ = scheduler(req_slots=16, slots=1000)
    for _ in range(200):
        plan.add(*job(1, client="many"))
    assert clients(plan) == {"many": 16}
    for _ in range(4):
        plan.add(*job(1, client="few"))
    assert clients(plan) == {"many": 12, "few": 4}


def test_batch_work_keeps_its_share_during_interactive_floods() -> None:
    plan, slots = scheduler(req_slots=32, slots=1000)
    plan.add(*job(100, client="bulk"))
    read(plan.schedule())
    min_batch_rows = 32
    for _ in range(100):
        for _ in range(60):
            plan.add(*job(1, client="flood"))
        rows = plan.schedule()
        min_batch_rows = min(min_batch_rows, sum(row.sequence.job.is_batch for row in rows))
        for row in rows:
            if not row.sequence.job.is_batch:
                end(plan, slots, row.sequence)
    assert min_batch_rows >= 8


def test_batch_work_starts_during_an_interactive_flood() -> None:
    plan, slots = scheduler(req_slots=16, slots=1000)
    plan.add(*job(8, client="flood")), plan.add(*job(8, client="flood"))
    running = [row.sequence for row in plan.schedule()]
    plan.add(*job(20, client="bulk"))
    for _ in range(50):
        plan.add(*job(1, client="flood"))
    for sequence in running[:6]:
        end(plan, slots, sequence)
    assert sum(row.sequence.job.is_batch for row in plan.schedule()) == 4


def test_batch_work_gets_the_only_running_slot_for_a_while() -> None:
    """With --max-running 1, batch work gets its share of the slot.

    Meanwhile, short interactive rows flood the scheduler.
    """
    plan, slots = scheduler(req_slots=1, slots=10)
    plan.add(*job(50, client="bulk"))
    steps, ran, waited, longest, finished = 0, 0, 0, 0, 0
    for _ in range(2000):
        if not plan.admission.interactive.num_waiting:
            plan.add(*job(1, client="flood"))
        rows = plan.schedule()
        assert len(rows) == 1 and plan.admission.paused_rows <= 1
        read(rows)
        sequence = rows[0].sequence
        ran += 1
        if sequence.job.is_batch:
            steps += 1
            waited += 1
            longest = max(longest, waited)
        else:
            waited = 0
        if not sequence.job.is_batch and ran >= 5:  # an interactive row takes five steps
            ran = 0
            finished += 1
            end(plan, slots, sequence)
    assert steps > 1000, "batch work gets its share"
    assert longest <= BATCH_TURN_STEPS + 1, "and then is preempted"
    assert finished > 50


def test_three_interactive_rows_run_between_two_turns_of_batch_work_in_the_only_slot() -> None:
    plan, slots = scheduler(req_slots=1, slots=10)
    plan.add(*job(50, client="bulk"))
    steps = []
    for _ in range(4 * BATCH_TURN_STEPS):
        plan.add(*job(1, client="flood"))
        row = plan.schedule()[0]
        read([row])
        steps.append(row.sequence.job.is_batch)
        if not row.sequence.job.is_batch:
            end(plan, slots, row.sequence)
    lengths = [(is_batch, len(list(group))) for is_batch, group in groupby(steps)]
    assert lengths[:4] == [(False, 3), (True, BATCH_TURN_STEPS)] * 2


def test_batch_work_alone_is_preempted_from_the_only_slot_at_once() -> None:
    plan, _ = scheduler(req_slots=1, slots=10)
    plan.add(*job(50, client="bulk"))
    for _ in range(10):
        read(plan.schedule())
    chat, rows = job(1, client="chat")
    plan.add(chat, rows)
    assert per_job(plan.schedule())[chat] == 1


def test_a_row_that_cannot_start_preempts_no_row() -> None:
    plan, slots = scheduler(req_slots=16, slots=15)
    plan.add(*job(50, client="bulk"))
    before = {row.sequence for row in plan.schedule()}
    chat, rows = job(1, client="chat")
    plan.add(chat, rows)
    assert {row.sequence for row in plan.schedule()} == before and plan.admission.paused_rows == 0
    slots.free.append(99)
    slots.blocked.add(rows[0])
    assert {row.sequence for row in plan.schedule()} == before
    slots.blocked.clear()
    assert rows[0] in {row.sequence for row in plan.schedule()}


def test_missing_slots_are_requested_once_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request makes the pool evict. Rows with a slot continue."""
    plan, slots = scheduler(req_slots=16, slots=16)
    bulk, bulk_rows = job(50, client="bulk")
    plan.add(bulk, bulk_rows)
    read(plan.schedule())
    chat, chat_rows = job(1, client="first")
    plan.add(chat, chat_rows)
    paused = bulk_rows[14]
    plan.admission.batch.pause(paused)
    plan.remove_running(paused)
    allocations: list[None] = []
    monkeypatch.setattr(slots, "allocate", lambda: allocations.append(None))
    for number in range(50):
        plan.add(*job(1, client=f"chat{number}"))
    slots.free.clear()
    rows = {row.sequence for row in plan.schedule()}
    assert len(allocations) == 1 and paused in rows


def test_a_job_without_running_rows_may_use_the_reserve() -> None:
    plan, slots = scheduler(req_slots=16)
    running, rows = job(2, client="chat")
    plan.add(running, rows[:1])
    plan.schedule()
    end(plan, slots, rows[0])
    assert running.num_running == 0
    plan.add(*job(50, client="bulk"))
    plan.schedule()
    plan.add(running, rows[1:])
    assert per_job(plan.schedule())[running] == 1 and plan.admission.paused_rows == 0


class Checked:
    """A scheduler with random arrivals and ends. Invariants are checked after every step."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.req_slots, self.num_slots = self.rng.choice([(1, 3), (2, 4), (8, 9), (16, 40)])
        self.plan, self.slots = scheduler(req_slots=self.req_slots, slots=self.num_slots, budget=48, chunk=8)
        self.rows: dict[Sequence, int] = {}
        """live rows -> tokens they still sample"""

    def submit(self) -> None:
        count = self.rng.choice([1, 1, 2, 8, 9, 30])
        running, rows = job(count, self.rng.choice([1, 5, 40]), client=self.rng.choice("abc"))
        self.rows |= {row: self.rng.randint(1, 20) for row in rows}
        self.plan.add(running, rows)

    def cancel(self) -> None:
        if self.rows:
            running = self.rng.choice(list(self.rows)).job
            self.plan.remove_waiting(running)
            for sequence in [sequence for sequence in self.rows if sequence.job is running]:
                self.end(sequence)

    def end(self, sequence: Sequence) -> None:
        del self.rows[sequence]
        end(self.plan, self.slots, sequence)

    def step(self) -> None:
        rows = self.plan.schedule()
        self.check({row.sequence for row in rows})
        assert rows or not self.rows, "every row that may run is in the step"
        read(rows)
        for row in rows:
            self.rows[row.sequence] -= row.samples_token
            if self.rows[row.sequence] == 0:
                self.end(row.sequence)

    def check(self, scheduled: set[Sequence]) -> None:
        running = [sequence for sequence in self.rows if sequence.phase is Phase.RUNNING]
        assert len(running) == self.plan.running_rows + self.plan.admission.paused_rows
        assert len(running) + self.plan.admission.waiting_rows == len(self.rows)
        assert (
            self.plan.running_rows <= self.req_slots and self.plan.admission.paused_rows <= self.plan.limits.max_paused
        )
        assert len({sequence.req_slot for sequence in running}) == len(running) <= self.plan.limits.num_req_slots
        slots = [sequence.slot for sequence in running] + self.slots.free
        assert sorted(slots) == list(range(2, self.num_slots + 2))
        num_running = Counter(sequence.job for sequence in running if sequence in self.plan._running)
        assert all(sequence.job.num_running == num_running[sequence.job] for sequence in self.rows)
        assert scheduled <= set(running)


@pytest.mark.parametrize("seed", rest_slow(range(40 if IS_LONG else 16), 8))
def test_random_arrivals_and_ends(seed: int) -> None:
    checked = Checked(seed)
    for _ in range(300):
        event = checked.rng.random()
        if event < 0.15:
            checked.submit()
        elif event < 0.2:
            checked.cancel()
        checked.step()
    while checked.rows:
        checked.step()
    assert not checked.plan.has_work
    assert not checked.plan.admission.interactive._clients and not checked.plan.admission.batch._clients
