"""When rows draft: costs by measurement, acceptance, and what pays, without an engine."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rwkv_batch.core.draft_costs import (
    ADDED_S,
    FIRST_PROBES,
    HOST_DRAFT_S,
    HOST_S,
    PROBE_SHARE,
    Candidate,
    Choice,
    Chooser,
    ProbeBudget,
    Shape,
    StepTimes,
    best_length,
)
from rwkv_batch.core.drafters import (
    MAX_DRAFT_TOKENS,
    MAX_ROWS,
    Acceptance,
    Draft,
    LookupDrafter,
    ModelDrafter,
    RowDrafter,
    Wanted,
)
from rwkv_batch.core.job_table import JobTable
from rwkv_batch.core.scheduler import ScheduledRow
from rwkv_batch.core.sequence import PENDING, Phase
from rwkv_batch.core.speculation import Speculation
from state_pool.cache.slots import DraftSlots, Slots
from state_pool.layout import FIRST_FREE_SLOT
from test.harness import make_request


def test_a_draft_is_as_long_as_it_pays() -> None:
    assert best_length(0.0, 0.1) == best_length(0.9, 5.0) == (0, 0.0)
    lengths = [best_length(rate, 0.1)[0] for rate in (0.3, 0.5, 0.7, 0.9, 1.0)]
    assert lengths == sorted(lengths) and lengths[-1] == MAX_DRAFT_TOKENS


def test_times_are_medians_without_the_first_step() -> None:
    """On a CPU. The first step of a kind may compile something, others wait for something else."""
    times = StepTimes()
    plain, drafts = Shape(4, 4, 4), Shape(8, 24, 20)
    for seconds in (60.0, 0.010, 0.011, 0.010, 3.0):
        assert not times.plain_s(plain) or times.plain_s(plain) <= 0.011
        times.count_plain(plain, seconds)
    assert times.plain_s(plain) == times.plain_s(Shape(7, 7, 7)) == 0.010, "that of the nearest size"
    assert times.drafts_s(drafts, 0.010) == pytest.approx(0.0125), "low, so that drafts are tried"
    for seconds in (60.0, 0.030, 0.031, 0.029, 5.0):
        times.count_drafts(drafts, 0.010, seconds, 0.0)
    for _ in range(4):
        times.count_plain(plain, 0.010)
    assert times.drafts_s(drafts, 0.010) == pytest.approx(0.030), "a few other steps make no time too old"


def test_the_host_hides_nothing_without_graphs() -> None:
    """There the layers have run before the step is launched."""
    times, drafts = StepTimes(), Shape(8, 24, 20)
    for _ in range(4):
        times.count_plain(Shape(4, 4, 4), 0.010)
        times.count_drafts(drafts, 0.010, 0.030, 0.004, is_first=True, host_s=0.028)
    assert times.drafts_s(drafts, 0.010, 0.004) == pytest.approx(0.030)


def test_times_of_graphs_are_known() -> None:
    times = StepTimes(gpu_graph_s)
    assert times.plain_s(Shape(4, 4, 4)) == 0.00195
    assert times.drafts_s(Shape(5, 5, 4, 1), 0.00197) == pytest.approx(0.00216 + ADDED_S + HOST_S + HOST_DRAFT_S)
    assert times.drafts_s(Shape(64, 600, 500), 0.00197) == 0, "it fits no graph"
    for _ in range(4):
        times.count_plain(Shape(4, 4, 4), 0.00215)
    assert times.plain_s(Shape(4, 4, 4)) == pytest.approx(0.00215), "the host's work counts, as with drafts"


@pytest.mark.parametrize(
    ("rates", "num_drafts"), [((0.7,) * 4, 4), ((0.7, 0.0, 0.0, 0.0), 1), ((0.15, 0.0, 0.0, 0.0), 0)]
)
def test_rows_draft_if_their_drafts_pay(rates: tuple[float, ...], num_drafts: int) -> None:
    """All rows share what a step with drafts takes longer. Probes that show nothing become rare."""
    slots: Any = SimpleNamespace(allocate=lambda count: [5] * count, free=lambda _: None, num_free=999)
    speculation = Speculation("auto", slots, lambda _: None, graph_s=gpu_graph_s)
    numbers = [
        sum(row.sequence.draft is not None for row in speculation.add_drafts([predicted(one) for one in rates]))
        for _ in range(1200)
    ]
    usual, probes = Counter(numbers).most_common()[0], [one for one in numbers if one != num_drafts]
    assert usual[0] == num_drafts
    assert len(probes) <= (40 if num_drafts == 1 else 14), "each costs up to half a step, next to other drafts less"


def test_unlucky_drafts_end_nothing() -> None:
    """Without drafts nothing is learnt, so they begin at a higher rate than they end at."""
    slots: Any = SimpleNamespace(allocate=lambda count: [5] * count, free=lambda _: None, num_free=999)
    rates = [percent / 100 for percent in range(80, 0, -1)]

    def drafts(speculation: Speculation, rate: float) -> bool:
        speculation._probes.steps = -1.0
        return speculation.add_drafts([row := predicted(rate)]) and row.sequence.draft is not None

    lasting = Speculation("auto", slots, lambda _: None, graph_s=gpu_graph_s)
    end = next(rate for rate in rates if not drafts(lasting, rate))
    begin = next(
        rate for rate in rates if not drafts(Speculation("auto", slots, lambda _: None, graph_s=gpu_graph_s), rate)
    )
    assert begin > end


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_certain_rates_are_possible(rate: float) -> None:
    """Old drafts fade until nothing but accepted ones is left."""
    slots: Any = SimpleNamespace(allocate=lambda count: [5] * count, free=lambda _: None, num_free=999)
    speculation = Speculation("auto", slots, lambda _: None, graph_s=gpu_graph_s)
    for number in (1, 4):
        rows = [predicted(rate) for _ in range(number)]
        for row in rows:
            row.sequence.drafters[0].pool.accepted, row.sequence.drafters[0].pool.rejected = rate, 1 - rate
        drafts = [row.sequence.draft for row in speculation.add_drafts(rows)]
        assert rate == 0 or [len(one.tokens) for one in drafts if one is not None] == [3] * number


def test_lengths_are_planned_while_the_step_before_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device waits for what the host does between two steps. Other rows need other lengths."""
    slots: Any = SimpleNamespace(allocate=lambda count: [5] * count, free=lambda _: None, num_free=999)
    speculation, num_chosen, best = Speculation("auto", slots, lambda _: None, graph_s=gpu_graph_s), 0, Chooser.best

    def counted(chooser: Chooser, min_gain: float) -> Choice:
        nonlocal num_chosen
        num_chosen += 1
        return best(chooser, min_gain)

    def lengths(rows: list[Any]) -> list[int]:
        for row in rows:
            row.sequence.draft = None
        return [len(row.sequence.draft.tokens) for row in speculation.add_drafts(rows)]

    monkeypatch.setattr(Chooser, "best", counted)
    rows = [predicted(0.9) for _ in range(4)]
    first = lengths(rows)
    assert first == [3] * 4 and num_chosen == 1
    speculation.plan_next()
    assert num_chosen == 2
    assert lengths(rows[::-1]) == first and num_chosen == 2, "the order of rows changes"
    assert lengths(rows) == first and num_chosen == 3, "nothing was planned"
    speculation.plan_next()
    assert lengths(rows[:3]) == first[:3] and num_chosen == 5, "a row has left"
    speculation.plan_next()
    rows[0].sequence.request = make_request("", max_tokens=2)
    assert lengths(rows[:3]) == [1, 3, 3] and num_chosen == 6, "its text ends"


