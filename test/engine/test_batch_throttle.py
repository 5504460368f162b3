"""Batch work per step next to interactive requests. The tests count rows, tokens and steps. No model."""

from __future__ import annotations

from collections import Counter

from rwkv_batch.core.scheduler import ScheduledRow, Scheduler
from rwkv_batch.core.sequence import Sequence
from rwkv_batch.core.shares import (
    BATCH_SHARE_DIVISOR,
    INTERACTIVE_WINDOW_S,
    MAX_PREFILL_DELAY_STEPS,
    MAX_ROWS_IN_PIECES,
    MAX_TOKENS_IN_PIECES,
    TOKENS_PER_ROW,
    Limits,
)
from test.engine.test_scheduler import Slots, job, read

MAX_BATCH_ROWS = 8


class Steps:
    """A scheduler with a manual clock."""

    def __init__(
        self, max_batch_rows: int = MAX_BATCH_ROWS, req_slots: int = 64, budget: int = 256, has_pieces: bool = False
    ) -> None:
        self.slots = Slots(500)
        limits = Limits(req_slots, 10_000, budget, budget, budget, max_batch_rows_with_interactive=max_batch_rows)
        self.plan = Scheduler(limits, self.slots, has_pieces)
        self.number = 0
        self.now = 1000.0

    def step(self) -> list[ScheduledRow]:
        rows = self.plan.schedule(now=self.now)
        read(rows)
        for row in rows:
            row.sequence.last_sample_step = self.number if row.samples_token else row.sequence.last_sample_step
        self.number += 1
        return rows

    def batch(self, rows: int, prompt_tokens: int = 1) -> list[Sequence]:
        running, sequences = job(rows, prompt_tokens, client="bulk")
        self.plan.add(running, sequences)
        return sequences

    def chat(self, prompt_tokens: int = 1) -> Sequence:
        running, (sequence,) = job(1, prompt_tokens, client="chat")
        self.plan.add(running, [sequence])
        return sequence


def of_batch(rows: list[ScheduledRow]) -> list[ScheduledRow]:
    return [row for row in rows if row.sequence.job.is_batch]


def test_batch_rows_take_turns_while_an_interactive_row_is_there() -> None:
    steps = Steps()
    bulk = steps.batch(60)
    assert len(steps.step()) == 60, "alone, all batch rows are in every step"
    chat = steps.chat()
    turns: Counter[Sequence] = Counter()
    for _ in range(60):
        rows = steps.step()
        assert chat in [row.sequence for row in rows], "interactive rows are in every step"
        assert len(of_batch(rows)) == MAX_BATCH_ROWS
        turns.update(row.sequence for row in of_batch(rows))
    assert set(turns) == set(bulk)
    assert max(turns.values()) - min(turns.values()) <= 2, "60 steps of 8 rows: each of 60 had 8, or one more or less"


def test_steps_stay_short_for_a_while_after_the_last_interactive_row() -> None:
    """A request between two steps would wait for the running one."""
    steps = Steps()
    steps.batch(60)
    chat = steps.chat()
    steps.step()
    steps.plan.remove(chat)
    for after, rows in (
        (0.0, MAX_BATCH_ROWS),
        (INTERACTIVE_WINDOW_S - 0.1, MAX_BATCH_ROWS),
        (INTERACTIVE_WINDOW_S, 60),
        (INTERACTIVE_WINDOW_S + 60.0, 60),
    ):
        steps.now = 1000.0 + after
        assert len(steps.step()) == rows, after


def test_an_interactive_row_that_waits_for_its_session_keeps_steps_short() -> None:
    steps = Steps()
    steps.batch(60)
    steps.step()
    steps.slots.blocked.add(steps.chat())
    for _ in range(3):
        assert len(steps.step()) == MAX_BATCH_ROWS
        steps.now += INTERACTIVE_WINDOW_S


