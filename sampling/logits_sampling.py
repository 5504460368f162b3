"""Reads logits that an engine returned and samples from them. Runs on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sampling.naive import NaiveSampler
from sampling.params import SamplingParams

_SEEDS = 2**62


def as_tensor(logits_bytes: bytes) -> Tensor:
    """Return `TokenLogprob.logits` as a new tensor [V] fp32."""
    return torch.frombuffer(bytearray(logits_bytes), dtype=torch.float32)


def as_rows(rows: Sequence[Tensor]) -> Tensor:
    """Stack T tensors [V] to [T, V]."""
    return torch.stack(list(rows))


def sample_one(logits: Tensor, temperature: float, top_p: float, top_k: int) -> int:
    """Sample a token id from logits [V] of any dtype and device.

    The logits stay unchanged. top_k 0 is off. The seed comes from torch's generator, so `torch.manual_seed` decides it.
    Raises ValueError.
    """
    if not temperature >= 0:
        raise ValueError(f"temperature must be at least 0 (greedy), got {temperature}")
    row = logits.detach().to("cpu", torch.float32, copy=True).reshape(1, -1)
    sampler = NaiveSampler(1, row.shape[1], row.device, [])
    seed = int(torch.randint(_SEEDS, ()))
    sampler.admit(0, SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed))
    return int(sampler.sample(row, [0]).token_ids[0])