def test_a_plan_holds_for_one_step() -> None:
    """The next one is made when the outcome of its drafts is known."""
    slots: Any = SimpleNamespace(allocate=lambda count: [5] * count, free=lambda _: None, num_free=999)
    speculation = Speculation("auto", slots, lambda _: None, graph_s=gpu_graph_s)
    rows = [predicted(0.9) for _ in range(4)]
    speculation.add_drafts(rows)
    speculation.plan_next()
    assert speculation._planned
    for row in rows:
        row.sequence.draft, pool = None, row.sequence.drafters[0].pool
        pool.accepted, pool.rejected = pool.rejected, pool.accepted
    speculation._probes.steps = -1.0
    for has_drafts in (True, False):
        speculation.add_drafts(rows)
        assert all(bool(row.sequence.draft) == has_drafts for row in rows)
        for row in rows:
            row.sequence.draft = None
        speculation.plan_next()


@pytest.mark.parametrize("change", ["nothing", "prompt", "adapter", "drafter"])
def test_a_plan_holds_for_the_same_step_only(change: str) -> None:
    """With a prompt or an adapter, the planned drafts may fit no graph. Another drafter may be less often right."""
    slots: Any = SimpleNamespace(allocate=lambda count: [5] * count, free=lambda _: None, num_free=999)
    speculation = Speculation("auto", slots, lambda _: None, graph_s=gpu_graph_s)
    rows = [predicted(0.9) for _ in range(4)]
    speculation.add_drafts(rows)
    speculation.plan_next()
    for row in rows:
        row.sequence.draft = None
    if change == "prompt":
        rows.append(replace(predicted(0.0), num_tokens=122, samples_token=False))
    elif change == "adapter":
        rows[0].sequence.adapter = object()
        for _ in range(4):
            speculation._measured.count_plain(Shape(4, 4, 4), 0.0001)  # for which a step with drafts is too slow
            speculation._measured.count_drafts(Shape(16, 16, 16, 4), 0.0001, 0.01, 0.0)
    elif change == "drafter":
        for row in rows:
            row.sequence.drafters = predicted(0.01).sequence.drafters
    speculation._probes.steps = -1.0
    speculation.add_drafts(rows)
    assert [row.sequence.draft is not None for row in rows[:4]] == [change == "nothing"] * 4


