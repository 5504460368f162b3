"""Decides who is in which step: who has a place (`Admission`), which rows decode, which prompts are read. No torch.

Decoding rows are in every step, and while there are some, fewer prompt tokens are read, because the next token of each
waits until the step ends; batch rows take turns in steps while interactive requests come (`BatchThrottle`). Prompt tokens
are shared out as places are: between classes, clients and jobs.

Micro-batches. Over several devices the rows that decode are dealt into groups, each with steps of its own, so that one
group is on the second device while the next is on the first. A row keeps its group while it decodes, new rows go to
the smallest, and a group that has become much larger than the others gives rows away. Prompts ride with the steps of
the first group that has rows (of more than two stages with every fifth of them while they are few), and with every step
while there are more of them than a step takes; beside few rows that decode, where they share a graph, with every step,
since a group that read all of them would be the one that the others wait for.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

from rwkv_batch.core.admission import Admission
from rwkv_batch.core.batch_throttle import BatchThrottle, awaits_first_token
from rwkv_batch.core.limits import BATCH_PART, Limits
from rwkv_batch.core.mask_time import MaskTimeBalancer
from rwkv_batch.core.prefill_budget import split_budget
from rwkv_batch.core.sequence import NO_SLOT, NOTHING_SCORED, PENDING, Phase, RunningJob, Sequence
from rwkv_batch.core.slot_source import SlotSource

MAX_PREFILL_DELAY_TURNS = 5
"""Few prompts wait at most until so many steps of the first group have come since prompts were read."""


@dataclass(slots=True)
class ScheduledRow:
    """A sequence's part in one step."""

    sequence: Sequence
    num_tokens: int
    samples: bool
    """whether a token is drawn after it"""
    uses_device_token: bool = False
    """whether it reads the token that it drew last, which its seat still holds on the device, and draws"""
    ends: bool = False
    """whether it is the end of a row that only reads"""
    lowest_slot: int = NO_SLOT
    """of one that decodes: see `Sequence.lowest_slot`"""
    max_num_ids: int = 0
    """of one that decodes: how long the row's `token_ids` are when its last draw is launched"""
    is_plain: bool = False
    """whether it feeds back and its sequence is plain (`Sequence.is_plain`): that has the same in all of its steps"""

    @property
    def scored(self) -> range:
        """Positions of the prompt whose log-probabilities this step tells; before it is launched."""
        sequence = self.sequence
        if not sequence.scored:
            return NOTHING_SCORED
        first = sequence.num_computed_tokens + 1
        return range(max(first, sequence.scored.start), min(first + self.num_tokens, sequence.scored.stop))


