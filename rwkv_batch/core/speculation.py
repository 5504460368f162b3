"""Speculative decoding: a step verifies guessed tokens, and keeps those that sampling chooses anyway. No torch.

A row with a draft takes two device rows of one step:

- its own, which reads the known tokens as always and samples the next one
- the draft's, which reads the known tokens and the draft from the same state, into another slot. It has logits after
  each drafted token.

When the step's token is known and equals the first drafted one, the logits after that one are the logits of the next
step: the row samples from them, commits the token, and so on. So sampling, penalties, grammars, stops and log-
probabilities see the same logits in the same order as without drafts. If all drafted tokens are accepted, the row
continues from the draft's slot; else from its own, and its next step reads the accepted tokens.

The other way is to store the state after every drafted token. It reads k + 1 tokens instead of 2 u + k (u: accepted
tokens not in the state, k: drafted ones), but takes k slots instead of two, and kernels that write them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from rwkv_batch.core.drafters import (
    MAX_DRAFT_TOKENS,
    Draft,
    Drafter,
    DraftModel,
    Guesses,
    LookupDrafter,
    ModelDrafter,
    RowDrafter,
    SessionTexts,
    Wanted,
    best_length,
)
from rwkv_batch.core.scheduler import ScheduledRow
from rwkv_batch.core.sequence import PENDING, Phase, Sequence, SharedSlot
from state_pool.cache.slots import Slots

MAX_ROWS = 32
"""Rows of a step at most for drafts."""
MAX_READ = 32
"""Known tokens of a row at most that its draft reads again."""
SMOOTHING = 0.2
DECAY = 0.95
"""Weight of the sums of older steps with drafts."""
SKIPPED_STEPS = 2
PROBE_TOKENS = 4
"""Tokens of a draft that shows whether a text that was not predictable is so by now."""
PROBE_SHARE = 0.005
"""Share of the time for such drafts."""
MAX_PROBES = 2.0
"""Their cost at most, in steps, after a time without them."""


def make_drafters(
    sequence: Sequence, mode: str = "auto", has_model: bool = False, texts: SessionTexts | None = None
) -> list[Drafter]:
    """Return the drafters of a row that starts to sample. mode: `EngineConfig.speculate`"""
    drafters: list[Drafter] = []
    if prediction := sequence.request.prediction:
        drafters.append(LookupDrafter("prediction", prediction, sequence.prompt_end))
    if mode != "model":
        drafters.append(LookupDrafter("ngram", session=() if texts is None else texts.before(sequence.lease)))
    if has_model and mode != "ngram":
        drafters.append(ModelDrafter())
    return drafters


class DraftCost(NamedTuple):
    """Cost of drafts in tokens: those that the step yields without drafts in the same time."""

    fixed: float
    """of a step's drafts of any number and length"""
    token: float
    """of each of their tokens"""
    guess: float
    """of each further token that the draft model guesses, for all rows together"""


CERTAIN_COST = DraftCost(0.4, 0.1, 0.1)
"""For one row, before anything is measured."""
MAX_HOST_S = 0.001
"""Between two steps, if rows run: a step with drafts is launched after the tokens of the one before are processed."""


