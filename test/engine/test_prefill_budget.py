"""A step's prompt tokens between classes, clients and a client's jobs. No model."""

from __future__ import annotations

from collections import Counter

import pytest

from rwkv_batch.core.shares import BATCH_SHARE_DIVISOR, MIN_TOKENS_PER_JOB, split_budget
from test.engine.test_scheduler import job, read, scheduler


def test_prompts_of_interactive_rows_are_read_first_and_batch_prompts_get_a_quarter() -> None:
    plan, _ = scheduler(req_slots=64, budget=64, chunk=64)
    plan.add(*job(20, prompt_tokens=500, client="bulk"))
    plan.schedule()
    for number in range(6):
        plan.add(*job(1, prompt_tokens=500, client=f"chat{number}"))
    of_batch = []
    for _ in range(2 * BATCH_SHARE_DIVISOR):
        rows = plan.schedule()
        assert sum(row.num_tokens for row in rows) == 64
        of_batch.append(sum(row.num_tokens for row in rows if row.sequence.job.is_batch))
    assert of_batch == [0, 0, 0, 16] * 2, "a quarter of the steps, and of their tokens"


def test_batch_rows_skip_steps_until_an_interactive_row_has_its_first_token() -> None:
    plan, _ = scheduler(req_slots=64, budget=64, chunk=64, decode_budget=16)
    plan.add(*job(20, client="bulk"))
    read(plan.schedule())
    decoding = plan.schedule()
    assert len(decoding) == 20
    read(decoding)
    chat, chat_rows = job(1, prompt_tokens=120, client="chat")
    plan.add(chat, chat_rows)
    sizes = []
    for _ in range(3):
        rows = plan.schedule()
        sizes.append([row.num_tokens for row in rows])
        read(rows)
    assert sizes == [[64], [56], [1] * 21], "its prompt is read without batch rows, then all rows run together"
    plan.add(*job(1, prompt_tokens=500, client="other"))
    with_batch = []
    for _ in range(8):
        rows = plan.schedule()
        assert chat_rows[0] in [row.sequence for row in rows], "interactive rows that decode are in every step"
        with_batch.append(any(row.sequence.job.is_batch for row in rows))
        read(rows)
    assert with_batch == [False, False, False, True] * 2, "a long prompt does not block batch rows for ever"


def test_batch_rows_skip_no_step_for_a_row_that_jumps_forward() -> None:
    """It has its first token and reads jump-forward text."""
    plan, _ = scheduler(req_slots=64, budget=64, chunk=16)
    plan.add(*job(20, client="bulk"))
    chat, chat_rows = job(1, prompt_tokens=5, client="chat")
    plan.add(chat, chat_rows)
    for _ in range(3):
        read(plan.schedule())
    chat_rows[0].token_ids += range(40)
    chat_rows[0].uncounted_ids = [*range(40)]
    for _ in range(3):
        rows = plan.schedule()
        assert chat_rows[0] in [row.sequence for row in rows if row.num_tokens > 1 or row.samples_token]
        assert sum(row.sequence.job.is_batch for row in rows) == 20
        read(rows)


@pytest.mark.parametrize(("decoding", "reading", "tokens"), [(4, 8, 64), (8, 4, 16)])
def test_a_burst_is_read_in_long_steps(decoding: int, reading: int, tokens: int) -> None:
    """More rows wait for their first token than decode."""
    plan, _ = scheduler(req_slots=64, budget=64, chunk=64, decode_budget=16)
    for client, count in (("early", decoding), ("late", reading)):
        for _ in range(count):
            plan.add(*job(1, prompt_tokens=20, client=client))
        for _ in range(2 if client == "early" else 0):
            read(plan.schedule())
    rows = plan.schedule()
    assert sum(row.num_tokens for row in rows if not row.uses_device_token) == tokens


def test_a_burst_of_batch_rows_does_not_delay_decoding_rows() -> None:
    plan, _ = scheduler(req_slots=64, budget=64, chunk=64, decode_budget=16)
    plan.add(*job(2, prompt_tokens=20))
    for _ in range(2):
        read(plan.schedule())
    plan.add(*job(20, prompt_tokens=20, client="bulk"))
    assert sum(row.num_tokens for row in plan.schedule() if not row.uses_device_token) == 16


def test_a_burst_beside_batch_prompts_is_read_in_short_steps() -> None:
    plan, _ = scheduler(req_slots=64, budget=64, chunk=64, decode_budget=16)
    plan.add(*job(2, prompt_tokens=20, client="early"))
    for _ in range(2):
        read(plan.schedule())
    plan.add(*job(4, prompt_tokens=20, client="late"))
    plan.add(*job(20, prompt_tokens=20, client="bulk"))
    assert sum(row.num_tokens for row in plan.schedule() if not row.uses_device_token) == 16


