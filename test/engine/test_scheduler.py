"""Rows per step: admission, fairness between jobs, prompt budgets. No model."""

from __future__ import annotations

from collections import Counter
from typing import cast

from rwkv_batch.core.output import RowOutput, StopRules
from rwkv_batch.core.scheduler import ScheduledRow, Scheduler
from rwkv_batch.core.sequence import PENDING, Phase, RunningJob, Sequence, SharedSlot
from rwkv_batch.core.shares import Limits
from rwkv_batch.request import GenerateRequest, Job
from sampling.grammar.matcher import Matcher
from sampling.params import SamplingParams

TABLE = [b""] * 300


class Slots:
    """A limited number of slots. Rows in `blocked` are not ready."""

    def __init__(self, count: int) -> None:
        self.free = list(range(2, count + 2))
        self.blocked: set[Sequence] = set()

    def is_ready(self, sequence: Sequence) -> bool:
        return sequence not in self.blocked

    def allocate(self) -> int | None:
        return self.free.pop() if self.free else None

    def prepare(self, sequence: Sequence) -> None:
        sequence.prompt_end = sequence.sampled_start = len(sequence.token_ids)

    def add_spare(self, sequence: Sequence) -> None:
        if (slot := self.allocate()) is not None:
            sequence.spare_slot = slot

    def preempt(self, sequence: Sequence) -> None:
        pass


def scheduler(
    req_slots: int = 16, slots: int = 100, budget: int = 64, chunk: int = 16, decode_budget: int = 0
) -> tuple[Scheduler, Slots]:
    source = Slots(slots)
    return Scheduler(Limits(req_slots, 10_000, budget, chunk, decode_budget or budget), source), source


def job(
    rows: int, prompt_tokens: int = 1, client: str = "", was_admitted: bool = False
) -> tuple[RunningJob, list[Sequence]]:
    """A job and its rows: batch work above eight rows."""
    request = GenerateRequest(prompt=[1] * prompt_tokens, max_tokens=9, sampling=SamplingParams())
    spec = Job(job_id="j", rows=[request] * rows, client=client, was_admitted=was_admitted)
    running = RunningJob(spec, lambda events: None, {}, rows)
    output = [RowOutput(i, request, StopRules(request, TABLE), TABLE) for i in range(rows)]
    return running, [Sequence(running, i, request, list(request.prompt), output[i]) for i in range(rows)]


def per_job(rows: list[ScheduledRow]) -> Counter[RunningJob]:
    return Counter(row.sequence.job for row in rows)


def read(rows: list[ScheduledRow]) -> None:
    for row in rows:
        row.sequence.num_computed_tokens += row.num_tokens
        if row.samples_token:
            row.sequence.token_ids.append(7)


def test_jobs_share_free_running_slots_evenly() -> None:
    plan, _ = scheduler(req_slots=16)
    jobs = [job(100), job(100), job(100)]
    for running, rows in jobs:
        plan.add(running, rows)
    assert sorted(per_job(plan.schedule()).values()) == [5, 5, 5]  # one running slot stays reserved


def test_running_slots_and_state_slots_are_limits() -> None:
    plan, _ = scheduler(req_slots=8, slots=3)
    plan.add(*job(10))
    assert len(plan.schedule()) == 3 and plan.admission.waiting_rows == 7
    alone, _ = scheduler(req_slots=1)
    alone.add(*job(2))
    assert len(alone.schedule()) == 1


def test_a_freed_running_slot_is_used_in_the_next_step() -> None:
    plan, slots = scheduler(req_slots=2)
    running, rows = job(3)
    plan.add(running, rows)
    first = plan.schedule()
    plan.remove(first[0].sequence)
    slots.free.append(first[0].sequence.slot)
    assert first[0].sequence.phase is Phase.DONE
    assert {row.sequence for row in plan.schedule()} >= {rows[1]}


def test_prompts_are_read_in_chunks_within_the_budget() -> None:
    plan, _ = scheduler(budget=40, chunk=16)
    plan.add(*job(1, prompt_tokens=50))
    sizes = []
    for _ in range(4):
        rows = plan.schedule()
        sizes.append([(row.num_tokens, row.samples_token) for row in rows])
        read(rows)
    assert sizes == [[(16, False)], [(16, False)], [(16, False)], [(2, True)]]