class Scheduler:
    """Rows waiting, running, paused. Owned by the engine thread."""

    def __init__(self, limits: Limits, slots: SlotSource, has_pieces: bool = False) -> None:
        """`has_pieces`: whether steps with batch rows can be launched in pieces."""
        self.limits = limits
        self._slots = slots
        self.admission = Admission(limits, slots, self)
        self._running: dict[Sequence, None] = {}
        """rows in the steps, those among them that have answered and still read (an ordered set)"""
        self._reading: dict[Sequence, None] = {}
        """running rows that have more than one token to read"""
        self._batch_throttle = BatchThrottle(limits, self.admission.interactive, self._reading, has_pieces)
        self.mask_time = MaskTimeBalancer(limits)
        self._groups: list[dict[Sequence, ScheduledRow | None]] = [{} for _ in range(limits.groups)]
        """running rows that decode; of a plain one what it is in every step, once that is known"""
        self._next_group = 0
        """the group whose step is next"""
        self._turns_since_prefill = 0
        """turns of the first group since prompts went before its step"""
        self._has_prefill_left = False
        """whether prompts were left over by the last step that read some"""
        self._steps = 0
        self._reading_tokens = 0
        """that running rows had to read of their prompts before the last step"""

    @property
    def running_rows(self) -> int:
        """Rows in the steps."""
        return len(self._running)

    @property
    def has_recent_interactive(self) -> bool:
        """Whether batch rows of the step that was scheduled last run beside interactive requests that come."""
        return self._batch_throttle.has_recent_interactive

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that rows have to read, whether they wait or run."""
        admission = self.admission
        return self._reading_tokens + admission.interactive.waiting_tokens + admission.batch.waiting_tokens

    @property
    def has_work(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self._running or self.admission.waiting_rows or self.admission.paused_rows)

    def add(self, job: RunningJob, rows: list[Sequence]) -> None:
        """Rows that want to run."""
        self.admission.queue_of(job).add(job, rows)

    def add_forked(self, rows: list[Sequence]) -> None:
        """Continuations of a prompt that was read for them; they go before the client's others."""
        self.admission.queue_of(rows[0].job).add_forked(rows[0].job, rows)

    def forget_waiting(self, job: RunningJob) -> list[Sequence]:
        """Take back a job's waiting rows (it was cancelled)."""
        return self.admission.queue_of(job).remove_waiting(job)

    def running_of(self, job: RunningJob) -> list[Sequence]:
        """A job's rows in the steps."""
        return [sequence for sequence in self._running if sequence.job is job]

    def add_running(self, sequence: Sequence) -> None:
        """See `admission.RunningSet`."""
        self._running[sequence] = self._reading[sequence] = None

    def remove_running(self, sequence: Sequence) -> None:
        """See `admission.RunningSet`."""
        self._running.pop(sequence, None)
        self._reading.pop(sequence, None)
        for group in self._groups:
            group.pop(sequence, None)

    def schedule(self, oldest: int = 0, now: float = 0.0) -> list[ScheduledRow]:
        """The rows of the next step: those of a group that decode, and prompt chunks up to the budget.

        `oldest`: number of the oldest step whose tokens the host has not read; a row whose token is drawn in a later
        one waits, since the first device would wait for it. `now`: of time.monotonic.
        """
        self._steps += 1
        self.admission.admit()
        self._move_to_decode_groups()
        self._batch_throttle.begin(now)
        rows, group_index = self._decoding_rows(oldest)
        limits = self.limits
        self._reading_tokens = sum(sequence.num_uncomputed_tokens for sequence in self._reading)
        first = next((number for number, group in enumerate(self._groups) if group), 0)
        is_due = not rows or (group_index == first and self._is_prefill_due(len(rows)))
        if self._reading and (is_due or self._has_prefill_left or len(rows) <= limits.mixed_rows):
            skip_step = self._batch_throttle.skip_step()
            if skip_step:
                rows = [row for row in rows if not row.sequence.job.is_batch]
            budget = limits.max_prefill_tokens_with_decode if rows else limits.prefill_tokens_per_step
            rows += self._prefill_rows(budget, skip_step, beside=bool(rows))
        return rows

    def _is_prefill_due(self, rows: int) -> bool:
        """Whether prompts go before this step of the first group, in which so many rows decode: few tokens wait until
        more have come or `MAX_PREFILL_DELAY_TURNS`.

        The weights are read for them alone, which takes as long as a step of fifty rows. As many tokens as the group
        has rows take about as long as its step; a longer one would hold up the group behind it on every stage.
        """
        self._turns_since_prefill += 1
        enough = min(
            self.limits.min_gathered_prefill_tokens, rows
        )  # such a step takes a stage no longer than one of the group
        is_due = self._turns_since_prefill >= MAX_PREFILL_DELAY_TURNS or self._reading_tokens >= enough
        if is_due and self._reading:
            self._turns_since_prefill = 0
        return is_due

    def schedule_interactive_prefill(self, running_jobs: Collection[RunningJob]) -> list[ScheduledRow]:
        """The rows of a step between two pieces of another one: prompts of interactive rows whose first token is
        awaited, but of no job that has rows in the other step. Nor scored prompts: what steps tell of one is told in
        the order in which they are concluded, and this step is before others that are in flight.
        """
        self.admission.admit()
        reading = [
            s
            for s in self._reading
            if awaits_first_token(s) and not (s.members or s.scored) and s.job not in running_jobs
        ]
        chunks = split_budget(reading, self.limits.max_prefill_tokens_with_decode, self._chunk, self._steps)
        return [_chunk_row(sequence, count) for sequence, count in chunks]

    def _move_to_decode_groups(self) -> None:
        """Rows that have one token left to read decode from now on, in the smallest group."""
        for sequence in [s for s in self._reading if s.num_uncomputed_tokens == 1 and not s.is_prefill_only]:
            del self._reading[sequence]
            min(self._groups, key=len)[sequence] = None

    def _decoding_rows(self, oldest: int) -> tuple[list[ScheduledRow], int]:
        """The rows of the next group that has any to run, and which group that is."""
        for group_index in range(self._next_group, self._next_group + len(self._groups)):
            group = self._groups[group_index % len(self._groups)]
            self._rebalance_groups(group)
            rows = self._ready_rows(group, oldest)
            sequences = [row.sequence for row in rows]
            active_rows = self.mask_time.active_rows(sequences)
            if active_rows:
                decode_rows = self._batch_throttle.decode_rows(active_rows)
                self._next_group = (group_index + 1) % len(self._groups)
                if decode_rows is not sequences:
                    chosen = set(decode_rows)
                    rows = [row for row in rows if row.sequence in chosen]
                rows.sort(key=attrgetter("lowest_slot"))  # neighbours in memory are read faster
                return rows, group_index % len(self._groups)
        return [], 0

    def _ready_rows(self, group: dict[Sequence, ScheduledRow | None], oldest: int) -> list[ScheduledRow]:
        """A group's rows that may run. Those that have more to read than a token, turns that close, leave it."""
        ready, closing = [], []
        for sequence, row in group.items():
            ids = sequence.token_ids
            if row is not None:  # as `Sequence.may_run`, of one that always has a token to read
                if (sequence.last_sample_step <= oldest and len(ids) < row.max_num_ids) or ids[-1] != PENDING:
                    ready.append(row)
            elif len(ids) - sequence.num_computed_tokens > 1:
                closing.append(sequence)
            elif self._may_run(sequence, oldest) if sequence.lease is not None else sequence.may_run(oldest):
                ready.append(_decoding_row(sequence, group))
        for sequence in closing:
            del group[sequence]
            self._reading[sequence] = None
        return ready

    def _rebalance_groups(self, group: dict[Sequence, ScheduledRow | None]) -> None:
        """Give rows to the smallest groups once this one is larger than its share by an eighth, and by two rows."""
        share = -(-sum(map(len, self._groups)) // len(self._groups))
        if len(group) - share <= max(1, share // 8):
            return
        for sequence in list(islice(reversed(group), len(group) - share)):
            min(self._groups, key=len)[sequence] = group.pop(sequence)

    def _may_run(self, sequence: Sequence, oldest: int) -> bool:
        if sequence.lacks_spare_slot:
            self._slots.add_spare(sequence)
        return sequence.may_run(oldest)

    def _prefill_rows(self, budget: int, skip_step: bool, beside: bool) -> list[ScheduledRow]:
        """Prompt chunks within the budget: interactive rows first, but batch rows get their part. `beside` others that
        decode."""
        reading = [sequence for sequence in self._reading if sequence.num_uncomputed_tokens > 0]
        interactive = [sequence for sequence in reading if not sequence.job.is_batch]
        batch = [sequence for sequence in reading if sequence.job.is_batch and not skip_step]
        if beside and not self._batch_throttle.prefill_now(sum(map(self._chunk, batch))):
            batch = []
        wanted = sum(map(self._chunk, batch)) if interactive else 0
        kept = min(wanted, self._batch_throttle.max_prefill_tokens(budget // BATCH_PART))
        first = split_budget(interactive, budget - kept, self._chunk, self._steps)
        rest = self._batch_throttle.max_prefill_tokens(budget - sum(count for _, count in first))
        batch_chunks = split_budget(batch, rest, self._chunk, self._steps)
        chunks = [*first, *batch_chunks[: self._batch_throttle.max_prefill_rows(len(batch_chunks))]]
        self._has_prefill_left = len(chunks) < len(reading)
        return [_chunk_row(sequence, count) for sequence, count in chunks]

    def _chunk(self, sequence: Sequence) -> int:
        """Tokens to read next: up to the chunk size, stopping at a border worth caching.

        Members of a mixture read them too, in the same step, and share what a row may read.
        """
        limit = min(sequence.num_uncomputed_tokens, max(1, self.limits.prefill_chunk // (1 + len(sequence.members))))
        if sequence.cache_points:
            limit = min(limit, sequence.cache_points[0] - sequence.num_computed_tokens)
        return limit

    def release_req_slot(self, sequence: Sequence) -> None:
        """The row draws no more; it may stay in the steps to read what its session must contain."""
        self.admission.release_req_slot(sequence)

    def remove(self, sequence: Sequence) -> None:
        """The row leaves the steps. Its slot is the caller's to give back."""
        self.admission.release_req_slot(sequence)
        self.remove_running(sequence)
        sequence.phase = Phase.ANSWERED if sequence.has_answered else Phase.DONE


def _decoding_row(sequence: Sequence, group: dict[Sequence, ScheduledRow | None]) -> ScheduledRow:
    """A row that reads a token and draws, unless it closes; noted in its group if it is the same from now on."""
    uses_device_token = sequence.samples and sequence.req_slot_holds_last_token
    is_plain = uses_device_token and sequence.is_plain
    max_num_ids = sequence.prompt_end + sequence.request.max_tokens
    row = ScheduledRow(
        sequence, 1, sequence.samples, uses_device_token, False, sequence.lowest_slot, max_num_ids, is_plain
    )
    if is_plain:
        group[sequence] = row
    return row


def _chunk_row(sequence: Sequence, count: int) -> ScheduledRow:
    """A prompt's part: after its last token the row draws, or ends."""
    is_last = count == sequence.num_uncomputed_tokens
    ends = is_last and sequence.is_prefill_only
    return ScheduledRow(sequence, count, samples=is_last and sequence.samples and not ends, ends=ends)
