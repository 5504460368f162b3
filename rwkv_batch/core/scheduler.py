"""Decides which rows are in which step. No torch.

- `Admission` gives out running slots. Rows with a running slot are in the steps.
- Decoding rows are in every step. While interactive requests arrive, batch rows take turns (`BatchThrottle`).
- A step with decoding rows reads fewer prompt tokens than one without: a long prefill would delay their next tokens.
  If more interactive rows read than rows decode, it reads as many.
- The prompt tokens of a step are split like running slots: first between classes, then clients, then jobs.

Micro-batches: with several devices, decoding rows are split into groups with steps of their own. One group runs on the
second device while the next runs on the first. A row stays in its group while it decodes. New rows join the smallest
group, and a group that is much larger than its share gives rows away.

Which group's steps carry prefill:
- The first non-empty group's. With three or more stages and little prefill queued, only every fifth of its steps.
- Every group's, if more prefill is queued than one step takes: else all groups would wait for the first one.
- Every group's with few decoding rows: one CUDA graph runs both.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

from rwkv_batch.core import shares
from rwkv_batch.core.admission import Admission, SlotSource
from rwkv_batch.core.drafters import Draft
from rwkv_batch.core.sequence import NO_SLOT, NOTHING_SCORED, PENDING, Phase, RunningJob, Sequence

MAX_PREFILL_DELAY_TURNS = 5
"""Steps of the first group for which little prefill may wait."""


@dataclass(slots=True)
class ScheduledRow:
    sequence: Sequence
    num_tokens: int
    samples_token: bool
    """whether a token is sampled after its last token"""
    uses_device_token: bool = False
    """whether the row's input token is read on the device, where the last step sampled it (by request slot)"""
    ends: bool = False
    """whether the row ends here because it only reads"""
    lowest_slot: int = NO_SLOT
    """for decoding rows: the lower of the row's state slots, by which a step sorts its rows"""
    max_num_ids: int = 0
    """for decoding rows: maximum length of `token_ids`; at this length nothing more is sampled"""
    is_plain: bool = False
    """whether the row uses no feature besides plain sampling (`Sequence.is_plain`)

    Then this object is reused in all its steps.
    """
    draft: Draft | None = None
    """drafted tokens that this step verifies. `Sequence.draft` may belong to a later step in flight."""

    @property
    def scored(self) -> range:
        """Prompt positions that this step scores. Read it before the step is launched."""
        sequence = self.sequence
        if not sequence.scored:
            return NOTHING_SCORED
        first = sequence.num_computed_tokens + 1
        return range(max(first, sequence.scored.start), min(first + self.num_tokens, sequence.scored.stop))