@pytest.mark.parametrize(
    ("decoding", "jobs", "tokens", "hung", "waits"),
    [
        (0, 1, 4, 0, False),  # a lone request
        (0, 2, 4, 0, True),
        (4, 4, 4, 0, False),  # more rows would wait than start
        (4, 5, 4, 0, True),
        (0, 4, 16, 0, False),  # a full step
        (0, 10, 4, 0, False),  # no running slot is left
        (0, 1, 4, 4, False),  # rows that the last step left waiting
    ],
)
def test_a_step_waits_for_more_of_a_burst(decoding: int, jobs: int, tokens: int, hung: int, waits: bool) -> None:
    plan, slots = scheduler(req_slots=10, budget=64)
    for count in (decoding, hung):
        for _ in range(count):
            one, rows = job(1)
            slots.blocked.update(rows if count == hung else ())
            plan.add(one, rows)
        for _ in range(2):
            read(plan.schedule())
    assert not plan.is_burst()
    for _ in range(jobs):
        plan.add(*job(1, prompt_tokens=tokens))
    assert plan.is_burst() == waits


def test_a_step_does_not_wait_after_a_job_of_several_rows() -> None:
    plan, _ = scheduler()
    plan.add(*job(4))
    assert not plan.is_burst()
    plan.add(*job(1))
    assert plan.is_burst()


def test_tokens_that_a_client_leaves_go_to_the_others() -> None:
    plan, _ = scheduler(req_slots=64, budget=128, chunk=16)
    plan.add(*job(1, prompt_tokens=4, client="short"))
    plan.add(*job(8, prompt_tokens=100, client="long"))
    assert sum(row.num_tokens for row in plan.schedule()) == 128


def test_a_step_does_not_wait_for_more_batch_rows() -> None:
    plan, _ = scheduler(req_slots=64)
    plan.add(*job(20, client="bulk"))
    assert not plan.is_burst()


def test_clients_share_the_prompt_budget() -> None:
    plan, _ = scheduler(req_slots=64, budget=64, chunk=64)
    for _ in range(10):
        plan.add(*job(1, prompt_tokens=500, client="many"))
    plan.add(*job(1, prompt_tokens=500, client="one"))
    tokens: Counter[str] = Counter()
    for _ in range(10):
        for row in plan.schedule():
            tokens[row.sequence.job.client] += row.num_tokens
    assert tokens == {"many": 320, "one": 320}


def test_shares_of_a_budget_are_whole_tokens() -> None:
    rows = [job(1, prompt_tokens=500, client=client)[1][0] for client in "abc"]
    step = split_budget(rows, 100, lambda _: 500, 0)
    assert [(rows.index(row), count) for row, count in step] == [(0, 33), (1, 33), (2, 33)]
    assert all(type(count) is int for _, count in step)
    rotated = split_budget(rows, 100, lambda row: 5 if row is rows[1] else 500, 2)
    assert [(rows.index(row), count) for row, count in rotated] == [(2, 33), (0, 33), (1, 5)]
    two = job(2, prompt_tokens=500, client="a")[1]
    assert [count for _, count in split_budget([*two, rows[1]], 100, lambda _: 500, 0)] == [50, 50]
    assert split_budget(rows, 0, lambda _: 500, 0) == [] == split_budget([], 100, lambda _: 500, 0)


@pytest.mark.parametrize(("clients", "jobs"), [(10, 1), (1, 2), (3, 2), (7, 3), (1, 40)])
def test_prompt_tokens_are_shared_evenly_over_time(clients: int, jobs: int) -> None:
    """Clients get equal amounts, and so do the jobs of one client.

    This holds even if a step's budget is too small for all.
    """
    budget = 128
    running = [
        job(1, prompt_tokens=10_000, client=f"client {number % clients}")[1][0] for number in range(clients * jobs)
    ]
    per_row: Counter[int] = Counter()
    for turn in range(clients * jobs * 12):
        step = split_budget(running, budget, lambda _: 500, turn)
        assert budget - clients * jobs < sum(count for _, count in step) <= budget
        assert len({id(row) for row, _ in step}) == len(step)
        maximum = max(MIN_TOKENS_PER_JOB, budget // clients // jobs)
        assert all(count <= maximum for _, count in step)
        for row, count in step:
            per_row[running.index(row)] += count
    assert len(per_row) == len(running)
    assert max(per_row.values()) - min(per_row.values()) <= 2 * budget