@dataclass(slots=True)
class StepTimes:
    """Measured times of steps without prompts."""

    plain_s: dict[int, float] = field(default_factory=dict)
    """by number of rows: smoothed seconds of a step without drafts"""
    num_skipped: int = 0
    """first steps with drafts, which may compile or capture something, so they are not measured"""
    sums: list[float] = field(default_factory=lambda: [0.0] * 5)
    """of 1, n, n * n, added seconds, n * added seconds in steps with n drafted tokens; older ones count less"""

    def count(self, num_rows: int, num_draft_tokens: int, seconds: float) -> None:
        """Count a step with this many drafted tokens."""
        before = self.plain_s.get(num_rows)
        if not num_draft_tokens:
            self.plain_s[num_rows] = seconds if before is None else before + (seconds - before) * SMOOTHING
        elif self.num_skipped < SKIPPED_STEPS:
            self.num_skipped += 1
        elif before is not None:
            n, added = num_draft_tokens, max(0.0, min(seconds, 4 * before) - before)
            new = (1.0, n, n * n, added, n * added)
            self.sums = [DECAY * old + one for old, one in zip(self.sums, new, strict=True)]

    @property
    def added_s(self) -> tuple[float, float] | None:
        """The seconds that drafts add to a step, and that each drafted token adds. None: not measured"""
        weight, n, nn, added, n_added = self.sums
        if not weight:
            return None
        spread = weight * nn - n * n
        # Drafts of one length do not show which part is fixed: half of it.
        token_s = (weight * n_added - n * added) / spread if spread > 0.01 * n * n else added / n / 2
        token_s = min(max(token_s, 0.0), added / n)
        return (added - token_s * n) / weight, token_s

    def cost(self, num_rows: int, model_s: float) -> DraftCost:
        """Return the cost of drafts in a step of this many rows. model_s: `Speculation.model_s`"""
        plain_s, added_s = self.plain_s.get(num_rows), self.added_s
        if not plain_s or added_s is None:
            return DraftCost(*(num_rows * one for one in CERTAIN_COST))
        tokens_per_s = num_rows / plain_s
        guess = model_s * tokens_per_s if model_s else num_rows * CERTAIN_COST.guess
        return DraftCost(added_s[0] * tokens_per_s, added_s[1] * tokens_per_s, guess)


class DraftTotals(NamedTuple):
    """A drafter's tokens since the start."""

    drafted: int = 0
    accepted: int = 0


class Proposal(NamedTuple):
    """What a row can draft."""

    drafter: RowDrafter
    tokens: list[int] | None
    """None: the draft model has to guess them"""
    start: int
    """see `Draft`"""
    max_tokens: int
    token_cost: float
    """of each token, in tokens"""
    length: int
    """tokens to draft, if the step has drafts; 0: none pays"""
    gain: float
    """of so many, in tokens, without the fixed cost of the step's drafts"""

    def draft(self, length: int) -> Draft:
        """Return a draft of at most this many tokens."""
        length = min(length, self.max_tokens)
        if self.tokens is None:
            return Draft(self.drafter, [], self.start, length)
        return Draft(self.drafter, self.tokens[:length], self.start)


