"""Decides who is in which step: who has a place (`Admission`), which rows decode, which prompts are read. No torch.

Decoding rows are in every step, and while there are some, fewer prompt tokens are read, because the next token of each
waits until the step ends; batch rows take turns in steps while interactive requests come (`BatchShare`). Prompt tokens
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
from rwkv_batch.core.batch_share import BatchShare, is_waited_for
from rwkv_batch.core.constrained_turns import ConstrainedTurns
from rwkv_batch.core.limits import BATCH_PART, Limits
from rwkv_batch.core.prompt_turns import share_out
from rwkv_batch.core.sequence import NO_SLOT, NOTHING_SCORED, PENDING, Phase, RunningJob, Sequence
from rwkv_batch.core.slot_source import SlotSource

HELD_TURNS = 5
"""Few prompts wait at most until so many steps of the first group have come since prompts were read."""


@dataclass(slots=True)
class ScheduledRow:
    """A sequence's part in one step."""

    sequence: Sequence
    num_tokens: int
    draws: bool
    """whether a token is drawn after it"""
    feeds_back: bool = False
    """whether it reads the token that it drew last, which its seat still holds on the device, and draws"""
    ends: bool = False
    """whether it is the end of a row that only reads"""
    first_slot: int = NO_SLOT
    """of one that decodes: see `Sequence.first_slot`"""
    most_ids: int = 0
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
        self.places = Admission(limits, slots, self)
        self._running: dict[Sequence, None] = {}
        """rows in the steps, those among them that have answered and still read (an ordered set)"""
        self._reading: dict[Sequence, None] = {}
        """running rows that have more than one token to read"""
        self._batch_share = BatchShare(limits, self.places.interactive, self._reading, has_pieces)
        self.turns = ConstrainedTurns(limits)
        self._groups: list[dict[Sequence, ScheduledRow | None]] = [{} for _ in range(limits.groups)]
        """running rows that decode; of a plain one what it is in every step, once that is known"""
        self._turn = 0
        """the group whose step is next"""
        self._held = 0
        """turns of the first group since prompts went before its step"""
        self._reads_on = False
        """whether prompts were left over by the last step that read some"""
        self._steps = 0
        self._reading_tokens = 0
        """that running rows had to read of their prompts before the last step"""

    @property
    def running_rows(self) -> int:
        """Rows in the steps."""
        return len(self._running)

    @property
    def is_beside_interactive(self) -> bool:
        """Whether batch rows of the step that was scheduled last run beside interactive requests that come."""
        return self._batch_share.is_beside

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that rows have to read, whether they wait or run."""
        places = self.places
        return self._reading_tokens + places.interactive.waiting_tokens + places.batch.waiting_tokens

    @property
    def has_work(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self._running or self.places.waiting_rows or self.places.paused_rows)

    def add(self, job: RunningJob, rows: list[Sequence]) -> None:
        """Rows that want to run."""
        self.places.queue_of(job).add(job, rows)

    def add_forked(self, rows: list[Sequence]) -> None:
        """Continuations of a prompt that was read for them; they go before the client's others."""
        self.places.queue_of(rows[0].job).add_forked(rows[0].job, rows)

    def forget_waiting(self, job: RunningJob) -> list[Sequence]:
        """Take back a job's waiting rows (it was cancelled)."""
        return self.places.queue_of(job).forget(job)

    def running_of(self, job: RunningJob) -> list[Sequence]:
        """A job's rows in the steps."""
        return [sequence for sequence in self._running if sequence.job is job]

    def enter(self, sequence: Sequence) -> None:
        """See `admission.Steps`."""
        self._running[sequence] = self._reading[sequence] = None

    def leave(self, sequence: Sequence) -> None:
        """See `admission.Steps`."""
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
        self.places.admit()
        self._sort_in()
        self._batch_share.begin(now)
        rows, turn = self._decoding_rows(oldest)
        limits = self.limits
        self._reading_tokens = sum(sequence.num_uncomputed_tokens for sequence in self._reading)
        first = next((number for number, group in enumerate(self._groups) if group), 0)
        is_due = not rows or (turn == first and self._is_due(len(rows)))
        if self._reading and (is_due or self._reads_on or len(rows) <= limits.mixed_rows):
            stands_aside = self._batch_share.stands_aside()
            if stands_aside:
                rows = [row for row in rows if not row.sequence.job.is_batch]
            budget = limits.prefill_tokens_beside if rows else limits.prefill_tokens_per_step
            rows += self._prefill_rows(budget, stands_aside, beside=bool(rows))
        return rows

    def _is_due(self, rows: int) -> bool:
        """Whether prompts go before this step of the first group, in which so many rows decode: few tokens wait until
        more have come or `HELD_TURNS`.

        The weights are read for them alone, which takes as long as a step of fifty rows. As many tokens as the group
        has rows take about as long as its step; a longer one would hold up the group behind it on every stage.
        """
        self._held += 1
        enough = min(self.limits.held_prompt_tokens, rows)  # such a step takes a stage no longer than one of the group
        is_due = self._held >= HELD_TURNS or self._reading_tokens >= enough
        if is_due and self._reading:
            self._held = 0
        return is_due

    def first_tokens(self, under_way: Collection[RunningJob]) -> list[ScheduledRow]:
        """The rows of a step between two pieces of another one: prompts of interactive rows whose first token is
        awaited, but of no job that has rows in the other step. Nor scored prompts: what steps tell of one is told in
        the order in which they are concluded, and this step is before others that are in flight.
        """
        self.places.admit()
        reading = [
            s for s in self._reading if is_waited_for(s) and not (s.members or s.scored) and s.job not in under_way
        ]
        chunks = share_out(reading, self.limits.prefill_tokens_beside, self._chunk, self._steps)
        return [_chunk_row(sequence, count) for sequence, count in chunks]

    def _sort_in(self) -> None:
        """Rows that have one token left to read decode from now on, in the smallest group."""
        for sequence in [s for s in self._reading if s.num_uncomputed_tokens == 1 and not s.only_reads]:
            del self._reading[sequence]
            min(self._groups, key=len)[sequence] = None

    def _decoding_rows(self, oldest: int) -> tuple[list[ScheduledRow], int]:
        """The rows of the next group that has any to run, and which group that is."""
        for turn in range(self._turn, self._turn + len(self._groups)):
            group = self._groups[turn % len(self._groups)]
            self._even_out(group)
            rows = self._ready_rows(group, oldest)
            sequences = [row.sequence for row in rows]
            present = self.turns.present(sequences)
            if present:
                decoding = self._batch_share.decoding(present)
                self._turn = (turn + 1) % len(self._groups)
                if decoding is not sequences:
                    chosen = set(decoding)
                    rows = [row for row in rows if row.sequence in chosen]
                rows.sort(key=attrgetter("first_slot"))  # neighbours in memory are read faster
                return rows, turn % len(self._groups)
        return [], 0

    def _ready_rows(self, group: dict[Sequence, ScheduledRow | None], oldest: int) -> list[ScheduledRow]:
        """A group's rows that may run. Those that have more to read than a token, turns that close, leave it."""
        ready, closing = [], []
        for sequence, row in group.items():
            ids = sequence.token_ids
            if row is not None:  # as `Sequence.may_run`, of one that always has a token to read
                if (sequence.in_step <= oldest and len(ids) < row.most_ids) or ids[-1] != PENDING:
                    ready.append(row)
            elif len(ids) - sequence.num_computed_tokens > 1:
                closing.append(sequence)
            elif self._may_run(sequence, oldest) if sequence.lease is not None else sequence.may_run(oldest):
                ready.append(_decoding_row(sequence, group))
        for sequence in closing:
            del group[sequence]
            self._reading[sequence] = None
        return ready

    def _even_out(self, group: dict[Sequence, ScheduledRow | None]) -> None:
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

    def _prefill_rows(self, budget: int, stands_aside: bool, beside: bool) -> list[ScheduledRow]:
        """Prompt chunks within the budget: interactive rows first, but batch rows get their part. `beside` others that
        decode."""
        reading = [sequence for sequence in self._reading if sequence.num_uncomputed_tokens > 0]
        interactive = [sequence for sequence in reading if not sequence.job.is_batch]
        batch = [sequence for sequence in reading if sequence.job.is_batch and not stands_aside]
        if beside and not self._batch_share.reads_now(sum(map(self._chunk, batch))):
            batch = []
        wanted = sum(map(self._chunk, batch)) if interactive else 0
        kept = min(wanted, self._batch_share.prompt_tokens(budget // BATCH_PART))
        first = share_out(interactive, budget - kept, self._chunk, self._steps)
        rest = self._batch_share.prompt_tokens(budget - sum(count for _, count in first))
        shared = share_out(batch, rest, self._chunk, self._steps)
        chunks = [*first, *shared[: self._batch_share.prompt_rows(len(shared))]]
        self._reads_on = len(chunks) < len(reading)
        return [_chunk_row(sequence, count) for sequence, count in chunks]

    def _chunk(self, sequence: Sequence) -> int:
        """Tokens to read next: up to the chunk size, stopping at a border worth caching.

        Members of a mixture read them too, in the same step, and share what a row may read.
        """
        limit = min(sequence.num_uncomputed_tokens, max(1, self.limits.prefill_chunk // (1 + len(sequence.members))))
        if sequence.cache_points:
            limit = min(limit, sequence.cache_points[0] - sequence.num_computed_tokens)
        return limit

    def give_up_seat(self, sequence: Sequence) -> None:
        """The row draws no more; it may stay in the steps to read what its session must contain."""
        self.places.give_up_seat(sequence)

    def remove(self, sequence: Sequence) -> None:
        """The row leaves the steps. Its slot is the caller's to give back."""
        self.places.give_up_seat(sequence)
        self.leave(sequence)
        sequence.phase = Phase.ANSWERED if sequence.has_answered else Phase.DONE


def _decoding_row(sequence: Sequence, group: dict[Sequence, ScheduledRow | None]) -> ScheduledRow:
    """A row that reads a token and draws, unless it closes; noted in its group if it is the same from now on."""
    feeds_back = sequence.draws and sequence.seat_holds_last_token
    is_plain = feeds_back and sequence.is_plain
    most_ids = sequence.prompt_end + sequence.request.max_tokens
    row = ScheduledRow(sequence, 1, sequence.draws, feeds_back, False, sequence.first_slot, most_ids, is_plain)
    if is_plain:
        group[sequence] = row
    return row


def _chunk_row(sequence: Sequence, count: int) -> ScheduledRow:
    """A prompt's part: after its last token the row draws, or ends."""
    is_last = count == sequence.num_uncomputed_tokens
    ends = is_last and sequence.only_reads
    return ScheduledRow(sequence, count, draws=is_last and sequence.draws and not ends, ends=ends)
