"""Samples a step's tokens and copies them to the host. Engine thread."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Numbers
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from native.tensors import on_device
from rwkv_batch.core.drafters import Draft
from rwkv_batch.core.scheduler import ScheduledRow
from rwkv_batch.core.sequence import Sequence
from rwkv_batch.core.shares import StepCosts
from rwkv_batch.request import TokenLogprob
from rwkv_batch.runner.links import HostCopy, LastTokens, TokenCopy
from rwkv_batch.runner.prompt_logprobs import InFlightScores
from rwkv_batch.tokenizer import Tokenizer
from sampling.cpu import CpuSampler
from sampling.filtered_sampler import FilteredSampler
from sampling.grammar.constraint import EARLY_ENDS, GrammarError
from sampling.params import MAX_WINDOW
from sampling.rapid import RapidSampler
from sampling.registry import choose_sampler, order
from sampling.row_context import BreakerMasks, RowContext
from sampling.sampler import Logprobs, Sampler

if TYPE_CHECKING:
    from sampling.grammar.masks import Masks

FILTERING = (CpuSampler, RapidSampler, FilteredSampler)
"""Samplers that apply filters."""
SampledToken = tuple[int, TokenLogprob | None]


@dataclass(slots=True)
class InFlightTokens:
    """One sampler's tokens of a step, being copied to the host."""

    indices: Numbers[int]
    """of `InFlightStep.sampling_rows`, in order"""
    copy: HostCopy | TokenCopy
    """token ids [n] int64, then the tensors of `Logprobs` if there are any"""
    with_logprobs: bool = False
    logits: HostCopy | None = None
    """[t, V] fp32, of the rows with `GenerateRequest.return_logits`, in order"""
    row_indices: list[int] | None = None
    """positions of the rows' tokens in `copy`; None: in order"""


@dataclass(slots=True)
class DeferredSample:
    """Rows of a step that sample under masks. They sample once their earlier tokens are known."""

    indices: list[int]
    """of `InFlightStep.sampling_rows`, in order"""
    logits: Tensor
    """[R, V] fp32, overwritten by the next step"""
    row_indices: list[int]
    """positions of the rows in `logits`"""


@dataclass(slots=True)
class InFlightStep:
    """A launched step, or one launch of it."""

    rows: list[ScheduledRow]
    sampling_rows: list[ScheduledRow]
    samples: list[InFlightTokens] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    number: int = -1
    launched: float = 0.0
    """when its launch ended"""
    host_s: float = 0.0
    """from when the host received the last step's tokens until these layers were launched (without graphs: had run)"""
    deferred: DeferredSample | None = None
    tokens_sent: int = 0
    """number for `LastTokens.receive` of the sampled tokens"""
    scored: InFlightScores | None = None
    layers_s: float = 0.0
    """see `Pipeline`"""
    sample_s: float = 0.0
    """for the unconstrained rows"""
    draft_logits: Tensor | None = None
    """[d, V] fp32: after each drafted token of the rows' drafts, in order"""
    ahead: list[tuple[list[tuple[Sequence, Draft]], HostCopy]] = field(default_factory=list)
    """tokens sampled after drafted tokens, by sampler"""
    constrained_sample_s: float = 0.0
    """seconds to compute masks and to sample the constrained rows"""

    @property
    def awaits_masks(self) -> bool:
        return self.deferred is not None

    @property
    def num_drafted(self) -> int:
        return 0 if self.draft_logits is None else len(self.draft_logits)

    @property
    def costs(self) -> StepCosts:
        """What the launched step cost until now."""
        num_sampling = len(self.sampling_rows)
        return StepCosts(
            tokens=sum(row.num_tokens for row in self.rows),
            num_sampling=num_sampling,
            unconstrained=num_sampling - len(self.deferred_rows),
            launch_s=self.launched - self.started,
            layers_s=self.layers_s,
            sample_s=self.sample_s,
        )

    @property
    def deferred_rows(self) -> list[ScheduledRow]:
        return [] if self.deferred is None else [self.sampling_rows[i] for i in self.deferred.indices]


