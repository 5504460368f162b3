"""A model's logits beside those of a reference, over a text."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


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