class Scheduler:
    """Waiting, running and paused rows. Owned by the engine's thread."""

    def __init__(self, limits: shares.Limits, slots: SlotSource, has_pieces: bool = False) -> None:
        """has_pieces: whether steps with batch rows can be launched in pieces of a few layers"""
        self.limits = limits
        self._slots = slots
        self.admission = Admission(limits, slots, self)
        self._running: dict[Sequence, None] = {}
        """rows in the steps, including answered rows that still read (an ordered set)"""
        self._reading: dict[Sequence, None] = {}
        """running rows with more than one token to read: prefill, in chunks"""
        self._batch_throttle = shares.BatchThrottle(limits, self.admission.interactive, self._reading, has_pieces)
        self.mask_time = shares.MaskTimeBalancer(limits)
        self._groups: list[dict[Sequence, ScheduledRow | None]] = [{} for _ in range(limits.groups)]
        """decoding rows by group; a plain row keeps its ScheduledRow"""
        self._next_group = 0
        self._turns_since_prefill = 0
        """steps of the first group since its last prefill"""
        self._has_rows_without_chunk = False
        """whether the last step with prefill left rows without a chunk"""
        self._steps = 0
        self._reading_tokens = 0
        """prompt tokens that running rows had left before the last step"""
        self._arrived_jobs = self._arrived_rows = 0
        """interactive ones, after the last step"""

    @property
    def running_rows(self) -> int:
        return len(self._running)

    @property
    def has_recent_interactive(self) -> bool:
        """Whether interactive rows existed shortly before the last scheduled step (`BatchThrottle`)."""
        return self._batch_throttle.has_recent_interactive

    @property
    def queued_tokens(self) -> int:
        admission = self.admission
        return self._reading_tokens + admission.interactive.waiting_tokens + admission.batch.waiting_tokens

    @property
    def has_work(self) -> bool:
        return bool(self._running or self.admission.waiting_rows or self.admission.paused_rows)

    def is_burst(self) -> bool:
        """Return whether the next step should wait for jobs that follow.

        Several interactive jobs have arrived after the last step, with more rows than decode, and a step can read more.
        """
        limits, num_decoding = self.limits, sum(map(len, self._groups))
        has_room = self.running_rows + self.admission.interactive.num_waiting < limits.max_running
        is_full = self.queued_tokens >= limits.prefill_tokens_per_step
        return self._arrived_jobs > 1 and self._arrived_rows > num_decoding and has_room and not is_full

    def add(self, job: RunningJob, rows: list[Sequence]) -> None:
        self.admission.queue_of(job).add(job, rows)
        if not job.is_batch:
            self._arrived_jobs, self._arrived_rows = self._arrived_jobs + 1, self._arrived_rows + len(rows)

    def add_forked(self, rows: list[Sequence]) -> None:
        """Queue continuations of a shared prompt, before the client's other rows."""
        self.admission.queue_of(rows[0].job).add_forked(rows[0].job, rows)

    def remove_waiting(self, job: RunningJob) -> list[Sequence]:
        return self.admission.queue_of(job).remove_waiting(job)

    def running_of(self, job: RunningJob) -> list[Sequence]:
        return [sequence for sequence in self._running if sequence.job is job]

    def add_running(self, sequence: Sequence) -> None:
        """Include a row in the next steps (`admission.RunningSet`). The row got a running slot."""
        self._running[sequence] = self._reading[sequence] = None

    def remove_running(self, sequence: Sequence) -> None:
        """Leave the row out of the next steps (`admission.RunningSet`)."""
        self._running.pop(sequence, None)
        self._reading.pop(sequence, None)
        for group in self._groups:
            group.pop(sequence, None)

    def forget_plain(self, sequence: Sequence) -> None:
        """Create the row's next `ScheduledRow` anew: its slots change."""
        for group in self._groups:
            if sequence in group:
                group[sequence] = None

    def schedule(self, oldest: int = 0, now: float = 0.0) -> list[ScheduledRow]:
        """Return the rows of the next step: a group's decoding rows, and prompt chunks up to the budget.

        oldest: number of the oldest step whose tokens the host has not read. A row whose last
        token is sampled in a later step is left out: the token is not on the first device yet.
        now: time.monotonic()
        """
        self._steps += 1
        self.admission.admit()
        self._arrived_jobs = self._arrived_rows = 0
        self._move_to_decode_groups()
        self._batch_throttle.begin(now)
        rows, group_index = self._decoding_rows(oldest)
        limits = self.limits
        self._reading_tokens = sum(sequence.num_uncomputed_tokens for sequence in self._reading)
        first = next((number for number, group in enumerate(self._groups) if group), 0)
        is_due = not rows or (group_index == first and self._is_prefill_due(len(rows)))
        if self._reading and (is_due or self._has_rows_without_chunk or len(rows) <= limits.mixed_rows):
            skips_batch = self._batch_throttle.skip_step()
            if skips_batch:
                rows = [row for row in rows if not row.sequence.job.is_batch]
            rows += self._prefill_rows(self._prefill_budget(len(rows)), skips_batch, with_decode=bool(rows))
        return rows

    def _prefill_budget(self, num_decoding: int) -> int:
        """Return the prompt tokens of a step with `num_decoding` decode rows.

        In a burst, more rows than decode wait for their first token, and no batch row reads. Then short steps would
        delay more rows than long ones. With micro-batches, a long step would delay those on other devices.
        """
        limits = self.limits
        num_waiting = sum(map(shares.awaits_first_token, self._reading))
        can_be_long = limits.groups == 1 and not any(sequence.job.is_batch for sequence in self._reading)
        is_short = num_decoding and not (can_be_long and num_waiting > num_decoding)
        return limits.max_prefill_tokens_with_decode if is_short else limits.prefill_tokens_per_step

    def _is_prefill_due(self, num_decoding: int) -> bool:
        """Return whether the first group's step, with `num_decoding` rows, carries prefill.

        A prefill loads all weights, which takes as long as decoding fifty rows. So little prefill waits for more, at
        most MAX_PREFILL_DELAY_TURNS steps, until there is one prompt token per decoding row. That much takes about as
        long as the group's step; with more, the next group would wait on every stage.
        """
        self._turns_since_prefill += 1
        min_tokens = min(self.limits.min_gathered_prefill_tokens, num_decoding)
        is_due = self._turns_since_prefill >= MAX_PREFILL_DELAY_TURNS or self._reading_tokens >= min_tokens
        if is_due and self._reading:
            self._turns_since_prefill = 0
        return is_due

    def schedule_interactive_prefill(self, running_jobs: Collection[RunningJob]) -> list[ScheduledRow]:
        """Return the rows of an overtaking step: interactive prompts without a first token.

        Jobs with rows in the overtaken step are left out. So are scored prompts, whose scores must be reported in the
        order of steps.
        """
        self.admission.admit()
        reading = [
            s
            for s in self._reading
            if shares.awaits_first_token(s) and not (s.members or s.scored) and s.job not in running_jobs
        ]
        chunks = shares.split_budget(reading, self.limits.max_prefill_tokens_with_decode, self._chunk, self._steps)
        return [_chunk_row(sequence, count) for sequence, count in chunks]

    def _move_to_decode_groups(self) -> None:
        for sequence in [s for s in self._reading if s.num_uncomputed_tokens == 1 and not s.is_prefill_only]:
            del self._reading[sequence]
            min(self._groups, key=len)[sequence] = None

    def _decoding_rows(self, oldest: int) -> tuple[list[ScheduledRow], int]:
        """Return the rows of the next group, and its index. Skips groups without rows to run."""
        for group_index in range(self._next_group, self._next_group + len(self._groups)):
            group = self._groups[group_index % len(self._groups)]
            self._rebalance_groups(group)
            rows = self._ready_rows(group, oldest)
            sequences = [row.sequence for row in rows]
            active = self.mask_time.active_rows(sequences)
            if active:
                decoding = self._batch_throttle.choose_decode_rows(active)
                self._next_group = (group_index + 1) % len(self._groups)
                if decoding is not sequences:
                    chosen = set(decoding)
                    rows = [row for row in rows if row.sequence in chosen]
                rows.sort(key=attrgetter("lowest_slot"))  # adjacent slots are faster to read
                return rows, group_index % len(self._groups)
        return [], 0

    def _ready_rows(self, group: dict[Sequence, ScheduledRow | None], oldest: int) -> list[ScheduledRow]:
        """Return the group's rows that may run. Rows with more than one token to read leave the group."""
        ready, reading_again = [], []
        for sequence, row in group.items():
            ids = sequence.token_ids
            if row is not None:  # `Sequence.may_run`, shorter: this row always has one token to read
                if (sequence.last_sample_step <= oldest and len(ids) < row.max_num_ids) or ids[-1] != PENDING:
                    ready.append(row)
            elif len(ids) - sequence.num_computed_tokens > 1:
                reading_again.append(sequence)
            elif self._may_run_with_spare(sequence, oldest) if sequence.lease is not None else sequence.may_run(oldest):
                ready.append(_decoding_row(sequence, group))
        for sequence in reading_again:
            del group[sequence]
            self._reading[sequence] = None
        return ready

    def _rebalance_groups(self, group: dict[Sequence, ScheduledRow | None]) -> None:
        """Move rows to the smallest groups if this group is too large.

        It is too large if it exceeds its share by an eighth and at least two rows."""
        share = -(-sum(map(len, self._groups)) // len(self._groups))
        if len(group) - share <= max(1, share // 8):
            return
        for sequence in list(islice(reversed(group), len(group) - share)):
            min(self._groups, key=len)[sequence] = group.pop(sequence)

    def _may_run_with_spare(self, sequence: Sequence, oldest: int) -> bool:
        """Give a session's row its second state slot if it lacks one.

        The slot is `Sequence.spare_slot`. Returns `may_run`.
        """
        if sequence.lacks_spare_slot:
            self._slots.add_spare(sequence)
        return sequence.may_run(oldest)

    def _prefill_rows(self, budget: int, skips_batch: bool, with_decode: bool) -> list[ScheduledRow]:
        """Return prompt chunks within the budget. Interactive rows come first; batch rows get their part.

        with_decode: whether rows decode in the same step
        """
        reading = [sequence for sequence in self._reading if sequence.num_uncomputed_tokens > 0]
        interactive = [sequence for sequence in reading if not sequence.job.is_batch]
        batch = [sequence for sequence in reading if sequence.job.is_batch and not skips_batch]
        if with_decode and not self._batch_throttle.prefill_now(sum(map(self._chunk, batch))):
            batch = []
        batch_tokens = sum(map(self._chunk, batch)) if interactive else 0
        reserved = min(batch_tokens, self._batch_throttle.max_prefill_tokens(budget // shares.BATCH_SHARE_DIVISOR))
        first = shares.split_budget(interactive, budget - reserved, self._chunk, self._steps)
        rest = self._batch_throttle.max_prefill_tokens(budget - sum(count for _, count in first))
        batch_chunks = shares.split_budget(batch, rest, self._chunk, self._steps)
        chunks = [*first, *batch_chunks[: self._batch_throttle.max_prefill_rows(len(batch_chunks))]]
        self._has_rows_without_chunk = len(chunks) < len(reading)
        return [_chunk_row(sequence, count) for sequence, count in chunks]

    def _chunk(self, sequence: Sequence) -> int:
        """Return the number of tokens to read next: at most a chunk, up to `Sequence.cache_points[0]`.

        The members of a mixture read the same tokens in the same step and share the chunk size.
        """
        limit = min(sequence.num_uncomputed_tokens, max(1, self.limits.prefill_chunk // (1 + len(sequence.members))))
        if sequence.cache_points:
            limit = min(limit, sequence.cache_points[0] - sequence.num_computed_tokens)
        return limit

    def release_req_slot(self, sequence: Sequence) -> None:
        """Free the row's request slot. The row may stay in the steps to read."""
        self.admission.release_req_slot(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove the row from the steps and free its request slot. The caller frees its state slot."""
        self.admission.release_req_slot(sequence)
        self.remove_running(sequence)
        sequence.phase = Phase.ANSWERED if sequence.has_answered else Phase.DONE


def _decoding_row(sequence: Sequence, group: dict[Sequence, ScheduledRow | None]) -> ScheduledRow:
    uses_device_token = sequence.may_sample and sequence.req_slot_holds_last_token
    is_plain = uses_device_token and sequence.is_plain
    max_num_ids = sequence.prompt_end + sequence.request.max_tokens
    row = ScheduledRow(
        sequence, 1, sequence.may_sample, uses_device_token, False, sequence.lowest_slot, max_num_ids, is_plain
    )
    if is_plain:
        group[sequence] = row
    return row


def _chunk_row(sequence: Sequence, count: int) -> ScheduledRow:
    """Create the entry of a prompt chunk. After the prompt's last token the row samples or ends."""
    is_last = count == sequence.num_uncomputed_tokens
    ends = is_last and sequence.is_prefill_only
    return ScheduledRow(sequence, count, samples_token=is_last and sequence.may_sample and not ends, ends=ends)
