"""Who draws a step's tokens, and how they come to the host: samplers by name, made at first use. Engine thread."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from native.transfer import on_device
from rwkv_batch.core.scheduler import ScheduledRow
from rwkv_batch.core.sequence import Sequence
from rwkv_batch.request import TokenLogprob
from rwkv_batch.runner.decode_graphs import LastTokens
from rwkv_batch.runner.host_copy import HostCopy
from rwkv_batch.runner.prompt_scores import Scored
from rwkv_batch.tokenizer import Tokenizer
from sampling.registry import choose_sampler, order
from sampling.sampler import Logprobs, Sampler

TokenDrawn = tuple[int, TokenLogprob | None]


@dataclass(slots=True)
class Drawn:
    """What one sampler draws in a step, on its way to the host."""

    members: list[int]
    """which of `Launched.drawing`, in order"""
    copy: HostCopy
    """token ids [n] int64, and log-probabilities (`Logprobs`) where there are any"""
    with_logprobs: bool = False
    places: list[int] | None = None
    """where the members' tokens stand among them; None: there is nothing else"""


@dataclass(slots=True)
class Launched:
    """A step on its way."""

    rows: list[ScheduledRow]
    drawing: list[ScheduledRow]
    draws: list[Drawn] = field(default_factory=list)
    """per sampler"""
    started: float = field(default_factory=time.monotonic)
    launched: float = 0.0
    """when its launch ended"""
    tokens_sent: int = 0
    """number under which what it draws comes to the first device (`LastTokens.bring`)"""
    scored: Scored | None = None
    """log-probabilities of prompts' tokens"""


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
            if len(sequence.token_ids) == sequence.prompt_end:
                self.sampler(sequence.sampler).admit(sequence.seat, sequence.request.sampling)

    def draw(self, step: Launched, logits: Tensor, last_tokens: LastTokens) -> None:
        """Draw for the rows of logits [R, V] fp32, those of each sampler together. Does not wait for the device."""
        groups: dict[str, list[int]] = {}
        for i, row in enumerate(step.drawing):
            groups.setdefault(row.sequence.sampler, []).append(i)
        for name, members in groups.items():
            picked = logits if len(groups) == 1 else logits[on_device(members, torch.int64, logits.device)]
            sequences = [step.drawing[i].sequence for i in members]
            seats = [sequence.seat for sequence in sequences]
            self.admit(sequences)
            sampled = self.sampler(name).sample(picked, seats)
            step.tokens_sent = last_tokens.remember(seats, sampled.token_ids)
            logprobs = sampled.logprobs
            rest = (logprobs.chosen, logprobs.top_ids, logprobs.top) if logprobs is not None else ()
            step.draws.append(Drawn(members, HostCopy(sampled.token_ids, *rest), with_logprobs=logprobs is not None))

    def read(self, step: Launched) -> list[TokenDrawn]:
        """Tokens of the rows that draw, in their order. Waits for the step to end."""
        drawn: list[TokenDrawn] = [(0, None)] * len(step.drawing)
        for part in step.draws:
            on_host, *logprobs = part.copy.read()
            tokens = on_host.tolist()
            if part.places is not None:
                tokens = [tokens[place] for place in part.places]
            results: list[TokenDrawn] = [(token, None) for token in tokens]
            if part.with_logprobs:
                results = self._with_logprobs([step.drawing[i] for i in part.members], tokens, Logprobs(*logprobs))
            if len(results) == len(drawn):
                return results
            for i, entry in zip(part.members, results, strict=True):
                drawn[i] = entry
        return drawn

    def _with_logprobs(self, rows: list[ScheduledRow], tokens: list[int], logprobs: Logprobs) -> list[TokenDrawn]:
        table = self._byte_table
        chosen, ids, top = logprobs.chosen.tolist(), logprobs.top_ids.tolist(), logprobs.top.tolist()
        results: list[TokenDrawn] = []
        for i, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            wanted = row.sequence.request.sampling.top_logprobs
            if wanted is None:
                results.append((token, None))
                continue
            rivals = [(table[j], value) for j, value in zip(ids[i][:wanted], top[i][:wanted], strict=True)]
            results.append((token, TokenLogprob(table[token], chosen[i], rivals)))
        return results
