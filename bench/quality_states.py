"""What forms of the WKV state cost in quality: part of `bench.quality --wkv-states`.

Texts are read side by side, a token of each at a time, so that every state is kept in its form after every token, as it
is while a row decodes. Weights and kernels are what a server takes on the device, fp32 on a CPU. Each form is told
beside fp32 states, by quarter of the texts: an error that grows with what was read shows in the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from demo.corpus import mixture
from rwkv_batch.model.state_format import StateFormat
from rwkv_batch.model.step_inputs import StepInputs
from rwkv_batch.model.weights import Weights
from rwkv_batch.runner.pipeline import Pipeline
from rwkv_batch.tokenizer import Tokenizer

QUARTERS = 4
FIRST_SLOT = 2
TOLD_EVERY = 2048


@dataclass(slots=True)
class Text:
    """What is predicted."""

    ids: list[int]
    num_bytes: int


@dataclass(slots=True)
class Compared:
    """Sums over positions, of one model beside the reference."""

    tokens: int = 0
    nats: float = 0.0
    kl: float = 0.0
    off: float = 0.0
    size: float = 0.0
    same: int = 0

    def take(self, logits: Tensor, true: Tensor, following: Tensor) -> None:
        """One chunk: logits [T, V] of both, and the token that follows each position."""
        log_q, log_p = torch.log_softmax(logits, -1), torch.log_softmax(true, -1)
        self.tokens += len(following)
        self.nats -= log_q.gather(1, following.unsqueeze(1)).sum().item()
        self.kl += (log_p.exp() * (log_p - log_q)).sum().item()
        self.off += (logits - true).square().sum().item()
        self.size += true.square().sum().item()
        self.same += int((logits.argmax(-1) == true.argmax(-1)).sum())

    def figures(self, text: Text) -> dict[str, float]:
        """What is printed."""
        return {
            "bits_per_byte": self.nats / math.log(2) / text.num_bytes,
            "kl": self.kl / self.tokens,
            "logits_error": math.sqrt(self.off / self.size),
            "same_token": self.same / self.tokens,
        }


@dataclass(slots=True)
class TokenReader:
    """A model that reads texts side by side, from the zero state."""

    pipeline: Pipeline
    slots: Tensor
    """[texts] int64"""

    def read(self, tokens: Tensor, is_first: bool) -> Tensor:
        """Logits [texts, V] fp32 after the next token [texts] of each."""
        ends = torch.arange(len(tokens) + 1)
        reads = torch.zeros_like(self.slots) if is_first else self.slots
        return self.pipeline.forward(StepInputs(tokens, ends, reads, self.slots, ends[:-1], 1))


def make_reader(weights: Weights, device: str, form: StateFormat, num_texts: int) -> TokenReader:
    """The model as it is served but for its states."""
    pipeline = Pipeline(weights, (device,), wkv_state=form.value)
    pipeline.allocate_slots(FIRST_SLOT + num_texts)
    return TokenReader(pipeline, torch.arange(FIRST_SLOT, FIRST_SLOT + num_texts))


def long_texts(count: int, num_tokens: int) -> Tensor:
    """[count, num_tokens + 1] int64: documents of the demo's mixture one after the other, other ones in each text."""
    tokenizer, texts = Tokenizer(), []
    for i in range(count):
        rng, ids = Random(f"states/{i}"), list[int]()
        while len(ids) <= num_tokens:
            ids += tokenizer.encode("".join(part.text for part in mixture.document(rng)))
        texts.append(ids[: num_tokens + 1])
    return torch.tensor(texts)


def by_state_form(
    weights: Weights, device: str, forms: list[StateFormat], texts: Tensor, told: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """A row for each form and quarter, of texts [texts, T + 1]; `told` is given a line now and then."""
    byte_table, count = Tokenizer().byte_table, texts.shape[1] - 1
    readers = {form: make_reader(weights, device, form, len(texts)) for form in (StateFormat.FP32, *forms)}
    compared, num_bytes = {form: Compared() for form in readers}, 0
    for at in range(count):
        following = texts[:, at + 1]
        found = {form: reader.read(texts[:, at], at == 0) for form, reader in readers.items()}
        for form, logits in found.items():
            compared[form].take(logits, found[StateFormat.FP32], following.to(logits.device))
        num_bytes += sum(len(byte_table[token]) for token in following.tolist())
        quarter, next_quarter = at * QUARTERS // count, (at + 1) * QUARTERS // count
        if next_quarter > quarter:
            for form, sums in compared.items():
                yield {"wkv_state": form.value, "quarter": next_quarter, **sums.figures(Text([], num_bytes))}
            compared, num_bytes = {form: Compared() for form in readers}, 0
        elif (at + 1) % TOLD_EVERY == 0:
            told(f"{at + 1} tokens, KL of this quarter so far: {[sums.kl / sums.tokens for sums in compared.values()]}")
