"""What a sampler needs to know of a row with filters: which run, in which order, on which tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from sampling.params import MAX_WINDOW, SamplingParams


@dataclass(frozen=True)
class RowContext:
    """What filters need to know of a row besides its parameters."""

    prompt: Sequence[int] = ()
    """token ids; MAX_WINDOW of them at most are used"""
    stop_ids: Sequence[int] = ()
    """tokens that end the row"""
    breakers: Tensor | None = None
    """[V] bool, on the CPU: tokens with a sequence breaker of DRY"""


class BreakerMasks:
    """Finds the tokens that contain a sequence breaker."""

    def __init__(self, byte_table: Sequence[bytes]) -> None:
        self._byte_table = byte_table
        self._masks: dict[tuple[str, ...], Tensor] = {}

    @cached_property
    def _text(self) -> tuple[Tensor, Tensor]:
        """All tokens' bytes [B] uint8, and each byte's token [B]."""
        lengths = torch.tensor([len(token) for token in self._byte_table])
        text = torch.frombuffer(bytearray(b"".join(self._byte_table)), dtype=torch.uint8)
        return text, torch.repeat_interleave(torch.arange(len(lengths)), lengths)

    def build(self, breakers: tuple[str, ...]) -> Tensor:
        """Return [V] bool. The masks of the last few breakers are kept."""
        if breakers not in self._masks:
            if len(self._masks) >= 16:
                self._masks.clear()
            self._masks[breakers] = self._find(breakers)
        return self._masks[breakers]

    def _find(self, breakers: tuple[str, ...]) -> Tensor:
        text, owner = self._text
        found = torch.zeros(len(self._byte_table), dtype=torch.bool)
        for breaker in filter(None, (one.encode() for one in breakers)):
            starts = len(text) - len(breaker) + 1
            hits = torch.ones(starts, dtype=torch.bool)
            for at, byte in enumerate(breaker):
                hits &= text[at : at + starts] == byte
            first, last = owner[:starts][hits], owner[len(breaker) - 1 :][hits]
            found[first[first == last]] = True
        return found


def split(params: SamplingParams, vocab: int) -> tuple[tuple[str, ...], SamplingParams]:
    """Return a row's active filters, and the sampler's parameters after."""
    assert params.filters is not None
    filters, seed = params.filters, params.seed
    names = filters.samplers
    temperature = params.temperature if "temperature" in names else 1.0
    top_k = params.top_k if "top_k" in names and 0 < params.top_k < vocab else 0
    top_p = params.top_p if "top_p" in names else 1.0
    if temperature == 0 or top_k == 1 or top_p <= 0:
        active = [name for name in names if name in ("penalties", "dry") and _is_active(name, params)]
        return tuple(active), SamplingParams(temperature=0.0, seed=seed)
    if filters.mirostat:
        names = (*(name for name in names if name in ("penalties", "dry", "temperature")), "mirostat")
    active = [name for name in names if _is_active(name, params)]
    inner_k, inner_p = 0, 1.0
    if active and active[-1] == "top_k":
        inner_k = top_k
        active.pop()
    if active and active[-1] == "top_p":
        inner_p = top_p
        active.pop()
    return tuple(active), SamplingParams(top_k=inner_k, top_p=inner_p, seed=seed)


def _is_active(name: str, params: SamplingParams) -> bool:
    filters = params.filters
    assert filters is not None
    return {
        "penalties": params.has_penalties or filters.uses_repetition,
        "dry": filters.uses_dry,
        "temperature": params.temperature != 1 or filters.dynatemp_range > 0,
        "top_n_sigma": filters.top_n_sigma > 0,
        "typ_p": filters.typical_p < 1,
        "min_p": filters.min_p > 0,
        "epsilon_cutoff": filters.epsilon_cutoff > 0,
        "eta_cutoff": filters.eta_cutoff > 0,
        "top_p": params.top_p < 1,
        "top_k": params.top_k > 0,
        "xtc": filters.xtc_probability > 0,
        "mirostat": True,
    }[name]


def window(last_n: int) -> int:
    """Return how many of the last tokens `last_n` means."""
    return MAX_WINDOW if last_n < 0 else min(last_n, MAX_WINDOW)