def test_prompt_budget_is_shared_between_jobs() -> None:
    plan, _ = scheduler(req_slots=32, budget=64, chunk=16)
    bulk, bulk_rows = job(8, prompt_tokens=500)
    quick, quick_rows = job(1, prompt_tokens=20)
    plan.add(bulk, bulk_rows)
    plan.add(quick, quick_rows)
    rows = plan.schedule()
    assert sum(row.num_tokens for row in rows) == 64
    assert per_job(rows)[quick] == 1
    read(rows)
    assert any(row.sequence.job is quick and row.samples_token for row in plan.schedule())


def test_decoding_rows_are_in_every_step_with_any_prefill() -> None:
    plan, _ = scheduler(req_slots=32, budget=16, chunk=16)
    plan.add(*job(4))
    decoding = plan.schedule()
    read(decoding)
    plan.add(*job(10, prompt_tokens=100))
    for _ in range(5):
        rows = plan.schedule()
        assert {row.sequence for row in decoding} <= {row.sequence for row in rows}
        read(rows)


def test_rows_decode_in_the_order_of_their_slots() -> None:
    plan, slots = scheduler(budget=8)
    slots.free = [4, 9, 2, 7]
    plan.add(*job(4))
    read(plan.schedule())
    assert [row.sequence.slot for row in plan.schedule()] == [2, 4, 7, 9]


def test_rows_with_two_slots_keep_their_order() -> None:
    """A session's row alternates between two slots. This must not change the order."""
    plan, slots = scheduler(budget=8)
    slots.free = [5, 2]
    plan.add(*job(2))
    read(plan.schedule())
    first, second = (row.sequence for row in plan.schedule())
    first.spare_slot, second.spare_slot = 9, 6
    for _ in range(4):
        assert [row.sequence for row in plan.schedule()] == [first, second]
        first.slot, first.spare_slot = first.spare_slot, first.slot


def test_fewer_prompt_tokens_are_read_while_rows_decode() -> None:
    plan, _ = scheduler(budget=64, decode_budget=20, chunk=64)
    plan.add(*job(1, prompt_tokens=70))
    sizes = []
    for turn in range(6):
        if turn == 2:
            plan.add(*job(1, prompt_tokens=50))
        rows = plan.schedule()
        sizes.append([row.num_tokens for row in rows])
        read(rows)
    assert sizes == [[64], [6], [1, 20], [1, 20], [1, 10], [1, 1]]


def test_a_cache_point_ends_a_chunk() -> None:
    plan, _ = scheduler(chunk=16, budget=64)
    running, rows = job(1, prompt_tokens=40)
    rows[0].cache_points = [10]
    plan.add(running, rows)
    assert plan.schedule()[0].num_tokens == 10


def test_rows_of_a_busy_session_do_not_block_others() -> None:
    plan, slots = scheduler()
    running, rows = job(2)
    slots.blocked.add(rows[0])
    plan.add(running, rows)
    assert [row.sequence for row in plan.schedule()] == [rows[1]]
    slots.blocked.clear()
    assert {row.sequence for row in plan.schedule()} == set(rows)


def test_continuations_go_first() -> None:
    plan, _ = scheduler(req_slots=2, slots=1)
    plan.add(*job(1))
    _, children = job(1)
    plan.add_forked(children)
    assert [row.sequence for row in plan.schedule()] == children


def test_shared_prompts_never_hold_all_running_slots() -> None:
    plan, _ = scheduler(req_slots=16)
    for _ in range(10):
        running, rows = job(1, prompt_tokens=5)
        rows[0].may_sample = False
        plan.add(running, rows)
    plain, plain_rows = job(1)
    plan.add(plain, plain_rows)
    rows = plan.schedule()
    assert sum(not row.sequence.may_sample for row in rows) == 2 and plain_rows[0] in {row.sequence for row in rows}


def shared_prompt(plan: Scheduler, client: str) -> Sequence:
    running, rows = job(1, prompt_tokens=5, client=client)
    rows[0].may_sample = False
    plan.add(running, rows)
    return rows[0]


def continuation(plan: Scheduler, slots: Slots, client: str) -> None:
    """Add a continuation that waits for something else."""
    _, rows = job(1, client=client)
    rows[0].shared = SharedSlot(7, lambda: None)
    slots.blocked.update(rows)
    plan.add_forked(rows)


def test_a_client_reads_no_further_shared_prompt_while_its_continuations_wait() -> None:
    plan, slots = scheduler(req_slots=16)
    continuation(plan, slots, "a")
    shared_prompt(plan, "a")
    other = shared_prompt(plan, "b")
    assert [row.sequence for row in plan.schedule()] == [other]