def test_a_probe_next_to_drafts_that_pay_does_not_end_them() -> None:
    """They continue while they gain little: the next ones need not gain enough for a begin."""
    slots: Any = SimpleNamespace(allocate=lambda count: [5] * count, free=lambda _: None, num_free=999)
    for budget in (-1.0, 4.0):
        speculation = Speculation("auto", slots, lambda _: None, graph_s=gpu_graph_s)
        rows = [predicted(0.9), *[predicted(0.0) for _ in range(3)]]
        speculation._probes.steps = budget
        for _ in range(2):
            for row in rows:
                row.sequence.draft = None
            speculation.add_drafts(rows)
        assert [row.sequence.draft is not None for row in rows] == [True] + [budget > 0] * 3
        assert speculation._are_paying


def test_rows_that_begin_to_match_are_not_bound_by_a_plan() -> None:
    slots: Any = SimpleNamespace(allocate=lambda count: [5] * count, free=lambda _: None, num_free=999)
    speculation = Speculation("auto", slots, lambda _: None, graph_s=gpu_graph_s)
    rows = [predicted(0.9) for _ in range(4)]
    late = rows[0].sequence
    late.has_sampled, late.request = False, make_request("", speculation="off")
    speculation.add_drafts(rows)
    assert late.draft is None
    speculation.plan_next()
    late.request = make_request("", max_tokens=40)
    for row in rows:
        row.sequence.draft = None
    speculation._probes.steps = -1.0
    speculation.add_drafts(rows)
    assert [len(row.sequence.draft.tokens) for row in rows] == [3] * 4


def predicted(rate: float) -> Any:
    """Return a row whose prediction is right with this chance."""
    return row_that_decodes(
        RowDrafter(LookupDrafter("prediction", [1, 2, 3], start=1), Acceptance(1e6 * rate, 1e6 * (1 - rate)))
    )


class FakeSequence(SimpleNamespace):
    __hash__ = object.__hash__
    __eq__ = object.__eq__


def row_that_decodes(drafter: RowDrafter, max_tokens: int = 40) -> Any:
    sequence = FakeSequence(
        draft=None,
        members=[],
        scored=None,
        cache_points=[],
        drafters=[drafter],
        shared=None,
        token_ids=[7],
        prompt_end=1,
        request=make_request("", max_tokens=max_tokens),
        read_slot=3,
        write_slot=3,
        slot=3,
        has_sampled=True,
        adapter=None,
    )
    return ScheduledRow(sequence, 1, samples_token=True)  # type: ignore[arg-type]


def test_drafts_count_after_the_next_launch() -> None:
    """Between two steps the device waits for the host. A row that ends counts at once: its usage is reported."""
    slots: Any = SimpleNamespace(free=lambda _: None)
    speculation = Speculation("auto", slots, lambda _: None)
    drafter = RowDrafter(ModelDrafter(), speculation.pool("model"))
    sequence: Any = SimpleNamespace(lease=None, phase=Phase.RUNNING, shared=None, slot=1, draft=None)
    counted = []
    for end in (lambda: None, speculation.plan_next, lambda: speculation.drop(sequence), speculation.status):
        sequence.draft = Draft(drafter, [1] * 3, 0, slots=[4, 5, 6], num_accepted=2)
        speculation.settle(sequence)
        end()
        counted.append((drafter.num_drafted, drafter.num_accepted, *speculation.totals["model"]))
    assert counted == [(0, 0, 0, 0), (6, 4, 6, 4), (9, 6, 9, 6), (12, 8, 12, 8)]


def test_tokens_after_a_wrong_one_say_nothing_of_new_rows() -> None:
    """A drafter whose tokens are right with 0.9 gets half of sixteen accepted."""
    slots, rng = SimpleNamespace(free=lambda _: None), random.Random(0)
    speculation = Speculation("auto", slots, lambda _: None)  # type: ignore[arg-type]
    drafter = RowDrafter(ModelDrafter(), speculation.pool("model"))
    for _ in range(300):
        accepted = next((i for i in range(16) if rng.random() > 0.9), 16)
        sequence = SimpleNamespace(draft=Draft(drafter, [1] * 16, 0, num_accepted=accepted))
        speculation.drop(sequence)  # type: ignore[arg-type]
    assert speculation.pool("model").rate == pytest.approx(0.9, abs=0.03)


DECODE_MS, GUESS_MS = {1: 1.93, 4: 1.95, 8: 2.05, 32: 2.83}, {1: 0.17, 4: 0.19, 8: 0.21, 32: 0.39}
VERIFY_MS = {3: 2.07, 4: 2.12, 5: 2.16, 6: 2.19, 7: 2.22, 9: 2.53, 13: 2.64, 17: 2.75, 24: 2.68, 32: 2.81, 40: 3.08}
VERIFY_MS |= {48: 3.16, 56: 3.3, 64: 3.44, 80: 4.09, 96: 4.43, 112: 4.7, 128: 5.02}
"""By rows and by tokens: graphs of a 7.2B model in int8 and of a 0.1B draft on an H200."""