def test_batch_prompts_get_half_of_a_short_step() -> None:
    steps = Steps()
    steps.batch(30)
    steps.step()
    steps.batch(20, prompt_tokens=1000)
    chat = steps.chat()
    for _ in range(8):
        rows = steps.step()
        decoding = [row for row in of_batch(rows) if row.num_tokens == 1]
        tokens = sum(row.num_tokens for row in of_batch(rows)) - len(decoding)
        assert (len(decoding), tokens) == (MAX_BATCH_ROWS // 2, MAX_BATCH_ROWS // 2 * TOKENS_PER_ROW)
    steps.plan.remove(chat)
    steps.now += INTERACTIVE_WINDOW_S
    rows = steps.step()
    assert sum(row.num_tokens for row in rows) == 30 + 256, "alone, batch prompts use the whole step"


def test_batch_prompts_get_a_whole_short_step_without_decoding_rows() -> None:
    steps = Steps()
    steps.chat()
    steps.batch(20, prompt_tokens=1000)
    steps.step()
    assert sum(row.num_tokens for row in of_batch(steps.step())) == MAX_BATCH_ROWS * TOKENS_PER_ROW


def test_an_interactive_prompt_gets_the_rest_of_a_short_step() -> None:
    steps = Steps()
    steps.batch(12)
    steps.step()
    steps.batch(20, prompt_tokens=1000)
    chat = steps.chat(prompt_tokens=10_000)
    both = 0
    for _ in range(2 * BATCH_SHARE_DIVISOR):
        rows = steps.step()
        decoding = sum(row.num_tokens == 1 for row in of_batch(rows))
        assert sum(row.num_tokens for row in rows) - decoding == 256, "the whole budget is used"
        both += {row.sequence for row in rows} > {chat}
    assert both == 2, "one step in four has batch rows too"


def test_the_shortest_step_contains_batch_work() -> None:
    steps = Steps(max_batch_rows=1)
    bulk = steps.batch(12)
    steps.batch(12, prompt_tokens=50)
    steps.chat()
    for _ in range(60):
        rows = steps.step()
        assert of_batch(rows)
    assert all(len(sequence.token_ids) > 1 for sequence in bulk)


def test_all_rows_decode_in_every_step_where_there_is_no_limit() -> None:
    steps = Steps(max_batch_rows=0)
    steps.batch(59)
    steps.chat()
    for _ in range(3):
        assert len(steps.step()) == 60


def test_consecutive_requests_do_not_count_as_one_long_prompt() -> None:
    """Batch rows run in every fourth step of one request's wait.

    The request waits for its first token. The steps of four requests' waits do not add up.
    """
    steps = Steps()
    steps.batch(60)
    for _ in range(2 * BATCH_SHARE_DIVISOR):
        chat = steps.chat(prompt_tokens=40)
        assert not of_batch(steps.step()), "a step without batch rows reads the whole prompt"
        assert of_batch(steps.step())
        steps.plan.remove(chat)


def seconds(rows: list[ScheduledRow]) -> float:
    """Measured seconds of a step of the demo model on two cores. Rows that sample take most."""
    if not rows:
        return 0.0
    return 0.0033 + sum(0.00031 if one.num_tokens == 1 else 0.00008 * one.num_tokens for one in rows)


def first_token_s(steps: Steps, part: float) -> float:
    """Return the seconds to the first token of a request. The request arrives when this part of a step is left."""
    running = seconds(steps.step())
    chat, waited = steps.chat(prompt_tokens=61), running * part
    while len(chat.token_ids) == 61:
        waited += seconds(steps.step())
    steps.plan.remove(chat)
    return waited


def test_a_first_token_waits_at_most_for_a_short_step() -> None:
    alone = first_token_s(Steps(), 0.0)
    longest = {}
    for rows in (0, MAX_BATCH_ROWS):
        steps = Steps(rows)
        steps.batch(60)
        steps.chat()
        steps.step()
        longest[rows] = max(first_token_s(steps, part / 20) for part in range(21))
    assert longest[0] > alone + 0.020
    assert longest[MAX_BATCH_ROWS] < alone + 0.007


def test_prompts_of_batch_rows_are_gathered_where_steps_have_pieces() -> None:
    """A prefill loads all weights, for few tokens as for many."""
    steps = Steps(max_batch_rows=0, req_slots=96, budget=1024, has_pieces=True)
    steps.batch(12)
    steps.step()
    late = steps.batch(9, prompt_tokens=3)
    assert late[0] in [row.sequence for row in steps.step()], "alone, batch prompts are read at once"
    chat = steps.chat()
    steps.step()
    late = steps.batch(9, prompt_tokens=3)
    read_in = [late[0] in [row.sequence for row in steps.step()] for _ in range(MAX_PREFILL_DELAY_STEPS)]
    assert read_in == [False] * (MAX_PREFILL_DELAY_STEPS - 1) + [True]
    steps.batch(9, prompt_tokens=3)
    steps.step()
    late = steps.batch(16, prompt_tokens=MAX_TOKENS_IN_PIECES // 16)
    assert late[0] in [row.sequence for row in steps.step()], "enough tokens are queued"
    steps.plan.remove(chat)
    steps.now += INTERACTIVE_WINDOW_S
    late = steps.batch(9, prompt_tokens=3)
    assert late[0] in [row.sequence for row in steps.step()], "no interactive request is left"


def test_prompts_of_batch_rows_are_read_at_once_where_none_decodes() -> None:
    steps = Steps(max_batch_rows=0, req_slots=96, budget=1024, has_pieces=True)
    chat = steps.chat(prompt_tokens=3)
    steps.step()
    steps.plan.remove(chat)
    late = steps.batch(9, prompt_tokens=3)
    assert late[0] in [row.sequence for row in steps.step()]


def test_a_step_without_pieces_reads_the_prompts_of_any_number_of_batch_rows() -> None:
    steps = Steps(max_batch_rows=0, req_slots=192, budget=1024)
    steps.chat()
    steps.step()
    steps.batch(3 * MAX_ROWS_IN_PIECES, prompt_tokens=8)
    assert len(of_batch(steps.step())) == 3 * MAX_ROWS_IN_PIECES


def prompts_of_batch(rows: list[ScheduledRow], before: list[Sequence]) -> list[ScheduledRow]:
    """Return new batch rows with more than one token to read."""
    return [row for row in of_batch(rows) if row.sequence not in before and row.num_tokens > 1]


def test_a_step_in_pieces_reads_no_more_prompts_of_batch_rows_than_graphs_hold() -> None:
    steps = Steps(max_batch_rows=0, req_slots=192, budget=1024, has_pieces=True)
    bulk = steps.batch(12)
    chat = steps.chat()
    steps.step()
    few, many = steps.batch(9, prompt_tokens=200), []
    while any(sequence.num_uncomputed_tokens > 1 for sequence in few):
        many.append(sum(row.num_tokens for row in prompts_of_batch(steps.step(), bulk)))
    assert max(many) == MAX_TOKENS_IN_PIECES
    bulk += few
    short = steps.batch(100, prompt_tokens=8)
    read = [prompts_of_batch(steps.step(), bulk) for _ in range(3 * MAX_PREFILL_DELAY_STEPS)]
    assert max(map(len, read)) == MAX_ROWS_IN_PIECES and {row.sequence for rows in read for row in rows} == set(short)
    steps.plan.remove(chat)
    steps.now += INTERACTIVE_WINDOW_S
    bulk += short
    steps.batch(9, prompt_tokens=200)
    assert sum(row.num_tokens for row in prompts_of_batch(steps.step(), bulk)) == 1024, "no interactive request is left"