def test_shared_prompts_whose_continuations_wait_are_limited() -> None:
    plan, slots = scheduler(req_slots=16)
    for number in range(plan.limits.max_held_shared_prefixes - 1):
        continuation(plan, slots, f"client {number}")
    for client in ("new", "newer"):
        shared_prompt(plan, client)
    assert len(plan.schedule()) == 1, "one more, not two"


def test_long_prompts_take_turns() -> None:
    plan, _ = scheduler(req_slots=16, budget=64, chunk=512)
    plan.add(*job(1, prompt_tokens=10_000))
    read(plan.schedule())
    for _ in range(5):
        plan.add(*job(1, prompt_tokens=10_000))
    quick, quick_rows = job(1, prompt_tokens=7)
    plan.add(quick, quick_rows)
    for _ in range(7):
        read(plan.schedule())
    assert quick_rows[0].num_uncomputed_tokens <= 1, "a short prompt waits at most one turn of every other job"


def test_left_over_prompts_do_not_wait_for_their_group() -> None:
    """Decoding rows alternate in two groups.

    Prompts join the first group's steps, or any step if some are left over.
    """
    plan = Scheduler(Limits(64, 10_000, 16, 16, 16, groups=2), Slots(200))
    decoding = [job(1)[1][0] for _ in range(2)]
    for sequence in decoding:
        plan.add(sequence.job, [sequence])
    for _ in range(2):
        read(plan.schedule())
    for number in range(40):
        plan.add(*job(1, prompt_tokens=40, client=f"c{number}"))
    for _ in range(4):
        rows = plan.schedule()
        assert sum(row.sequence in decoding for row in rows) == 1, "one group decodes"
        assert sum(row.num_tokens for row in rows) == 1 + 16, "and prompts are read in each step"
        read(rows)


def test_removing_a_job_empties_the_queue() -> None:
    plan, _ = scheduler(req_slots=2)
    running, rows = job(5)
    plan.add(running, rows)
    plan.schedule()
    assert len(plan.remove_waiting(running)) == 4  # one runs, one running slot is reserved
    assert plan.admission.waiting_rows == 0 and len(plan.running_of(running)) == 1


def test_a_row_has_answered_only_after_its_turn_closed() -> None:
    plan, _ = scheduler()
    running, rows = job(2)
    plan.add(running, rows)
    plan.schedule()
    for row in rows:
        row.output.append_token(ord("a"))
    cancelled, closing = rows
    plan.remove(cancelled)
    assert (cancelled.phase, cancelled.has_answered) == (
        Phase.DONE,
        False,
    )  # although it has sampled and has no request slot
    closing.phase = Phase.CLOSING
    plan.release_req_slot(closing)
    assert closing.has_answered and closing.is_in_steps
    plan.remove(closing)
    assert (closing.phase, closing.has_answered, closing.is_in_steps) == (Phase.ANSWERED, True, False)


def test_only_a_sampled_token_is_read_from_the_device() -> None:
    """After a jump forward, the row's request slot lacks its last token."""
    plan, _ = scheduler(chunk=4)
    plan.add(*job(1, prompt_tokens=3))
    (first,) = plan.schedule()
    assert not first.uses_device_token
    read([first])
    row = first.sequence
    row.matcher = cast(Matcher, object())  # only constrained rows jump forward
    (sampled,) = plan.schedule()
    assert sampled.uses_device_token
    read([sampled])
    row.token_ids += [5, 6, 7, 8]
    row.uncounted_ids = [5, 6, 7, 8]
    sizes = []
    for _ in range(2):
        (step,) = plan.schedule()
        sizes.append((step.num_tokens, step.samples_token, step.uses_device_token))
        read([step])
    assert sizes == [(4, False, False), (1, True, False)]
    row.token_ids[-1] = PENDING  # it samples before its sampler has counted the run
    assert plan.schedule()[0].uses_device_token
    row.token_ids[-1], row.uncounted_ids = 7, []
    assert plan.schedule()[0].uses_device_token


def test_a_row_whose_last_token_is_in_flight_is_in_no_further_step() -> None:
    plan, _ = scheduler()
    running, (row,) = job(1)
    plan.add(running, [row])
    for step in range(row.request.max_tokens):
        (scheduled,) = plan.schedule(oldest=step)
        row.num_computed_tokens += scheduled.num_tokens
        row.token_ids.append(PENDING)
        row.last_sample_step = step
    assert plan.schedule(oldest=row.request.max_tokens) == []
