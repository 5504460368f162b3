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
from rwkv_batch.runner.prompt_scores import Scored
from rwkv_batch.tokenizer import Tokenizer
from sampling.grammar.errors import GrammarError
from sampling.registry import choose_sampler, order
from sampling.sampler import Logprobs, Sampler

if TYPE_CHECKING:
    from sampling.grammar.masks import Masks

TokenDrawn = tuple[int, TokenLogprob | None]


@dataclass(slots=True)
class Drawn:
    """What one sampler draws in a step, on its way to the host."""

    members: Numbers[int]
    """which of `Launched.drawing`, in order"""
    copy: HostCopy | TokenCopy
    """token ids [n] int64, and log-probabilities (`Logprobs`) where there are any"""
    with_logprobs: bool = False
    logits: HostCopy | None = None
    """[t, V] fp32, of the members that tell them (`GenerateRequest.tells_logits`), in order"""
    places: list[int] | None = None
    """where the members' tokens stand among them; None: there is nothing else"""


@dataclass(slots=True)
class Undrawn:
    """Rows of a step that draw under masks, once all they drew before is known."""

    members: list[int]
    """which of `Launched.drawing`, in order"""
    logits: Tensor
    """[R, V] fp32, as the step left them; overwritten by the next"""
    places: list[int]
    """the members' rows of it"""


@dataclass(slots=True)
class Launched:
    """A step on its way, or a part of one."""

    rows: list[ScheduledRow]
    drawing: list[ScheduledRow]
    draws: list[Drawn] = field(default_factory=list)
    """per sampler"""
    started: float = field(default_factory=time.monotonic)
    number: int = -1
    """of the step"""
    launched: float = 0.0
    """when its launch ended"""
    undrawn: Undrawn | None = None
    tokens_sent: int = 0
    """number under which what it draws comes to the first device (`LastTokens.bring`)"""
    scored: Scored | None = None
    """log-probabilities of prompts' tokens"""
    layers_s: float = 0.0
    """how long the layers took, see `Pipeline`"""
    draw_s: float = 0.0
    """how long the draw of rows without a constraint took"""
    held_s: float = 0.0
    """how long masks and draws of the others took"""

    @property
    def awaits_masks(self) -> bool:
        """Whether rows of it have not drawn yet, because a constraint holds them."""
        return self.undrawn is not None

    @property
    def undrawn_rows(self) -> list[ScheduledRow]:
        """Those rows."""
        return [] if self.undrawn is None else [self.drawing[i] for i in self.undrawn.members]