def of_size(graphs: dict[int, float], rows: int) -> float:
    return graphs[min(one for one in graphs if one >= rows)]


def gpu_graph_s(shape: Shape) -> float:
    if shape.rows == shape.tokens and not shape.drafts:
        return of_size(DECODE_MS, shape.rows) / 1000
    return of_size(VERIFY_MS, shape.tokens) / 1000 if shape.tokens <= max(VERIFY_MS) else 0.0


class SimulatedGpu:
    """Answers with the times of a GPU. Steps take longer now and then; the noise is counted apart."""

    host_ms = (0.1, 0.0)
    """of a step with drafts, and of each of its rows"""
    first_ms = 0.0
    """of one after a step without drafts, besides"""
    hidden_ms = 0.0
    """of the host, while the device guesses"""

    def __init__(self, rate: float, seed: int, has_graphs: bool = True) -> None:
        self.rate, self.rng = rate, random.Random(seed)
        self.clock, self.noise, self.lengths = 100.0, 0.0, Counter[int]()
        slots: Any = SimpleNamespace(allocate=lambda count: [5] * count, free=lambda _: None, num_free=999)
        self.has_graphs = has_graphs
        self.speculation = Speculation("auto", slots, lambda _: None, self, gpu_graph_s if has_graphs else None)

    def graph_s(self, num_rows: int) -> float:
        return of_size(GUESS_MS, num_rows) / 1000 if self.has_graphs else 0.0

    def guess(self, wanted: list[Wanted]) -> Any:
        unread = [one.length - one.drafter.num_read - max(0, len(one.drafter.guesses) - 1) for one in wanted]
        reading_ms = 0.5 * (max(unread) > 2)
        behind = [int(one == 2) for one in unread]
        num_steps = max(max(one.num_tokens for one in wanted) + min(behind), max(behind) + 1)
        for one, later in zip(wanted, behind, strict=True):
            one.drafter.num_read, one.drafter.guesses = one.length, [7] * min(one.num_tokens, num_steps - later)
        seconds = of_size(GUESS_MS, len(wanted)) / 1000 * num_steps
        self.lengths[num_steps] += 1
        self.pass_time(max(1000 * seconds, self.hidden_ms) + reading_ms)
        return SimpleNamespace(seconds=seconds, num_steps=num_steps)

    def pass_time(self, ms: float) -> None:
        noise = self.rng.expovariate(30) + (self.rng.random() < 0.01) * self.rng.expovariate(0.2)
        self.clock += (ms + noise) / 1000
        self.noise += noise / 1000

    def speed(self, num_rows: int, tokens: int = 192) -> float:
        """Return how many times as fast as without drafts the rows' answers are, until the first one ends."""
        drafters = [RowDrafter(ModelDrafter(), self.speculation.pool("model")) for _ in range(num_rows)]
        rows = [row_that_decodes(one, tokens) for one in drafters]
        began, self.noise, (host_ms, row_ms), had_drafts = self.clock, 0.0, self.host_ms, False
        while max(len(row.sequence.token_ids) for row in rows) <= tokens:
            scheduled = [ScheduledRow(row.sequence, 1, samples_token=True) for row in rows]
            launched = self.clock
            self.speculation.add_drafts(scheduled)
            drafts = [row.sequence.draft for row in scheduled]
            num_drafted = sum(len(one.tokens) for one in drafts if one is not None)
            shape = Shape(*[num_rows + num_drafted] * 3, drafts=num_rows - drafts.count(None))
            added_ms = host_ms + row_ms * num_rows + (0 if had_drafts else self.first_ms) if num_drafted else 0.02
            had_drafts = num_drafted > 0
            self.pass_time(1000 * gpu_graph_s(shape) + added_ms)
            for row, draft in zip(rows, drafts, strict=True):
                sequence = row.sequence
                sequence.token_ids.append(7)
                if draft is not None:
                    right = [self.rng.random() < self.rate for _ in draft.tokens]
                    draft.num_accepted = next((n for n, one in enumerate(right) if not one), len(right))
                    sequence.token_ids += [7] * draft.num_accepted
                    self.speculation.drop(sequence)
            self.speculation.count_step(scheduled, launched, num_drafted, self.hidden_ms / 1000)
        sampled = sum(len(row.sequence.token_ids) - 1 for row in rows) / num_rows
        plain_s = sampled * (gpu_graph_s(Shape(num_rows, num_rows, num_rows)) + 0.00002)
        return plain_s / (self.clock - began - self.noise)


