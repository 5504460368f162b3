"""Quality cost of WKV state formats: part of `bench.quality --wkv-states`.

The texts are read in one batch, one token at a time, so the state is stored in its format after every token, as in
decode. Weights and kernels are the server's defaults for the device, fp32 on a CPU. Each format is compared with fp32
states, per quarter of the texts: an error that grows with the length shows in the last quarter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from demo.corpus import mixture
from rwkv_batch.model.state import StateFormat
from rwkv_batch.model.step_inputs import StepInputs
from rwkv_batch.model.weights import Weights
from rwkv_batch.runner.pipeline import Pipeline
from rwkv_batch.tokenizer import Tokenizer

QUARTERS = 4
FIRST_SLOT = 2


@dataclass(slots=True)
class Text:
    """Token ids to predict, and their number of bytes."""

    ids: list[int]
    num_bytes: int


@dataclass(slots=True)
class Compared:
    """Sums over positions that compare a model with the reference."""

    tokens: int = 0
    nats: float = 0.0
    kl: float = 0.0
    error_sq: float = 0.0
    norm_sq: float = 0.0
    same: int = 0

    def add(self, logits: Tensor, reference: Tensor, following: Tensor) -> None:
        """Add one chunk: logits [T, V] of both, and the token that follows each position [T]."""
        log_q, log_p = torch.log_softmax(logits, -1), torch.log_softmax(reference, -1)
        self.tokens += len(following)
        self.nats -= log_q.gather(1, following.unsqueeze(1)).sum().item()
        self.kl += (log_p.exp() * (log_p - log_q)).sum().item()
        self.error_sq += (logits - reference).square().sum().item()
        self.norm_sq += reference.square().sum().item()
        self.same += int((logits.argmax(-1) == reference.argmax(-1)).sum())

    def figures(self, text: Text) -> dict[str, float]:
        return {
            "bits_per_byte": self.nats / math.log(2) / text.num_bytes,
            "kl": self.kl / self.tokens,
            "logits_error": math.sqrt(self.error_sq / self.norm_sq),
            "same_token": self.same / self.tokens,
        }


@dataclass(slots=True)
class TokenReader:
    """A model that reads a batch of texts from the zero state."""

    pipeline: Pipeline
    slots: Tensor
    """[texts] int64"""

    def read(self, tokens: Tensor, is_first: bool) -> Tensor:
        """Return logits [texts, V] fp32 after the next token [texts] of each."""
        ends = torch.arange(len(tokens) + 1)
        reads = torch.zeros_like(self.slots) if is_first else self.slots
        return self.pipeline.forward(StepInputs(tokens, ends, reads, self.slots, ends[:-1], 1))


def make_reader(weights: Weights, device: str, state_format: StateFormat, num_texts: int) -> TokenReader:
    """Return the model as served, with this state format."""
    pipeline = Pipeline(weights, (device,), wkv_state=state_format.value)
    pipeline.allocate_slots(FIRST_SLOT + num_texts)
    return TokenReader(pipeline, torch.arange(FIRST_SLOT, FIRST_SLOT + num_texts))


def long_texts(count: int, num_tokens: int) -> Tensor:
    """Return [count, num_tokens + 1] int64: documents of the demo's corpus, different in each text."""
    tokenizer, texts = Tokenizer(), []
    for i in range(count):
        rng, ids = Random(f"states/{i}"), list[int]()
        while len(ids) <= num_tokens:
            ids += tokenizer.encode("".join(part.text for part in mixture.document(rng)))
        texts.append(ids[: num_tokens + 1])
    return torch.tensor(texts)


def by_state_format(
    weights: Weights, device: str, formats: list[StateFormat], texts: Tensor
) -> Iterator[dict[str, Any]]:
    """Yield a row per format and quarter of the texts [texts, T + 1]."""
    byte_table, count = Tokenizer().byte_table, texts.shape[1] - 1
    readers = {
        state_format: make_reader(weights, device, state_format, len(texts))
        for state_format in (StateFormat.FP32, *formats)
    }
    compared, num_bytes = {state_format: Compared() for state_format in readers}, 0
    for i in range(count):
        following = texts[:, i + 1]
        found = {state_format: reader.read(texts[:, i], i == 0) for state_format, reader in readers.items()}
        for state_format, logits in found.items():
            compared[state_format].add(logits, found[StateFormat.FP32], following.to(logits.device))
        num_bytes += sum(len(byte_table[token]) for token in following.tolist())
        quarter, next_quarter = i * QUARTERS // count, (i + 1) * QUARTERS // count
        if next_quarter > quarter:
            for state_format, sums in compared.items():
                yield {"wkv_state": state_format.value, "quarter": next_quarter, **sums.figures(Text([], num_bytes))}
            compared, num_bytes = {state_format: Compared() for state_format in readers}, 0