class Drawing:
    """Samplers of the last device, and what they draw."""

    def __init__(
        self, preferred: tuple[str, ...], device: torch.device, num_seats: int, vocab: int, tokenizer: Tokenizer
    ) -> None:
        """`preferred`: names of samplers in order (`--samplers`)."""
        self._preferred = preferred
        self._device = device
        self._num_seats = num_seats
        self._vocab = vocab
        self._byte_table = tokenizer.byte_table
        self._exempt_ids = [i for i in tokenizer.penalty_exempt_ids if i < vocab]
        self._samplers: dict[str, Sampler] = {}
        self._masks: Masks | None = None
        self.refusals: dict[str, str] = {}
        """samplers that cannot serve -> why"""
        self.is_making = False
        """Whether a sampler is being made: its kernels may have to be compiled. Any thread."""

    @property
    def used(self) -> dict[str, str]:
        """Asked-for name ("default" for none) -> the sampler that serves it."""
        return {name or "default": sampler.name for name, sampler in self._samplers.items()}

    def sampler(self, name: str) -> Sampler:
        """The sampler of that name if `--samplers` has it ("" = its first), or the next; made at first use."""
        if name not in self._samplers:
            self.is_making = True
            try:
                self._samplers[name], refusals = choose_sampler(
                    order(self._preferred, asked=name),
                    self._device,
                    self._num_seats,
                    self._vocab,
                    self._exempt_ids,
                    made=self._samplers.values(),
                )
            finally:
                self.is_making = False
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
            if not sequence.has_drawn:
                sampler, request = self.sampler(sequence.sampler), sequence.request
                sampler.admit(sequence.seat, request.sampling)
                if request.resumed is not None and request.resumed.token_ids:
                    sampler.follow([sequence.seat], [request.resumed.token_ids])

    def draw(self, step: Launched, logits: Tensor, last_tokens: LastTokens) -> None:
        """Draw for the rows of logits [R, V] fp32, those of each sampler together. Does not wait for the device.

        Rows with a constraint are left to `draw_constrained`.
        """
        self.admit(row.sequence for row in step.drawing)
        free, held = parted(step.drawing)
        if held:
            step.undrawn = Undrawn(held, logits, held)
        started = time.perf_counter()
        self._draw_members(step, free, logits, free, last_tokens)
        step.draw_s = time.perf_counter() - started

    def draw_constrained(self, step: Launched, last_tokens: LastTokens) -> list[tuple[Sequence, GrammarError]]:
        """Draw for the rows under masks that have not ended; returns those that cannot go on, and why."""
        started = time.perf_counter()
        undrawn, step.undrawn = step.undrawn, None
        assert undrawn is not None
        pairs = zip(undrawn.members, undrawn.places, strict=True)
        alive = [(i, place) for i, place in pairs if step.drawing[i].sequence.may_draw_in(step.number)]
        members, places = [i for i, _ in alive], [place for _, place in alive]
        sequences = [step.drawing[i].sequence for i in members]
        if not members:
            return []
        self._tell_samplers(sequences)
        masks, errors = self._mask_memory().fill([s.matcher for s in sequences if s.matcher is not None])
        self._draw_members(step, members, undrawn.logits, places, last_tokens, masks)
        step.held_s = time.perf_counter() - started
        return [(sequence, error) for sequence, error in zip(sequences, errors, strict=True) if error is not None]

    def _tell_samplers(self, sequences: list[Sequence]) -> None:
        """Have their samplers count what rows have taken without a draw."""
        runs: dict[str, list[Sequence]] = {}
        for sequence in sequences:
            if sequence.untold:
                runs.setdefault(sequence.sampler, []).append(sequence)
        for name, told in runs.items():
            self.sampler(name).follow([sequence.seat for sequence in told], [sequence.untold for sequence in told])
            for sequence in told:
                sequence.untold = []

    def _mask_memory(self) -> Masks:
        if self._masks is None:
            from sampling.grammar.masks import Masks, mask_threads

            self._masks = Masks(self._vocab, self._device, mask_threads(self._device))
        return self._masks

    def _draw_members(
        self,
        step: Launched,
        members: list[int],
        logits: Tensor,
        places: list[int],
        last_tokens: LastTokens,
        masks: Tensor | None = None,
    ) -> None:
        """Draw for `members` of the step's drawing rows, whose logits are these `places` of [R, V].

        masks [m, V/32] int32, in their order; None: they may draw anything.
        """
        groups: dict[str, list[int]] = {}
        for number, i in enumerate(members):
            groups.setdefault(step.drawing[i].sequence.sampler, []).append(number)
        for name, numbers in groups.items():
            picked = _rows(logits, [places[number] for number in numbers])
            allowed = None if masks is None else _rows(masks, numbers)
            sequences = [step.drawing[members[number]].sequence for number in numbers]
            seats = [sequence.seat for sequence in sequences]
            told = _told_logits(picked, sequences)
            sampled = self.sampler(name).sample(picked, seats, allowed)
            step.tokens_sent = last_tokens.remember(seats, sampled.token_ids)
            logprobs = sampled.logprobs
            rest = (logprobs.chosen, logprobs.top_ids, logprobs.top) if logprobs is not None else ()
            drawn = [members[number] for number in numbers]
            copy = HostCopy(sampled.token_ids, *rest)
            step.draws.append(Drawn(drawn, copy, with_logprobs=logprobs is not None, logits=told))

    def read(self, step: Launched) -> list[TokenDrawn]:
        """Tokens of the rows that draw, in their order. Waits for the step to end."""
        drawn: list[TokenDrawn] = [(0, None)] * len(step.drawing)
        for part in step.draws:
            tokens = part.copy.tokens()
            if part.places is not None:
                tokens = [tokens[place] for place in part.places]
            results: list[TokenDrawn] = [(token, None) for token in tokens]
            if part.with_logprobs and isinstance(part.copy, HostCopy):
                _, *logprobs = part.copy.read()
                told = iter(()) if part.logits is None else iter(part.logits.read()[0])
                rows = [step.drawing[i] for i in part.members]
                results = self._with_logprobs(rows, tokens, Logprobs(*logprobs), told)
            if len(results) == len(drawn):
                return results
            for i, entry in zip(part.members, results, strict=True):
                drawn[i] = entry
        return drawn

    def _with_logprobs(
        self, rows: list[ScheduledRow], tokens: list[int], logprobs: Logprobs, told: Iterator[Tensor]
    ) -> list[TokenDrawn]:
        """The tokens of rows with what they tell of them; `told`: logits [V] fp32 of each that tells those."""
        table = self._byte_table
        chosen, ids, top = logprobs.chosen.tolist(), logprobs.top_ids.tolist(), logprobs.top.tolist()
        results: list[TokenDrawn] = []
        for i, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            wanted = row.sequence.request.sampling.top_logprobs
            if wanted is None:
                results.append((token, None))
                continue
            rivals = [(table[j], value) for j, value in zip(ids[i][:wanted], top[i][:wanted], strict=True)]
            if row.sequence.matcher is not None:  # what the grammar forbids is no rival
                rivals = [(rival, value) for rival, value in rivals if value > -math.inf]
            all_of_them = next(told).numpy().tobytes() if row.sequence.request.tells_logits else b""
            results.append((token, TokenLogprob(table[token], chosen[i], rivals, all_of_them)))
        return results


def parted(drawing: list[ScheduledRow]) -> tuple[list[int], list[int]]:
    """Which of the rows may draw anything, and which a constraint holds."""
    held = [i for i, row in enumerate(drawing) if row.sequence.matcher is not None]
    if not held:
        return list(range(len(drawing))), []
    return [i for i, row in enumerate(drawing) if row.sequence.matcher is None], held


def _told_logits(logits: Tensor, sequences: list[Sequence]) -> HostCopy | None:
    """Those of the sequences that tell them, of logits [R, V] fp32, before a sampler overwrites them."""
    requests = enumerate(sequence.request for sequence in sequences)
    rows = [row for row, asked in requests if asked.tells_logits and asked.sampling.top_logprobs is not None]
    return HostCopy(logits[on_device(rows, torch.int64, logits.device)].float()) if rows else None


def _rows(tensor: Tensor, rows: list[int]) -> Tensor:
    """Some rows of [R, ...]; where they are neighbours in order, the tensor's own memory."""
    if rows and rows == list(range(rows[0], rows[0] + len(rows))):
        return tensor[rows[0] : rows[0] + len(rows)]
    return tensor[on_device(rows, torch.int64, tensor.device)]