@pytest.mark.parametrize(
    ("num_rows", "rate", "least"),
    [
        (1, 0.0, 0.99),
        (4, 0.0, 0.985),
        (8, 0.0, 0.985),
        (1, 0.5, 0.98),
        (1, 0.7, 1.3),
        (1, 0.9, 2.0),
        (1, 1.0, 4.0),
        (4, 0.7, 1.08),
        (4, 0.9, 1.55),
        (8, 0.5, 0.98),
        (8, 0.9, 1.15),
        (8, 1.0, 2.5),
    ],
)
def test_drafts_pay_with_the_times_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, num_rows: int, rate: float, least: float
) -> None:
    """Also in the first answer of a service, which shows the acceptance."""
    gpu = SimulatedGpu(rate, seed=2)
    monkeypatch.setattr("rwkv_batch.core.speculation.time", SimpleNamespace(monotonic=lambda: gpu.clock))
    first, *others = [gpu.speed(num_rows) for _ in range(3)]
    assert first > 0.96
    assert sum(others) / len(others) > least, others


def test_many_rows_keep_short_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """They gain a tenth at most, so a cost that is counted twice or a few unlucky steps would end all drafts."""
    gpu = SimulatedGpu(0.7, seed=2)
    gpu.hidden_ms = 0.75
    monkeypatch.setattr("rwkv_batch.core.speculation.time", SimpleNamespace(monotonic=lambda: gpu.clock))
    speeds = [gpu.speed(32) for _ in range(4)]
    assert sum(speeds) / 4 > 1.05, speeds


def test_rows_that_are_a_little_less_predictable_draft_too() -> None:
    rows = [Candidate(i, rate, math.log(rate), 16, is_guessed=True) for i, rate in enumerate((0.72, *[0.7] * 31))]
    chooser = Chooser(StepTimes(gpu_graph_s), Shape(32, 32, 32), 0.00283, 0.00039, rows)
    assert chooser.best(0.0).lengths == dict.fromkeys(range(32), 1)


def test_a_draft_accepts_only_new_tokens() -> None:
    draft = Draft(predicted(0.9).sequence.drafters[0], [1, 2, 3], start=1)
    for num_accepted, ids, accepts in (
        (0, [7], False),
        (0, [7, 1], True),
        (1, [7, 1], False),
        (1, [7, 1, 2], True),
        (1, [7, 1, 9], False),
        (1, [7, 1, 2, 3], True),
        (1, [7, 1, 2, 3, 4], False),
    ):
        draft.num_accepted = num_accepted
        assert draft.accepts(ids) == accepts, ids


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_row_continues_from_the_state_after_its_last_accepted_token(count: int) -> None:
    freed = list[int]()
    sequence = predicted(0.9).sequence
    sequence.draft = Draft(sequence.drafters[0], [1, 2], start=1, slots=[8, 9], num_accepted=count)
    sequence.lease, sequence.phase, sequence.num_computed_tokens = None, Phase.RUNNING, 1
    slots: Any = SimpleNamespace(free=freed.extend)
    Speculation("auto", slots, lambda _: None).settle(sequence)
    assert (sequence.slot, sequence.num_computed_tokens) == ([3, 8, 9][count], 1 + count)
    assert sorted([sequence.slot, *freed]) == [3, 8, 9]


def test_a_step_does_not_end_the_draft_of_a_later_one() -> None:
    """With several devices, a row that reads its prompt in one step gets a draft in the next, before the first ends."""
    freed = list[int]()
    slots: Any = SimpleNamespace(allocate=lambda count: [5] * count, free=freed.extend, num_free=9)
    speculation = Speculation("ngram", slots, lambda _: None)
    row = predicted(0.9)
    earlier = replace(row, samples_token=False)
    table: Any = SimpleNamespace(_speculation=speculation)
    assert speculation.add_drafts([row]) and (draft := row.sequence.draft)
    row.sequence.lease = None
    JobTable.settle_drafts(table, [earlier])
    assert row.sequence.draft is draft and not freed
    JobTable.settle_drafts(table, [row])
    assert row.sequence.draft is None and freed == draft.slots


@pytest.mark.parametrize(("num_free", "lengths"), [(3, [0] * 4), (4, [1] * 4), (11, [2] * 4), (40, [3] * 4)])
def test_rows_share_few_slots(num_free: int, lengths: list[int]) -> None:
    slots = Slots(FIRST_FREE_SLOT + 50)
    own = DraftSlots(slots, num_free)
    rows = [predicted(0.9) for _ in range(4)]
    speculation = Speculation("auto", own, lambda _: None, graph_s=gpu_graph_s)
    speculation.add_drafts(rows)
    drafts = [row.sequence.draft for row in rows]
    assert [len(one.tokens) if one else 0 for one in drafts] == lengths
    assert [len(one.slots) if one else 0 for one in drafts] == lengths
    assert own.num_free == num_free - sum(lengths) and slots.num_free == slots.num_usable == 50 - num_free
    assert speculation._launched is None or speculation._launched.size.tokens == 4 + sum(lengths)


