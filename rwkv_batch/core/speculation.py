"""Speculative decoding: a step verifies guessed tokens, and keeps those that sampling chooses anyway. No torch.

A row with a draft takes several device rows of one step:

- its own, which reads the known tokens as always and samples the next one
- one for each drafted token, which continues the row before it, has logits, and writes a slot of its own

When the step's token is known and equals the first drafted one, the logits after that one are the logits of the next
step: the row samples from them, commits the token, and so on. So sampling, penalties, grammars, stops and log-
probabilities see the same logits in the same order as without drafts. The row continues from the slot of the last
accepted token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from rwkv_batch.core.draft_costs import (
    ASSUMED_GUESS,
    KEPT_GAIN,
    MIN_GAIN,
    DraftOptions,
    Launched,
    Plan,
    ProbeBudget,
    Proposal,
    Shape,
    StepTimes,
    best_length,
)
from rwkv_batch.core.drafters import (
    MAX_DRAFT_TOKENS,
    MAX_ROWS,
    Acceptance,
    Draft,
    Drafter,
    DraftModel,
    DraftTotals,
    Guesses,
    LookupDrafter,
    ModelDrafter,
    RowDrafter,
    SessionTexts,
    Wanted,
)
from rwkv_batch.core.scheduler import ScheduledRow
from rwkv_batch.core.sequence import PENDING, Phase, Sequence
from state_pool.cache.slots import DraftSlots

MAX_READ = 32
"""Known tokens that a step reads of a row at most, for a draft."""
TOKEN_COST = 0.02
"""Tokens that a drafted token must gain at least: which drafter is best."""
PROBE_TOKENS = 3
"""Tokens of a draft that shows whether a text that was not predictable is so by now."""
PROBE_ROWS = 4
"""Rows that such a draft is for at most: it costs less, and what it shows counts for all."""
READ_GUESSES = 3
"""Guesses in whose time the draft model reads the text since its last guess."""
MAX_HOST_S = 0.001
"""Between two steps, if rows run: a step with drafts is launched after the tokens of the one before are processed."""
EXPECTED_OF_MODEL = 4.0, 1.6
"""Accepted and rejected tokens of a draft model to begin with: enough that it is tried."""


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


class Speculation:
    """Drafts of all rows. Owned by the engine's thread."""

    def __init__(
        self,
        mode: str,
        slots: DraftSlots,
        forget_plain: Callable[[Sequence], None],
        model: DraftModel | None = None,
        graph_s: Callable[[Shape], float] | None = None,
    ) -> None:
        """mode: `EngineConfig.speculate`

        forget_plain: makes the scheduler create the row's next `ScheduledRow` anew
        graph_s: see `StepTimes`
        """
        self.model = model
        self.mode = mode
        self._slots = slots
        self._forget_plain = forget_plain
        self.texts = SessionTexts()
        self.make_drafters: Callable[[Sequence], list[Drafter]] = partial(
            make_drafters, mode=mode, has_model=model is not None, texts=self.texts
        )
        self.times = StepTimes(graph_s)
        self._measured = self.times if graph_s is None else StepTimes()
        """times of steps without graphs: with adapters, or after a failed capture"""
        self.totals = dict.fromkeys(("ngram", "prediction", "model"), DraftTotals())
        """by drafter"""
        self._pools: dict[str, Acceptance] = {}
        """by drafter"""
        self._probes = ProbeBudget()
        self._are_paying = False
        """whether the last step had drafts because they pay"""
        self._has_drafts = False
        """whether the last step had any"""
        self._last_end = self._begun = 0.0
        """when the last step ended, and when the last one was begun"""
        self._guesses: Guesses | None = None
        """of the last step"""
        self._num_guesses = 0
        """steps of the model that they took; 0: other text was read too, so their time is unusual"""
        self._launched: Launched | None = None
        """the last step, if it has drafts and is not measured yet"""
        self._chosen: DraftOptions | None = None
        """the last step, if it has drafts that pay"""
        self._planned: Plan | None = None
        """for the next step"""
        self._ended: list[Draft] = []
        """drafts that have ended"""

    # Before a step -------------------------------------------------------------------------------------------

    def add_drafts(self, rows: list[ScheduledRow]) -> list[ScheduledRow]:
        """Return a step's rows with their drafts. A row whose draft needs a token in flight is left out."""
        planned, self._planned, self._chosen = self._planned, None, None
        if not rows:  # the step in flight is still to be measured
            return rows
        self._launched = None
        if self.mode == "off" or len(rows) > MAX_ROWS:
            self._has_drafts = False
            return rows
        self._begun, self._guesses, self._num_guesses, is_first = time.monotonic(), None, 0, not self._has_drafts
        drafts, price, options = self._choose(rows, planned)
        self._guess(drafts, rows)
        result, num_tokens, num_drafts = list[ScheduledRow](), 0, 0
        for row, draft in zip(rows, drafts, strict=True):
            is_pending = row.sequence.token_ids[-1] == PENDING
            if draft is None or not (draft.tokens or is_pending):
                result.append(row)
            elif not is_pending:
                draft.slots, row.draft, row.sequence.draft = self._slots.allocate(len(draft.tokens)), draft, draft
                self._forget_plain(row.sequence)
                num_tokens, num_drafts = num_tokens + len(draft.tokens), num_drafts + 1
                result.append(row)
        self._has_drafts = num_drafts > 0 if result else self._has_drafts
        if not num_drafts:
            return result
        self._probes.spend(price)
        if options is not None:
            num_left_out = len(rows) - len(result)
            size = options.shape.with_drafts(num_tokens - num_left_out, num_drafts)
            first = next(row.draft for row in result if row.draft is not None)
            self._launched = Launched(options.times, size, options.plain_s, options.guess_s, first, is_first)
        for row in result:
            if row.draft is not None:  # then no later step has this object
                row.uses_device_token = row.is_plain = False
        return [row if row.draft is not None else _without_device_token(row) for row in result]

    def _choose(
        self, rows: list[ScheduledRow], planned: Plan | None
    ) -> tuple[list[Draft | None], float, DraftOptions | None]:
        """Return the best drafts, what probes cost (in steps), and of which options they are; None: of none."""
        num_rows, drafting = len(rows), [i for i, row in enumerate(rows) if _may_draft(row)]
        tokens, logits = sum([row.num_tokens for row in rows]), sum([row.samples_token for row in rows])
        num_drafting, shape = len(drafting), Shape(num_rows, tokens, logits)
        times, plain_s = self._times_of(rows, shape)
        num_guessing = 0 if self.model is None else num_drafting
        guess_s = times.guess_s(num_guessing, plain_s, self.model.graph_s) if self.model and num_guessing else 0.0
        guess_cost = guess_s / plain_s * num_rows / num_guessing if plain_s and num_guessing else ASSUMED_GUESS
        found: list[Proposal | None] = [None] * num_rows
        most_tokens = min(MAX_DRAFT_TOKENS, self._slots.num_free // max(1, num_drafting))
        for i in drafting:
            found[i] = self._propose(rows[i].sequence, guess_cost, most_tokens)
        if self.mode != "auto":
            return [None if one is None else one.draft(MAX_DRAFT_TOKENS) for one in found], 0.0, None
        if not plain_s or not any(found):
            return [None] * num_rows, 0.0, None
        options = DraftOptions(found, times, shape, plain_s, guess_s)
        lengths, price = options.planned_lengths(planned), 0.0
        if lengths is None:
            lengths, price = self._search(options)
        self._chosen = options if self._are_paying else None
        self._probes.add(self._are_paying)
        drafts: list[Draft | None] = [None] * num_rows
        for i, length in lengths.items():
            if (one := found[i]) is not None:
                drafts[i] = one.draft(length, is_probe=price > 0)
        return drafts, price, options

    def _search(self, options: DraftOptions) -> tuple[dict[int, int], float]:
        """Return the best lengths by row, and what probes among them cost, in steps."""
        chooser, guess_s = options.chooser(), options.guess_s
        best = chooser.best(KEPT_GAIN if self._are_paying else MIN_GAIN)
        self._are_paying = bool(best.lengths)
        if len(best.lengths) < len(chooser.rows) and self._probes.is_enough:
            probes = {one.row: min(PROBE_TOKENS, one.max_tokens) for one in chooser.rows[:PROBE_ROWS]}
            probed = chooser.evaluate(probes | best.lengths, is_first=not self._has_drafts)
            reading_s = READ_GUESSES * guess_s if any(one.is_guessed for one in chooser.rows) else 0.0
            # Tokens that it is expected to yield pay for a part.
            gain = (probed.num_tokens - best.num_tokens) / options.shape.logits
            cost = self._probes.cost((probed.seconds + reading_s - best.seconds) / options.plain_s - gain)
            if probed.seconds and cost:
                return probed.lengths, cost
        return best.lengths, 0.0

    def plan_next(self) -> None:
        """Choose lengths for the next step, while the device runs one with drafts: the host has no time between them.

        Counts the drafts of the step before.
        """
        self.count_drafts()
        chosen, self._chosen = self._chosen, None
        if chosen is not None:
            self._planned = chosen.plan()

    def _times_of(self, rows: list[ScheduledRow], shape: Shape) -> tuple[StepTimes, float]:
        """Return the times that hold for a step, and its seconds without drafts. 0: not known."""
        if self.times is not self._measured and not any(row.sequence.adapter is not None for row in rows):
            plain_s = self.times.plain_s(shape)
            if plain_s:
                return self.times, plain_s
        return self._measured, self._measured.plain_s(shape)

    def _propose(self, sequence: Sequence, guess_cost: float, most_tokens: int) -> Proposal | None:
        """Return what a row can draft, by the drafter that gains most."""
        if sequence.drafters is None:
            sequence.drafters = [RowDrafter(one, self.pool(one.name)) for one in self.make_drafters(sequence)]
        ids = sequence.token_ids
        is_pending = ids[-1] == PENDING
        known = len(ids) - is_pending
        room = sequence.request.max_tokens - (known - sequence.prompt_end) - 1
        best: Proposal | None = None
        for one in sequence.drafters if min(room, most_tokens) > 0 else ():
            one.fade()
            count, tokens, cost = min(most_tokens, room), None, TOKEN_COST
            if isinstance(one.drafter, ModelDrafter):
                if not sequence.has_sampled:  # the first token does not wait for guesses
                    continue
                cost += guess_cost
            else:
                tokens = one.drafter.propose(ids, known, count + is_pending)
                count = len(tokens) - is_pending
                if count <= 0:
                    continue
            # One drafter needs no comparison.
            rate = one.rate if len(sequence.drafters) > 1 else 0.0
            gain = rate and best_length(rate, cost, count)[1]
            if best is None or (gain, rate) > (best.gain, best.rate):
                best = Proposal(one, tokens, known, count, gain, rate)
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
        missing = [row for _, row in wanted if row.drafter.num_read != row.length]
        if missing:
            # After a draft, unread are its accepted tokens and the next one. A call that reads more, or is the second
            # one of the step, does not show what a guess takes.
            is_next = all(row.length - row.drafter.num_read <= len(row.drafter.guesses) + 1 for row in missing)
            self._guesses = self.model.guess(missing)
            if self._guesses is not None and is_next and len(missing) == len(wanted):
                self._num_guesses = self._guesses.num_steps
        else:
            self._guesses = wanted[0][1].drafter.pending
            self._num_guesses = 0 if self._guesses is None else self._guesses.num_steps
        for draft, row in wanted:
            draft.tokens = row.drafter.propose(row.ids, row.length, row.num_tokens)

    def pool(self, name: str) -> Acceptance:
        """Return the acceptance of a drafter in all rows."""
        first = EXPECTED_OF_MODEL if self.model is not None and name not in ("ngram", "prediction") else ()
        return self._pools.setdefault(name, Acceptance(*first))

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
            sequence, draft = row.sequence, row.draft
            if draft is None or draft is not sequence.draft or sequence.phase is not Phase.RUNNING:
                continue
            if draft.accepts(sequence.token_ids):
                draft.num_accepted = len(sequence.token_ids) - draft.start
                sequence.token_ids.append(PENDING)
                result.append(row)
        return result

    def settle(self, sequence: Sequence) -> None:
        """End a verified draft. The row continues from the state after the last accepted token.

        The draft counts in rates and totals after the next launch: the device waits for it.
        """
        draft = sequence.draft
        assert draft is not None
        # Text that may be a stop must not be in a session's state.
        is_usable = sequence.lease is None or not sequence.output.has_held_text
        count = draft.num_accepted
        if count and sequence.phase is Phase.RUNNING and is_usable and sequence.shared is None:
            sequence.slot, draft.slots[count - 1] = draft.slots[count - 1], sequence.slot
            sequence.num_computed_tokens = draft.start + count
        self._end(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Free a draft's slots and count the row's drafts: the row ends."""
        self._end(sequence)
        self.count_drafts()

    def _end(self, sequence: Sequence) -> None:
        if (draft := sequence.draft) is not None:
            sequence.draft = None
            self._slots.free(draft.slots)
            self._ended.append(draft)

    def count_drafts(self) -> None:
        """Count the drafts that have ended."""
        for draft in self._ended:
            draft.drafter.record(draft)
            name, (drafted, accepted) = draft.drafter.name, self.totals.get(draft.drafter.name, DraftTotals())
            self.totals[name] = DraftTotals(drafted + len(draft.tokens), accepted + draft.num_accepted)
        self._ended.clear()

    def count_step(self, rows: list[ScheduledRow], started: float, num_draft_tokens: int, host_s: float = 0.0) -> None:
        """Measure a step whose tokens are committed. started: its launch; host_s: see `InFlightStep`"""
        if self.mode == "off" or len(rows) > MAX_ROWS:
            return
        now, last_end = time.monotonic(), self._last_end
        since, self._last_end = max(started, last_end), now
        if not num_draft_tokens and all(row.num_tokens == 1 for row in rows):
            shape = Shape(len(rows), len(rows), len(rows))
            self._times_of(rows, shape)[0].count_plain(shape, now - since)
        elif num_draft_tokens and self._launched is not None:
            times, size, plain_s, guess_s, first, is_first = self._launched
            if all(row.draft is not first for row in rows):
                return  # another step is in flight, of another pipeline group
            self._launched = None
            # What the host does before its launch is part of it.
            since = max(last_end, min(started, self._begun) - MAX_HOST_S)
            if self._guesses is None or self._num_guesses:
                guessing_s = guess_s * self._num_guesses
                if self._guesses is not None and times is self._measured:
                    guessing_s = self._guesses.seconds
                    times.count_guess(guessing_s / self._num_guesses)
                times.count_drafts(size, plain_s, now - since, guessing_s, is_first, host_s)

    def status(self) -> dict[str, Any]:
        """Return the figures of /status as plain data."""
        self.count_drafts()
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