class Speculation:
    """Drafts of all rows. Owned by the engine's thread."""

    def __init__(
        self, mode: str, slots: Slots, forget_plain: Callable[[Sequence], None], model: DraftModel | None = None
    ) -> None:
        """mode: `EngineConfig.speculate`

        forget_plain: makes the scheduler create the row's next `ScheduledRow` anew
        """
        self.model = model
        self.model_s = 0.0
        """smoothed seconds per token that the draft model guesses"""
        self.mode = mode
        self._slots = slots
        self._forget_plain = forget_plain
        self.texts = SessionTexts()
        self.make_drafters: Callable[[Sequence], list[Drafter]] = partial(
            make_drafters, mode=mode, has_model=model is not None, texts=self.texts
        )
        self.times = StepTimes()
        self.totals = dict.fromkeys(("ngram", "prediction", "model"), DraftTotals())
        """by drafter"""
        self._misses: dict[str, int] = {}
        """drafts with a wrong token, by drafter; tokens after it say nothing"""
        self._probe_credit = MAX_PROBES
        """steps that probes may cost by now"""
        self._last_end = self._begun = 0.0
        """when the last step ended, and when the last one was begun"""
        self._guesses: Guesses | None = None
        """of the last step, and their number per row"""
        self._num_guesses = 0

    # Before a step -------------------------------------------------------------------------------------------

    def add_drafts(self, rows: list[ScheduledRow]) -> list[ScheduledRow]:
        """Return a step's rows with their drafts. A row whose draft needs a token in flight is left out."""
        if self.mode == "off" or len(rows) > MAX_ROWS:
            return rows
        self._begun, self._guesses = time.monotonic(), None
        drafts = self._choose(rows)
        self._guess(drafts, rows)
        has_drafts, result = False, []
        for row, draft in zip(rows, drafts, strict=True):
            is_pending = row.sequence.token_ids[-1] == PENDING
            if draft is None or not (draft.tokens or is_pending):
                result.append(row)
            elif not is_pending:
                has_drafts |= self._take_slots(row.sequence, draft)
                result.append(row)
        return [_without_device_token(row) for row in result] if has_drafts else result

    def _choose(self, rows: list[ScheduledRow]) -> list[Draft | None]:
        """Return the rows' drafts, if they pay together: they share what a step with drafts takes longer."""
        cost = self.times.cost(len(rows), self.model_s)
        num_guessing = max(1, sum(self.model is not None and _may_draft(row) for row in rows))
        found = [self._propose(row, cost.token, cost.guess / num_guessing) for row in rows]
        if self.mode != "auto":
            return [None if one is None else one.draft(MAX_DRAFT_TOKENS) for one in found]
        pays = sum(one.gain for one in found if one is not None) > cost.fixed
        self._probe_credit = min(MAX_PROBES, self._probe_credit + PROBE_SHARE)
        others = [one for one in found if one is not None and not (pays and one.length)]
        price = sum(one.token_cost for one in others) * PROBE_TOKENS + (0.0 if pays else cost.fixed)
        probes = bool(others) and price <= self._probe_credit * len(rows)
        if probes:
            self._probe_credit -= price / len(rows)
        return [
            one.draft(one.length if pays and one.length else PROBE_TOKENS)
            if one is not None and (probes or (pays and one.length))
            else None
            for one in found
        ]

    def _propose(self, row: ScheduledRow, token_cost: float, guess_cost: float) -> Proposal | None:
        """Return what a scheduled row can draft, by the drafter that gains most."""
        sequence = row.sequence
        if not _may_draft(row):
            return None
        if sequence.drafters is None:
            sequence.drafters = [RowDrafter(one, self._expected_rate(one.name)) for one in self.make_drafters(sequence)]
        ids = sequence.token_ids
        is_pending = ids[-1] == PENDING
        known = len(ids) - is_pending
        room = sequence.request.max_tokens - (known - sequence.prompt_end) - 1
        best: Proposal | None = None
        for one in sequence.drafters if room > 0 else ():
            count, tokens, one_cost = min(MAX_DRAFT_TOKENS, room), None, token_cost
            if isinstance(one.drafter, ModelDrafter):
                if not sequence.has_sampled:  # the first token does not wait for guesses
                    continue
                one_cost += guess_cost
            else:
                tokens = one.drafter.propose(ids, known, count + is_pending)
                count = len(tokens) - is_pending
                if count <= 0:
                    continue
            length, gain = best_length(one.rate, one_cost, count)
            if best is None or (gain, one.rate) > (best.gain, best.drafter.rate):
                best = Proposal(one, tokens, known, count, one_cost, length, gain)
        return best

    def _guess(self, drafts: list[Draft | None], rows: list[ScheduledRow]) -> None:
        """Let the draft model guess. The tokens of drafts are zeros until the guesses are read."""
        wanted = [
            (one, Wanted(one.drafter.drafter, row.sequence.token_ids, one.start, one.num_wanted))
            for row, one in zip(rows, drafts, strict=True)
            if one is not None
            and isinstance(one.drafter.drafter, ModelDrafter)
            and row.sequence.token_ids[-1] != PENDING
        ]
        if not wanted or self.model is None:
            return
        num_unread = max(row.length - row.drafter.num_read for _, row in wanted)
        self._guesses = self.model.guess([row for _, row in wanted])
        # A call that reads a prompt does not show what a guess takes.
        self._num_guesses = max(row.num_tokens for _, row in wanted) if num_unread <= MAX_DRAFT_TOKENS else 0
        for draft, row in wanted:
            draft.tokens = row.drafter.propose(row.ids, row.length, row.num_tokens)

    def _expected_rate(self, name: str) -> float:
        """Return the expected chance that a token of a new row's draft is accepted, if those before it are."""
        accepted = self.totals.get(name, DraftTotals()).accepted
        return (accepted + 6) / (accepted + self._misses.get(name, 0) + 10)

    def _take_slots(self, sequence: Sequence, draft: Draft) -> bool:
        """Give the draft a slot, and keep the state that both device rows read. Returns False without free slots."""
        slot = self._slots.allocate()
        if slot is None:
            return False
        if sequence.read_slot == sequence.write_slot:
            fresh, old = self._slots.allocate(), sequence.slot
            if fresh is None:
                self._slots.drop_ref(slot)
                return False
            sequence.shared, sequence.slot = SharedSlot(old, partial(self._slots.drop_ref, old)), fresh
        draft.slot, sequence.draft = slot, draft
        self._forget_plain(sequence)
        return True

    def keep_text(self, sequence: Sequence) -> None:
        """Keep a closed turn's tokens for its session's next turns."""
        if self.mode not in ("off", "model") and sequence.lease is not None:
            self.texts.add(sequence.lease, sequence.token_ids[sequence.turn_start :])

    # After a step --------------------------------------------------------------------------------------------

    @staticmethod
    def accepted_rows(rows: Iterable[ScheduledRow]) -> list[ScheduledRow]:
        """Return the rows whose next token can be sampled from the draft's logits."""
        result = []
        for row in rows:
            sequence, draft = row.sequence, row.sequence.draft
            if draft is None or sequence.phase is not Phase.RUNNING or not draft.accepts(sequence.token_ids):
                continue
            draft.num_accepted = len(sequence.token_ids) - draft.start
            sequence.token_ids.append(PENDING)
            result.append(row)
        return result

    def settle(self, sequence: Sequence) -> None:
        """End a verified draft. The row continues from the draft's state if all of it was accepted."""
        draft = sequence.draft
        assert draft is not None
        # Text that may be a stop must not be in a session's state.
        is_usable = sequence.lease is None or not sequence.output.has_held_text
        is_accepted = draft.num_accepted == len(draft.tokens) and sequence.phase is Phase.RUNNING
        if is_accepted and is_usable and sequence.shared is None:
            sequence.slot, draft.slot = draft.slot, sequence.slot
            sequence.num_computed_tokens = draft.start + len(draft.tokens)
        self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Count a row's draft and free its slot."""
        draft, sequence.draft = sequence.draft, None
        if draft is None:
            return
        self._slots.drop_ref(draft.slot)
        draft.drafter.record(draft)
        name, (drafted, accepted) = draft.drafter.name, self.totals.get(draft.drafter.name, DraftTotals())
        self.totals[name] = DraftTotals(drafted + len(draft.tokens), accepted + draft.num_accepted)
        self._misses[name] = self._misses.get(name, 0) + (draft.num_accepted < len(draft.tokens))

    def count_step(self, rows: list[ScheduledRow], started: float, num_draft_tokens: int) -> None:
        """Measure a step whose tokens are committed. started: its launch"""
        if self.mode == "off" or len(rows) > MAX_ROWS:
            return
        now, since = time.monotonic(), max(started, self._last_end)
        if num_draft_tokens:  # what the host does before its launch is part of it
            since = max(self._last_end, min(started, self._begun) - MAX_HOST_S)
            if self._guesses is not None:
                since += self._guesses.seconds
                if self._num_guesses:
                    seconds, before = self._guesses.seconds / self._num_guesses, self.model_s
                    self.model_s = before + (seconds - before) * SMOOTHING if before else seconds
        self._last_end = now
        if num_draft_tokens or all(row.num_tokens == 1 for row in rows):
            self.times.count(len(rows), num_draft_tokens, now - since)

    def status(self) -> dict[str, Any]:
        """Return the figures of /status as plain data."""
        return {"mode": self.mode, **{name: total._asdict() for name, total in self.totals.items()}}


def _may_draft(row: ScheduledRow) -> bool:
    sequence = row.sequence
    if sequence.members or sequence.scored or sequence.cache_points:
        return False
    return row.samples_token and row.num_tokens <= MAX_READ and sequence.request.speculation != "off"


def _without_device_token(row: ScheduledRow) -> ScheduledRow:
    """Return a row whose token comes from the host, if the host knows it: one launch then runs all rows."""
    sequence = row.sequence
    if not row.uses_device_token or sequence.token_ids[-1] == PENDING or sequence.members:
        return row
    return replace(row, uses_device_token=False, is_plain=False)