@pytest.mark.parametrize(("lease", "is_held", "slot"), [(None, True, 9), (True, True, 3), (True, False, 9)])
def test_a_session_does_not_continue_from_text_that_may_be_a_stop(lease: Any, is_held: bool, slot: int) -> None:
    slots: Any = SimpleNamespace(free=lambda _: None)
    sequence = predicted(0.9).sequence
    sequence.draft = draft = Draft(sequence.drafters[0], [1, 2], start=1)
    draft.slots, draft.num_accepted = [8, 9], 2
    sequence.lease, sequence.phase, sequence.output = lease, Phase.RUNNING, SimpleNamespace(has_held_text=is_held)
    Speculation("auto", slots, lambda _: None).settle(sequence)
    assert sequence.slot == slot and sequence.draft is None


@pytest.mark.parametrize("more", [0, 1])
def test_large_steps_have_no_drafts(more: int) -> None:
    slots: Any = SimpleNamespace(allocate=lambda count: [5] * count, free=lambda _: None, num_free=999)
    rows = [predicted(0.9) for _ in range(MAX_ROWS + more)]
    Speculation("ngram", slots, lambda _: None).add_drafts(rows)
    assert [row.sequence.draft is None for row in rows] == [bool(more)] * len(rows)


def test_a_step_without_drafts_keeps_its_tokens_on_the_device() -> None:
    slots: Any = SimpleNamespace(num_free=0)
    rows = [replace(predicted(0.9), uses_device_token=True)]
    assert Speculation("ngram", slots, lambda _: None).add_drafts(rows) == rows, "no state slot is free"


def test_a_probe_budget_grows_from_the_first_step() -> None:
    budget = ProbeBudget()
    budget.add(are_paying=False)
    assert budget.steps == FIRST_PROBES + PROBE_SHARE


def test_two_steps_in_flight_are_not_measured() -> None:
    """With several pipeline stages: the figures of one are not those of the other."""
    slots: Any = SimpleNamespace(allocate=lambda count: [5] * count, free=lambda _: None, num_free=999)
    speculation = Speculation("auto", slots, lambda _: None, graph_s=gpu_graph_s)
    groups = [[predicted(0.99) for _ in range(number)] for number in (4, 1)]
    for rows in groups * 6:  # each is counted after the other one is begun
        speculation.add_drafts(rows)
        other = groups[0] if rows is groups[1] else groups[1]
        speculation.count_step(other, 0.0, 3 * len(other))
    assert speculation.times.figures()["added"] == {}
    for _ in range(6):
        speculation.add_drafts(groups[1])
        speculation.count_step(groups[1], 0.0, 3)
    assert list(speculation.times.figures()["added"]) == [Shape(2, 4, 4).tokens.bit_length()]


def test_a_step_alone_in_a_pipeline_is_measured() -> None:
    """Its row cannot run again yet, so the next step has no rows."""
    slots: Any = SimpleNamespace(allocate=lambda count: [5] * count, free=lambda _: None, num_free=999)
    speculation, row = Speculation("auto", slots, lambda _: None, graph_s=gpu_graph_s), predicted(0.99)
    for _ in range(6):
        assert speculation.add_drafts([row]) and not speculation.add_drafts([])
        speculation.count_step([row], 0.0, 3)
    assert speculation.times.figures()["added"]
    assert speculation._launched is None, "it would keep the row in memory"


def test_a_step_is_measured_without_the_rows_that_are_left_out() -> None:
    slots: Any = SimpleNamespace(allocate=lambda count: [5] * count, free=lambda _: None, num_free=999)
    speculation = Speculation("auto", slots, lambda _: None, graph_s=gpu_graph_s)
    rows = [predicted(0.99) for _ in range(3)]
    rows[0].sequence.token_ids = [7, PENDING]
    rows[0].sequence.drafters[0].drafter.propose([7], 1, 3)
    result = speculation.add_drafts(rows)
    assert result == rows[1:] and speculation._launched is not None
    assert speculation._launched.size == Shape(8, 8, 8, drafts=2)
    speculation.count_step(result, 0.0, 6)
    assert speculation._launched is None, "it is known by a row with a draft"


@pytest.mark.parametrize("graph_s", [gpu_graph_s, lambda _: 0.0], ids=["adapter", "failed capture"])
def test_steps_without_graphs_are_measured(graph_s: Callable[[Shape], float]) -> None:
    """A row with an adapter has no graph that verifies drafts. After a failed capture, no row has one."""
    slots: Any = SimpleNamespace(allocate=lambda count: [5] * count, free=lambda _: None, num_free=999)
    speculation = Speculation("auto", slots, lambda _: None, graph_s=graph_s)
    rows = [predicted(0.99), predicted(0.99)]
    if graph_s is gpu_graph_s:
        rows[0].sequence.adapter = object()
    assert speculation.add_drafts(rows) and rows[0].sequence.draft is None, "not known yet"
    for _ in range(5):
        speculation.count_step(rows, time.monotonic() - 0.001, 0)
    speculation.add_drafts(rows)
    assert all(row.sequence.draft is not None for row in rows)