class Step(NamedTuple):
    """A launched step: its separately launched parts, in order."""

    number: int
    parts: list[InFlightStep]

    @property
    def has_drafts(self) -> bool:
        """Whether it verifies drafts. The next step waits for them, so that it has all rows."""
        return any(part.num_drafted for part in self.parts)

    @property
    def awaits_masks(self) -> bool:
        """Whether rows await masks. They sample only after the host has read the step before."""
        return any(part.awaits_masks for part in self.parts)

    @property
    def samples_first_token(self) -> bool:
        """Whether an interactive row samples its first token in it. Answers as far as the host knows."""
        rows = (row for part in self.parts for row in part.rows)
        return any(row.samples_token and not (row.sequence.job.is_batch or row.sequence.output.tokens) for row in rows)


class StepSampler:
    """The samplers on the last device, created on demand."""

    def __init__(
        self, preferred: tuple[str, ...], device: torch.device, num_req_slots: int, vocab: int, tokenizer: Tokenizer
    ) -> None:
        """preferred: in order (`--samplers`)"""
        self._preferred = preferred
        self._device = device
        self._num_req_slots = num_req_slots
        self._vocab = vocab
        self._byte_table = tokenizer.byte_table
        self._penalty_exempt_ids = [i for i in tokenizer.penalty_exempt_ids if i < vocab]
        self._samplers: dict[str, Sampler] = {}
        self._filtered: dict[str, FilteredSampler] = {}
        """for rows with filters, by name of the sampler after them"""
        self._breakers = BreakerMasks(tokenizer.byte_table[:vocab])
        self._masks: Masks | None = None
        self.refusals: dict[str, str] = {}
        """by sampler name"""
        self.is_compiling = False
        """It may compile kernels. Any thread."""

    @property
    def used(self) -> dict[str, str]:
        """Requested name ("default" for none) -> name of the sampler used."""
        return {name or "default": sampler.name for name, sampler in self._samplers.items()}

    def sampler(self, name: str) -> Sampler:
        """Return the sampler of that name if preferred, else the next one. "" means the first."""
        if name not in self._samplers:
            self.is_compiling = True
            try:
                self._samplers[name], refusals = choose_sampler(
                    order(self._preferred, requested=name),
                    self._device,
                    self._num_req_slots,
                    self._vocab,
                    self._penalty_exempt_ids,
                    created=self._samplers.values(),
                )
            finally:
                self.is_compiling = False
            self.refusals |= refusals
        return self._samplers[name]

    def fits_graphs(self, sequences: Iterable[Sequence]) -> bool:
        """Return whether a graph can sample all rows.

        That is with the first sampler, without log-probabilities and filters.
        """
        for sequence in sequences:
            if not sequence.request.sampling.is_fused:
                return False
            name = sequence.job.spec.sampler
            if name and self.sampler(name) is not self.sampler(""):
                return False
        return True

    @torch.inference_mode()
    def admit(self, rows: list[ScheduledRow], started: dict[Sequence, None]) -> None:
        """Pass the parameters of a step's started rows to their samplers. Does not wait for the device.

        started: see `Admission`; the rows are removed from it
        """
        for sequence in [row.sequence for row in rows if row.sequence in started] if started else ():
            del started[sequence]
            sampler, request = self.sampler_of(sequence), sequence.request
            if isinstance(sampler, FILTERING):
                sampler.admit(sequence.req_slot, request.sampling, self._context(sequence))
            else:
                sampler.admit(sequence.req_slot, request.sampling)
            if request.resumed is not None and request.resumed.token_ids:
                sampler.append_tokens([sequence.req_slot], [request.resumed.token_ids])

    def sampler_of(self, sequence: Sequence) -> Sampler | FilteredSampler:
        sampler = self.sampler(sequence.sampler)
        if sequence.request.sampling.filters is None or isinstance(sampler, FILTERING):
            return sampler
        if sampler.name not in self._filtered:
            self._filtered[sampler.name] = FilteredSampler(
                sampler, self._num_req_slots, self._vocab, self._device, self._penalty_exempt_ids
            )
        return self._filtered[sampler.name]

    def _context(self, sequence: Sequence) -> RowContext:
        filters = sequence.request.sampling.filters
        if filters is None:
            return RowContext()
        breakers = self._breakers.build(filters.dry_sequence_breakers) if filters.uses_dry else None
        prompt = sequence.token_ids[: sequence.prompt_end][-MAX_WINDOW:]
        return RowContext(prompt, sequence.output.stop_ids, breakers)

    def sample(self, step: InFlightStep, logits: Tensor, last_tokens: LastTokens) -> None:
        """Sample for rows of logits [R, V] fp32, one group per sampler. Does not wait for the device.

        `sample_constrained` does the constrained rows.
        """
        unconstrained, constrained = split_by_constraint(step.sampling_rows)
        if constrained:
            step.deferred = DeferredSample(constrained, logits, constrained)
        started = time.perf_counter()
        self._sample_rows(step, unconstrained, logits, unconstrained, last_tokens)
        step.sample_s = time.perf_counter() - started

    def sample_constrained(self, step: InFlightStep, last_tokens: LastTokens) -> list[tuple[Sequence, GrammarError]]:
        """Sample for the running constrained rows, unless the host lacks earlier tokens of one.

        Returns those whose grammar failed, with the errors.
        """
        started = time.perf_counter()
        deferred = step.deferred
        assert deferred is not None
        pairs = zip(deferred.indices, deferred.row_indices, strict=True)
        alive = [(i, row_index) for i, row_index in pairs if step.sampling_rows[i].sequence.may_sample_in(step.number)]
        sequences = [step.sampling_rows[i].sequence for i, _ in alive]
        if True in [sequence.awaits_earlier_tokens for sequence in sequences]:
            return []
        step.deferred = None
        if not alive:
            return []
        self._append_jump_forward_tokens(sequences)
        matchers = [sequence.matcher for sequence in sequences if sequence.matcher is not None]
        masks, errors = self._mask_memory().fill(matchers)
        replacements = [matcher.replacement for matcher in matchers]
        indices, row_indices = [i for i, _ in alive], [row_index for _, row_index in alive]
        self._sample_rows(step, indices, deferred.logits, row_indices, last_tokens, masks, replacements)
        step.constrained_sample_s = time.perf_counter() - started
        return [(sequence, error) for sequence, error in zip(sequences, errors, strict=True) if error is not None]

    def _append_jump_forward_tokens(self, sequences: list[Sequence]) -> None:
        runs: dict[Sampler | FilteredSampler, list[Sequence]] = {}
        for sequence in sequences:
            if sequence.uncounted_ids:
                runs.setdefault(self.sampler_of(sequence), []).append(sequence)
        for sampler, returned in runs.items():
            sampler.append_tokens(
                [sequence.req_slot for sequence in returned], [sequence.uncounted_ids for sequence in returned]
            )
            for sequence in returned:
                sequence.uncounted_ids = []

    def _mask_memory(self) -> Masks:
        if self._masks is None:
            from sampling.grammar.masks import Masks, mask_threads

            self._masks = Masks(self._vocab, self._device, mask_threads(self._device))
        return self._masks

    def _sample_rows(
        self,
        step: InFlightStep,
        indices: list[int],
        logits: Tensor,
        row_indices: list[int],
        last_tokens: LastTokens,
        masks: Tensor | None = None,
        replacements: Numbers[int] = (),
    ) -> None:
        """Sample for these sampling rows; their logits are at `row_indices` of logits [R, V].

        masks [m, V/32] int32, in the same order; None: no constraint.
        replacements: per row the token that the model reads instead of one in `EARLY_ENDS`, or -1
        """
        groups: dict[Sampler | FilteredSampler, list[int]] = {}
        for number, i in enumerate(indices):
            groups.setdefault(self.sampler_of(step.sampling_rows[i].sequence), []).append(number)
        for sampler, numbers in groups.items():
            picked = select_rows(logits, [row_indices[number] for number in numbers])
            allowed = None if masks is None else select_rows(masks, numbers)
            sequences = [step.sampling_rows[indices[number]].sequence for number in numbers]
            req_slots = [sequence.req_slot for sequence in sequences]
            returned = _returned_logits(picked, sequences)
            sampled = sampler.sample(picked, req_slots, allowed)
            tokens = sampled.token_ids
            if replacements and max(replacements) >= 0:
                tokens = _replace_ends(tokens, [replacements[number] for number in numbers])
            step.tokens_sent = last_tokens.store(req_slots, tokens)
            logprobs = sampled.logprobs
            rest = (logprobs.chosen, logprobs.top_ids, logprobs.top) if logprobs is not None else ()
            sampled_tokens = [indices[number] for number in numbers]
            copy = HostCopy(sampled.token_ids, *rest)
            step.samples.append(
                InFlightTokens(sampled_tokens, copy, with_logprobs=logprobs is not None, logits=returned)
            )

    def read(self, step: InFlightStep) -> list[SampledToken]:
        """Return the tokens of the sampling rows, in order. Waits for the step."""
        sampled_tokens: list[SampledToken] = [(0, None)] * len(step.sampling_rows)
        for part in step.samples:
            tokens = part.copy.tokens()
            if part.row_indices is not None:
                tokens = [tokens[row_index] for row_index in part.row_indices]
            results: list[SampledToken] = [(token, None) for token in tokens]
            if part.with_logprobs and isinstance(part.copy, HostCopy):
                _, *logprobs = part.copy.read()
                returned = iter(()) if part.logits is None else iter(part.logits.read()[0])
                rows = [step.sampling_rows[i] for i in part.indices]
                results = self._with_logprobs(rows, tokens, Logprobs(*logprobs), returned)
            if len(results) == len(sampled_tokens):
                return results
            for i, entry in zip(part.indices, results, strict=True):
                sampled_tokens[i] = entry
        return sampled_tokens

    def _with_logprobs(
        self, rows: list[ScheduledRow], tokens: list[int], logprobs: Logprobs, returned: Iterator[Tensor]
    ) -> list[SampledToken]:
        """Return the tokens with the requested log-probabilities.

        returned: logits [V] fp32 of each row that requested them.
        """
        table = self._byte_table
        chosen, ids, top = logprobs.chosen.tolist(), logprobs.top_ids.tolist(), logprobs.top.tolist()
        results: list[SampledToken] = []
        for i, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            num_top = row.sequence.request.sampling.top_logprobs
            if num_top is None:
                results.append((token, None))
                continue
            alternatives = [(table[j], value) for j, value in zip(ids[i][:num_top], top[i][:num_top], strict=True)]
            if row.sequence.matcher is not None:  # the grammar forbids the others
                alternatives = [(alternative, value) for alternative, value in alternatives if value > -math.inf]
            logits_bytes = next(returned).numpy().tobytes() if row.sequence.request.return_logits else b""
            results.append((token, TokenLogprob(table[token], chosen[i], alternatives, logits_bytes)))
        return results


