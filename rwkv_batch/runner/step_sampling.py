"""Who draws a step's tokens, and how they come to the host: samplers by name, made at first use. Engine thread."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Numbers
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from native.transfer import on_device
from rwkv_batch.core.scheduler import ScheduledRow
from rwkv_batch.core.sequence import Sequence
from rwkv_batch.request import TokenLogprob
from rwkv_batch.runner.decode_graphs import LastTokens
from rwkv_batch.runner.host_copy import HostCopy, TokenCopy
from rwkv_batch.runner.prompt_logprobs import InFlightScores
from rwkv_batch.tokenizer import Tokenizer
from sampling.grammar.errors import GrammarError
from sampling.registry import choose_sampler, order
from sampling.sampler import Logprobs, Sampler

if TYPE_CHECKING:
    from sampling.grammar.masks import Masks

SampledToken = tuple[int, TokenLogprob | None]


@dataclass(slots=True)
class InFlightTokens:
    """What one sampler draws in a step, on its way to the host."""

    members: Numbers[int]
    """which of `InFlightStep.sampling_rows`, in order"""
    copy: HostCopy | TokenCopy
    """token ids [n] int64, and log-probabilities (`Logprobs`) where there are any"""
    with_logprobs: bool = False
    logits: HostCopy | None = None
    """[t, V] fp32, of the members that tell them (`GenerateRequest.return_logits`), in order"""
    places: list[int] | None = None
    """where the members' tokens stand among them; None: there is nothing else"""


@dataclass(slots=True)
class DeferredSample:
    """Rows of a step that draw under masks, once all they drew before is known."""

    members: list[int]
    """which of `InFlightStep.sampling_rows`, in order"""
    logits: Tensor
    """[R, V] fp32, as the step left them; overwritten by the next"""
    places: list[int]
    """the members' rows of it"""


@dataclass(slots=True)
class InFlightStep:
    """A step on its way, or a part of one."""

    rows: list[ScheduledRow]
    sampling_rows: list[ScheduledRow]
    samples: list[InFlightTokens] = field(default_factory=list)
    """per sampler"""
    started: float = field(default_factory=time.monotonic)
    number: int = -1
    """of the step"""
    launched: float = 0.0
    """when its launch ended"""
    deferred: DeferredSample | None = None
    tokens_sent: int = 0
    """number under which what it draws comes to the first device (`LastTokens.bring`)"""
    scored: InFlightScores | None = None
    """log-probabilities of prompts' tokens"""
    layers_s: float = 0.0
    """how long the layers took, see `Pipeline`"""
    sample_s: float = 0.0
    """how long the draw of rows without a constraint took"""
    constrained_sample_s: float = 0.0
    """how long masks and draws of the others took"""

    @property
    def awaits_masks(self) -> bool:
        """Whether rows of it have not drawn yet, because a constraint holds them."""
        return self.deferred is not None

    @property
    def deferred_rows(self) -> list[ScheduledRow]:
        """Those rows."""
        return [] if self.deferred is None else [self.sampling_rows[i] for i in self.deferred.members]