@pytest.mark.parametrize(("num_rows", "rate"), [(1, 0.9), (4, 0.9), (8, 0.95)])
def test_slow_steps_are_forgotten(monkeypatch: pytest.MonkeyPatch, num_rows: int, rate: float) -> None:
    """The first steps with drafts take ten times as long: the host was busy."""
    gpu = SimulatedGpu(rate, seed=2)
    monkeypatch.setattr("rwkv_batch.core.speculation.time", SimpleNamespace(monotonic=lambda: gpu.clock))
    count, num_slow = gpu.speculation.count_step, 6

    def count_slow(rows: list[ScheduledRow], started: float, num_drafted: int, host_s: float) -> None:
        nonlocal num_slow
        if num_drafted and num_slow:
            gpu.clock, num_slow = gpu.clock + 0.025, num_slow - 1
        count(rows, started, num_drafted, host_s)

    gpu.speculation.count_step = count_slow  # type: ignore[method-assign]
    speeds = [gpu.speed(num_rows) for _ in range(8)]
    assert min(speeds[-3:]) > 1.2, speeds


def test_a_choice_counts_all_of_its_time() -> None:
    """Rows whose texts are less predictable draft less. After a whole draft, the model first reads its last token."""
    rows = [Candidate(i, rate, math.log(rate), 16, is_guessed=True) for i, rate in enumerate((0.9, 0.5))]
    chooser = Chooser(StepTimes(gpu_graph_s), Shape(2, 2, 2), 0.00217, 0.00035, rows)
    choice = chooser.evaluate({0: 2})
    assert choice.num_tokens == pytest.approx(2 + 0.9 + 0.81)
    assert choice.size == Shape(4, 4, 4, drafts=1)
    assert choice.seconds == pytest.approx(gpu_graph_s(choice.size) + ADDED_S + 0.00035 * 2.81)
    lengths = chooser.best(0.0).lengths
    assert lengths[0] > 2 * lengths.get(1, 0) > 0


def test_rows_whose_last_token_is_read_first_draft_less() -> None:
    """Unless all rows must, a draft accepted whole costs the next one a token. A draft of one token costs a step."""
    rows = [Candidate(i, 0.9, math.log(0.9), 16, is_guessed=True) for i in range(8)]
    chooser = Chooser(StepTimes(gpu_graph_s), Shape(8, 8, 8), 0.00205, 0.0004, rows)
    choice = chooser.evaluate(dict.fromkeys(range(8), 2))
    shorter = (1 - 0.81**7) * 0.81
    assert choice.size == Shape(*[8 + 16 - int(8 * shorter)] * 3, drafts=8)
    assert choice.num_tokens == pytest.approx(8 * (1 + 0.9 + 0.81 - 0.81 * shorter))
    ones = chooser.evaluate(dict.fromkeys(range(8), 1))
    assert ones.seconds == pytest.approx(gpu_graph_s(ones.size) + ADDED_S + 0.0004 * (2 - 0.1**8))


@pytest.mark.parametrize(("guesses_s", "host_s"), [(0.0004, 0.001), (0.001, 0.0004), (0.001, 0.0)])
def test_measured_steps_take_the_time_that_was_measured(guesses_s: float, host_s: float) -> None:
    """The device guesses while the host works: the longer of both counts, once."""
    times, shape = StepTimes(gpu_graph_s), Shape(16, 16, 16, drafts=8)
    for _ in range(4):
        times.count_drafts(shape, 0.00205, 0.005, guesses_s, host_s=host_s)
    assert times.drafts_s(shape, 0.00205, guesses_s) == pytest.approx(0.005)