def split_by_constraint(sampling_rows: list[ScheduledRow]) -> tuple[list[int], list[int]]:
    """Return the indices of unconstrained and of constrained rows."""
    constrained = [i for i, row in enumerate(sampling_rows) if row.sequence.matcher is not None]
    if not constrained:
        return list(range(len(sampling_rows))), []
    return [i for i, row in enumerate(sampling_rows) if row.sequence.matcher is None], constrained


def _returned_logits(logits: Tensor, sequences: list[Sequence]) -> HostCopy | None:
    """Copy the requested rows of logits [R, V] fp32. A sampler overwrites them afterwards."""
    requests = enumerate(sequence.request for sequence in sequences)
    rows = [row for row, r in requests if r.return_logits and r.sampling.top_logprobs is not None]
    return HostCopy(logits[on_device(rows, torch.int64, logits.device)].float()) if rows else None


def _replace_ends(tokens: Tensor, replacements: list[int]) -> Tensor:
    """Replace tokens [R] int64 that end a text too early."""
    others = on_device(replacements, torch.int64, tokens.device)
    is_end = (tokens == EARLY_ENDS[0]) | (tokens == EARLY_ENDS[1])
    return torch.where(is_end & (others >= 0), others, tokens)


def select_rows(tensor: Tensor, rows: list[int]) -> Tensor:
    """Select rows of [R, ...]; a view if they are consecutive."""
    if rows and rows == list(range(rows[0], rows[0] + len(rows))):
        return tensor[rows[0] : rows[0] + len(rows)]
    return tensor[on_device(rows, torch.int64, tensor.device)]