class StepSampler:
    """Samplers of the last device, and what they draw."""

    def __init__(
        self, preferred: tuple[str, ...], device: torch.device, num_req_slots: int, vocab: int, tokenizer: Tokenizer
    ) -> None:
        """`preferred`: names of samplers in order (`--samplers`)."""
        self._preferred = preferred
        self._device = device
        self._num_req_slots = num_req_slots
        self._vocab = vocab
        self._byte_table = tokenizer.byte_table
        self._penalty_exempt_ids = [i for i in tokenizer.penalty_exempt_ids if i < vocab]
        self._samplers: dict[str, Sampler] = {}
        self._masks: Masks | None = None
        self.refusals: dict[str, str] = {}
        """samplers that cannot serve -> why"""
        self.is_compiling = False
        """Whether a sampler is being made: its kernels may have to be compiled. Any thread."""

    @property
    def used(self) -> dict[str, str]:
        """Asked-for name ("default" for none) -> the sampler that serves it."""
        return {name or "default": sampler.name for name, sampler in self._samplers.items()}

    def sampler(self, name: str) -> Sampler:
        """The sampler of that name if `--samplers` has it ("" = its first), or the next; made at first use."""
        if name not in self._samplers:
            self.is_compiling = True
            try:
                self._samplers[name], refusals = choose_sampler(
                    order(self._preferred, asked=name),
                    self._device,
                    self._num_req_slots,
                    self._vocab,
                    self._penalty_exempt_ids,
                    made=self._samplers.values(),
                )
            finally:
                self.is_compiling = False
            self.refusals |= refusals
        return self._samplers[name]

    def fits_graphs(self, sequences: Iterable[Sequence]) -> bool:
        """Whether all of them draw as graphs do: by the first sampler, and without log-probabilities."""
        for sequence in sequences:
            if sequence.request.sampling.top_logprobs is not None:
                return False
            name = sequence.job.spec.sampler
            if name and self.sampler(name) is not self.sampler(""):
                return False
        return True

    def admit(self, sequences: Iterable[Sequence]) -> None:
        """Tell their samplers of rows that draw for the first time."""
        for sequence in sequences:
            if not sequence.has_sampled:
                sampler, request = self.sampler(sequence.sampler), sequence.request
                sampler.admit(sequence.req_slot, request.sampling)
                if request.resumed is not None and request.resumed.token_ids:
                    sampler.append_tokens([sequence.req_slot], [request.resumed.token_ids])

    def sample(self, step: InFlightStep, logits: Tensor, last_tokens: LastTokens) -> None:
        """Draw for the rows of logits [R, V] fp32, those of each sampler together. Does not wait for the device.

        Rows with a constraint are left to `sample_constrained`.
        """
        self.admit(row.sequence for row in step.sampling_rows)
        unconstrained, constrained = split_by_constraint(step.sampling_rows)
        if constrained:
            step.deferred = DeferredSample(constrained, logits, constrained)
        started = time.perf_counter()
        self._sample_rows(step, unconstrained, logits, unconstrained, last_tokens)
        step.sample_s = time.perf_counter() - started

    def sample_constrained(self, step: InFlightStep, last_tokens: LastTokens) -> list[tuple[Sequence, GrammarError]]:
        """Draw for the rows under masks that have not ended; returns those that cannot go on, and why."""
        started = time.perf_counter()
        deferred, step.deferred = step.deferred, None
        assert deferred is not None
        pairs = zip(deferred.members, deferred.places, strict=True)
        alive = [(i, place) for i, place in pairs if step.sampling_rows[i].sequence.may_sample_in(step.number)]
        members, places = [i for i, _ in alive], [place for _, place in alive]
        sequences = [step.sampling_rows[i].sequence for i in members]
        if not members:
            return []
        self._append_jump_forward_tokens(sequences)
        masks, errors = self._mask_memory().fill([s.matcher for s in sequences if s.matcher is not None])
        self._sample_rows(step, members, deferred.logits, places, last_tokens, masks)
        step.constrained_sample_s = time.perf_counter() - started
        return [(sequence, error) for sequence, error in zip(sequences, errors, strict=True) if error is not None]

    def _append_jump_forward_tokens(self, sequences: list[Sequence]) -> None:
        """Have their samplers count what rows have taken without a draw."""
        runs: dict[str, list[Sequence]] = {}
        for sequence in sequences:
            if sequence.uncounted_ids:
                runs.setdefault(sequence.sampler, []).append(sequence)
        for name, returned in runs.items():
            self.sampler(name).append_tokens(
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
        members: list[int],
        logits: Tensor,
        places: list[int],
        last_tokens: LastTokens,
        masks: Tensor | None = None,
    ) -> None:
        """Draw for `members` of the step's sampling_rows rows, whose logits are these `places` of [R, V].

        masks [m, V/32] int32, in their order; None: they may draw anything.
        """
        groups: dict[str, list[int]] = {}
        for number, i in enumerate(members):
            groups.setdefault(step.sampling_rows[i].sequence.sampler, []).append(number)
        for name, numbers in groups.items():
            picked = _select_rows(logits, [places[number] for number in numbers])
            allowed = None if masks is None else _select_rows(masks, numbers)
            sequences = [step.sampling_rows[members[number]].sequence for number in numbers]
            req_slots = [sequence.req_slot for sequence in sequences]
            returned = _returned_logits(picked, sequences)
            sampled = self.sampler(name).sample(picked, req_slots, allowed)
            step.tokens_sent = last_tokens.store(req_slots, sampled.token_ids)
            logprobs = sampled.logprobs
            rest = (logprobs.chosen, logprobs.top_ids, logprobs.top) if logprobs is not None else ()
            sampled_tokens = [members[number] for number in numbers]
            copy = HostCopy(sampled.token_ids, *rest)
            step.samples.append(
                InFlightTokens(sampled_tokens, copy, with_logprobs=logprobs is not None, logits=returned)
            )

    def read(self, step: InFlightStep) -> list[SampledToken]:
        """Tokens of the rows that draw, in their order. Waits for the step to end."""
        sampled_tokens: list[SampledToken] = [(0, None)] * len(step.sampling_rows)
        for part in step.samples:
            tokens = part.copy.tokens()
            if part.places is not None:
                tokens = [tokens[place] for place in part.places]
            results: list[SampledToken] = [(token, None) for token in tokens]
            if part.with_logprobs and isinstance(part.copy, HostCopy):
                _, *logprobs = part.copy.read()
                returned = iter(()) if part.logits is None else iter(part.logits.read()[0])
                rows = [step.sampling_rows[i] for i in part.members]
                results = self._with_logprobs(rows, tokens, Logprobs(*logprobs), returned)
            if len(results) == len(sampled_tokens):
                return results
            for i, entry in zip(part.members, results, strict=True):
                sampled_tokens[i] = entry
        return sampled_tokens

    def _with_logprobs(
        self, rows: list[ScheduledRow], tokens: list[int], logprobs: Logprobs, returned: Iterator[Tensor]
    ) -> list[SampledToken]:
        """The tokens of rows with what they tell of them; `returned`: logits [V] fp32 of each that tells those."""
        table = self._byte_table
        chosen, ids, top = logprobs.chosen.tolist(), logprobs.top_ids.tolist(), logprobs.top.tolist()
        results: list[SampledToken] = []
        for i, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            wanted = row.sequence.request.sampling.top_logprobs
            if wanted is None:
                results.append((token, None))
                continue
            alternatives = [(table[j], value) for j, value in zip(ids[i][:wanted], top[i][:wanted], strict=True)]
            if row.sequence.matcher is not None:  # what the grammar forbids is no rival
                alternatives = [(alternative, value) for alternative, value in alternatives if value > -math.inf]
            logits_bytes = next(returned).numpy().tobytes() if row.sequence.request.return_logits else b""
            results.append((token, TokenLogprob(table[token], chosen[i], alternatives, logits_bytes)))
        return results


def split_by_constraint(sampling_rows: list[ScheduledRow]) -> tuple[list[int], list[int]]:
    """Which of the rows may draw anything, and which a constraint holds."""
    constrained = [i for i, row in enumerate(sampling_rows) if row.sequence.matcher is not None]
    if not constrained:
        return list(range(len(sampling_rows))), []
    return [i for i, row in enumerate(sampling_rows) if row.sequence.matcher is None], constrained


def _returned_logits(logits: Tensor, sequences: list[Sequence]) -> HostCopy | None:
    """Those of the sequences that tell them, of logits [R, V] fp32, before a sampler overwrites them."""
    requests = enumerate(sequence.request for sequence in sequences)
    rows = [row for row, asked in requests if asked.return_logits and asked.sampling.top_logprobs is not None]
    return HostCopy(logits[on_device(rows, torch.int64, logits.device)].float()) if rows else None


def _select_rows(tensor: Tensor, rows: list[int]) -> Tensor:
    """Some rows of [R, ...]; where they are neighbours in order, the tensor's own memory."""
    if rows and rows == list(range(rows[0], rows[0] + len(rows))):
        return tensor[rows[0] : rows[0] + len(rows)]
    return tensor[on_device(rows, torch.int64, tensor.device)]