def test_steps_whose_guesses_began_early_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model has guessed while the host processed the tokens of the step before."""
    monkeypatch.setattr("rwkv_batch.core.speculation.time", SimpleNamespace(monotonic=lambda: 100.0))
    slots: Any = SimpleNamespace(allocate=lambda count: [5] * count, free=lambda _: None, num_free=999)
    model: Any = SimpleNamespace(graph_s=lambda _: 0.0004)
    speculation = Speculation("auto", slots, lambda _: None, model, graph_s=gpu_graph_s)
    rows = [row_that_decodes(RowDrafter(ModelDrafter(), Acceptance(1e6, 1.0))) for _ in range(2)]
    guessed: Any = SimpleNamespace(num_steps=5, seconds=0.0, read=lambda: [7] * 8)
    for _ in range(5):
        for i, row in enumerate(rows):
            drafter = row.sequence.drafters[0].drafter
            drafter.num_read = 1
            drafter.expect(4, guessed, range(4 * i, 4 * i + 4))
        speculation.add_drafts(rows)
        assert [row.draft.tokens for row in rows] == [[0] * 4] * 2
        launched = speculation._launched
        assert launched is not None and launched.size == Shape(10, 10, 10, drafts=2)
        speculation.count_step(rows, 100.0, 8)
    added = list(speculation.times.figures()["added"].values())
    assert added == [pytest.approx(-gpu_graph_s(launched.size) - 5 * 0.0004)], "the model's five steps count"


def test_guesses_that_the_host_hides_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device guesses while the host processes the tokens of the step before."""
    lengths, speeds = [], []
    for hidden_ms in (0.0, 2.4):
        gpu = SimulatedGpu(0.8, seed=3)
        gpu.hidden_ms = hidden_ms
        monkeypatch.setattr("rwkv_batch.core.speculation.time", SimpleNamespace(monotonic=lambda gpu=gpu: gpu.clock))
        speeds.append(sum(gpu.speed(4) for _ in range(4)) / 4)
        lengths.append(sum(gpu.lengths.elements()) / gpu.lengths.total())
    assert lengths[0] + 0.5 < lengths[1] and 1.3 < speeds[1] < speeds[0], (lengths, speeds)


def test_a_slow_host_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without drafts nothing shows that it is quick again."""
    gpu = SimulatedGpu(0.8, seed=3)
    monkeypatch.setattr("rwkv_batch.core.speculation.time", SimpleNamespace(monotonic=lambda: gpu.clock))
    for gpu.hidden_ms, least in ((0.0, 1.4), (20.0, 0.0), (0.0, 1.4)):
        speeds = [gpu.speed(4) for _ in range(8)]
        assert sum(speeds[-2:]) > 2 * least, (gpu.hidden_ms, speeds)


def test_steps_with_drafts_in_two_parts_are_measured() -> None:
    """A mixture decodes next to a row with drafts: its part says nothing of the step before."""
    slots: Any = SimpleNamespace(allocate=lambda count: [5] * count, free=lambda _: None, num_free=999)
    speculation = Speculation("auto", slots, lambda _: None, graph_s=gpu_graph_s)
    drafting, decoding = predicted(0.99), predicted(0.0)
    for _ in range(6):
        assert speculation.add_drafts([drafting]) and drafting.sequence.draft is not None
        speculation.count_step([decoding], 0.0, 0)
        speculation.count_step([drafting], 0.0, 3)
    assert speculation.times.figures()["added"]


def test_the_first_draft_says_nothing_of_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing hides what the host does for a draft after a step without one, as for most drafts of a wrong drafter."""
    gpu = SimulatedGpu(0.0, seed=3)
    gpu.first_ms = 1.5
    monkeypatch.setattr("rwkv_batch.core.speculation.time", SimpleNamespace(monotonic=lambda: gpu.clock))
    assert [gpu.speed(1) for _ in range(8)][-1] > 0.98
    gpu.rate = 0.7
    gpu.speculation._pools.clear()  # another drafter
    assert sum(gpu.speed(1) for _ in range(4)) / 4 > 1.3


@pytest.mark.parametrize("num_rows", [1, 4, 8])
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 0.7])
def test_drafts_cost_little_where_they_do_not_pay(monkeypatch: pytest.MonkeyPatch, num_rows: int, rate: float) -> None:
    """With the host work of a step with drafts that was measured on an H200."""
    gpu = SimulatedGpu(rate, seed=3)
    gpu.host_ms = 0.3, 0.08
    monkeypatch.setattr("rwkv_batch.core.speculation.time", SimpleNamespace(monotonic=lambda: gpu.clock))
    first, *others = [gpu.speed(num_rows) for _ in range(4)]
    assert first > 0.96
    assert min(others) > 0.96 and sum(others) / 3 > (1.2 if num_rows == 1 and rate == 0.7 else 0.98)


@pytest.mark.parametrize(("rate", "least"), [(0.0, 0.985), (0.7, 1.25), (1.0, 3.0)])
def test_drafts_pay_by_measured_times(monkeypatch: pytest.MonkeyPatch, rate: float, least: float) -> None:
    """As on a CPU. What guesses take is no cost of the step that verifies them."""
    gpu = SimulatedGpu(rate, seed=2, has_graphs=False)
    monkeypatch.setattr("rwkv_batch.core.speculation.time", SimpleNamespace(monotonic=lambda: gpu.clock))
    speeds = [gpu.speed(1) for _ in range(4)]
    assert min(speeds) > 0.95 and sum(speeds[1:]) / 3 > least, speeds
    guess_ms = 1000 * gpu.speculation.times.guess_s(1, 0.002, gpu.graph_s)
    assert 0.9 < guess_ms / GUESS_MS[1] < 1.2 or not rate
    assert gpu.speculation.times.drafts_s(Shape(2, 12, 10), 0.00197) < 0.0031
