"""Samples the tokens of steps that verify drafts. Engine thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from rwkv_batch.core.drafters import Draft, DraftModel, Joined, ModelDrafter, Wanted
from rwkv_batch.core.scheduler import ScheduledRow
from rwkv_batch.core.sequence import Phase, Sequence
from rwkv_batch.core.speculation import Speculation
from rwkv_batch.runner.links import HostCopy, LastTokens
from rwkv_batch.runner.step_sampling import InFlightStep, SampledToken, StepSampler, select_rows
from sampling.filtered_sampler import FilteredSampler
from sampling.sampler import Sampler, SamplesAhead

Rows = list[ScheduledRow]


class Commits(Protocol):
    """The part of `JobTable` that processes sampled tokens."""

    def commit(self, rows: Rows, sampled: list[SampledToken], step: int) -> None: ...

    def commit_ahead(self, sequence: Sequence, draft: Draft) -> int: ...


class GuessesAhead(Protocol):
    """A draft model that can begin before the host knows which of its last guesses were accepted."""

    def guess_ahead(
        self, rows: list[tuple[ModelDrafter, int, list[int]]], num_steps: int, last: Tensor, after: Tensor
    ) -> None:
        """Launch guesses after a launched step that verifies drafted tokens of rows. The host has not read that step.

        rows: with their request slots and drafted tokens
        last: [request slots] int64: the token after the known ones
        after: [n] int64: the tokens after each drafted one, row by row
        """


class DraftSampler:
    """Samples after drafted tokens: after all at once, as if they were accepted, or one by one.

    One by one, each accepted token costs a launch and a wait. At once, the host reads all tokens of a step together.
    """

    def __init__(
        self, step_sampler: StepSampler, last_tokens: LastTokens, device: torch.device, has_graphs: bool
    ) -> None:
        self._step_sampler = step_sampler
        self._last_tokens = last_tokens
        self.are_logits_shared = has_graphs
        """Whether the step's other launches overwrite its logits."""
        self.read_at = 0.0
        """when the host received the tokens of the last step"""
        self._uncounted: list[tuple[Sequence, list[int]]] = []
        self.may_sample_ahead = device.type == "cuda"
        """On a CPU, tokens after rejected ones cost more than the launches that are saved."""

    def sample_ahead(self, step: InFlightStep, model: GuessesAhead | None) -> None:
        """Sample at once for rows whose sampler can: they have no grammar, filters or log-probabilities.

        Counts no token. Waits for the draft model's guesses, but not for the step. If the model guessed all drafts of
        the step and they are sampled at once, it begins to guess the next ones.
        """
        if step.draft_logits is None:
            return
        for draft in [row.draft for row in step.rows]:
            if draft is not None:
                draft.read_guesses()
        groups: dict[SamplesAhead, Rows] = {}
        for row in step.rows if self.may_sample_ahead else ():
            sequence = row.sequence
            if row.draft is None or sequence.matcher is not None or not sequence.request.sampling.is_fused:
                continue
            if isinstance(sampler := self._step_sampler.sampler_of(sequence), SamplesAhead):
                groups.setdefault(sampler, []).append(row)
        num_drafts = sum(row.draft is not None for row in step.rows)
        for ahead, rows in groups.items():
            drafts = [row.draft for row in rows if row.draft is not None]
            row_indices = [i for one in drafts for i in range(one.first_logit, one.first_logit + len(one.tokens))]
            req_slots = [row.sequence.req_slot for row, one in zip(rows, drafts, strict=True) for _ in one.tokens]
            runs = [one.tokens[1 : i + 1] for one in drafts for i in range(len(one.tokens))]
            tokens = ahead.sample_ahead(select_rows(step.draft_logits, row_indices), req_slots, runs)
            pairs = [(row.sequence, one) for row, one in zip(rows, drafts, strict=True)]
            step.ahead.append((pairs, HostCopy(tokens)))
            # Rows that await masks sample later, and the guesses would delay them.
            are_all_sampled = len(pairs) == num_drafts and step.deferred is None
            if model is not None and are_all_sampled and self._last_tokens.is_read:
                self._guess_ahead(pairs, tokens, model)
        if self.are_logits_shared and sum(map(len, groups.values())) < num_drafts:  # others are sampled later
            step.draft_logits = step.draft_logits.clone()

    def _guess_ahead(self, pairs: list[tuple[Sequence, Draft]], tokens: Tensor, model: GuessesAhead) -> None:
        """Let the model guess after the drafts of all rows. tokens: sampled after each drafted one"""
        rows = list[tuple[ModelDrafter, int, list[int]]]()
        for sequence, draft in pairs:
            if not draft.num_next or not isinstance(draft.drafter.drafter, ModelDrafter):
                return
            rows.append((draft.drafter.drafter, sequence.req_slot, draft.tokens))
        num_steps = max(draft.num_next for _, draft in pairs)
        model.guess_ahead(rows, num_steps, self._last_tokens.sampled_tokens, tokens)

    def guess_next(self, step: InFlightStep, sampled: list[SampledToken], model: DraftModel | None) -> None:
        """Let the draft model guess for the next step. Waits for this step.

        The device would wait while the host processes the step's tokens, so this comes first. One call guesses for all
        rows: if a draft of the step was not sampled ahead, or was a trial, nothing is guessed yet.

        sampled: the tokens of `step.sampling_rows`
        """
        self.read_at = time.monotonic()
        if not step.num_drafted:
            return
        wanted = list[Wanted]()
        for rows, copy in step.ahead:
            tokens = iter(copy.tokens())
            for _, one in rows:
                one.sampled = list(islice(tokens, len(one.tokens)))
        guesses_all = model is not None
        for row, (token, _) in zip(step.sampling_rows, sampled, strict=True):
            sequence, draft = row.sequence, row.draft
            if draft is None:
                continue
            draft.accept_ahead(token)
            drafter = draft.drafter.drafter
            if not (draft.num_next and draft.sampled and isinstance(drafter, ModelDrafter)):
                guesses_all = False
            elif guesses_all and sequence.phase is Phase.RUNNING:
                sequence.token_ids[draft.start] = token
                length = draft.start + 1 + len(draft.accepted)
                room = sequence.request.max_tokens - (length - sequence.prompt_end) - 1
                if room > 0:
                    text = Joined(sequence.token_ids, draft.accepted)
                    wanted.append(Wanted(drafter, text, length, min(room, draft.num_next)))
        if model is not None and guesses_all and wanted:
            model.guess(wanted)

    def verify(
        self,
        step: InFlightStep,
        speculation: Speculation,
        jobs: Commits,
        sample_constrained: Callable[[InFlightStep], None],
    ) -> int:
        """Sample and commit the tokens after accepted drafts. Returns their number. Waits for the step.

        sample_constrained: samples the rows of a part that await masks
        """
        num_accepted = 0
        for rows, _ in step.ahead:
            for sequence, draft in rows:
                num_accepted += jobs.commit_ahead(sequence, draft)
                if draft.num_accepted and sequence.phase is Phase.RUNNING:
                    self._uncounted.append((sequence, draft.sampled[: draft.num_accepted]))
        while rows_to_sample := speculation.accepted_rows(step.rows):
            num_accepted += len(rows_to_sample)
            part = self._sample_one(step, rows_to_sample)
            sample_constrained(part)
            jobs.commit(rows_to_sample, self._step_sampler.read(part), step.number)
        return num_accepted

    def count_ahead(self, sampling_rows: Iterable[ScheduledRow] = ()) -> None:
        """Count the accepted tokens of earlier steps in the samplers. Call before the next sampling.

        The host has launched the next step's layers by then, if possible. Does not wait for the device.
        sampling_rows: of the next step; their last tokens are replaced by those that it samples
        """
        uncounted, self._uncounted = self._uncounted, []
        groups: dict[Sampler | FilteredSampler, list[tuple[int, list[int]]]] = {}
        for sequence, tokens in uncounted:
            if sequence.phase is Phase.RUNNING:  # else another row may have its request slot
                counted = groups.setdefault(self._step_sampler.sampler_of(sequence), [])
                counted.append((sequence.req_slot, tokens))
        for sampler, counted in groups.items():
            req_slots, runs = [req_slot for req_slot, _ in counted], [run for _, run in counted]
            sampler.append_tokens(req_slots, runs)
            if not {sequence for sequence, _ in uncounted} <= {row.sequence for row in sampling_rows}:
                self._last_tokens.receive(self._last_tokens.store(req_slots, [run[-1] for run in runs]))

    @torch.inference_mode()
    def _sample_one(self, step: InFlightStep, rows: Rows) -> InFlightStep:
        """Sample after the latest accepted drafted token of each row. Constrained rows await masks."""
        assert step.draft_logits is not None
        drafts = [row.draft for row in rows]
        row_indices = [draft.first_logit + draft.num_accepted - 1 for draft in drafts if draft is not None]
        part = InFlightStep(rows, rows, number=step.number)
        self._step_sampler.sample(part, select_rows(step.draft_logits, row_indices), self._last_tokens)
        return part
