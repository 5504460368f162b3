"""A pair of low-rank matrices beside a weight of a layer: W x + B (A x), for the rows whose adapter has it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

MAX_RANK = 128
"""Of a pair that is served beside others."""


class Target(enum.IntEnum):
    """The weights of a layer that an adapter may stand beside."""

    RECEPTANCE = 0
    KEY = 1
    VALUE = 2
    OUTPUT = 3
    FFN_KEY = 4
    FFN_VALUE = 5


@dataclass(frozen=True, slots=True)
class Pair:
    """What is added beside a weight [out, in]: b (a x)."""

    a: Tensor
    """[rank, in] fp32"""
    b: Tensor
    """[out, rank] fp32, its scale with it"""

    @property
    def rank(self) -> int:
        """Of both."""
        return len(self.a)

    def to(self, device: torch.device, dtype: torch.dtype) -> Pair:
        """The same there, contiguous."""
        return Pair(self.a.to(device, dtype).contiguous(), self.b.to(device, dtype).contiguous())


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in one channel mix (MoLE): for each token a few of them, each with pairs of its own.

    Scores are 0 for the first expert and router @ x for the others; those of the `active` highest, through a softmax,
    weigh what these experts' channel mixes make of x.
    """

    router: Tensor
    """[experts - 1, C] fp32"""
    pairs: tuple[Mapping[Target, Pair], ...]
    """of each expert, beside FFN_KEY and FFN_VALUE"""
    active: int
    """how many are mixed for a token"""

    def to(self, device: torch.device, dtype: torch.dtype) -> Experts:
        """The same there, contiguous."""
        pairs = tuple({target: pair.to(device, dtype) for target, pair in one.items()} for one in self.pairs)
        return Experts(self.router.to(device, dtype).contiguous(), pairs, self.active)


@dataclass(frozen=True, slots=True)
class LayerPairs:
    """What an adapter has in one layer."""

    pairs: Mapping[Target, Pair] = field(default_factory=dict)
    """weights that are left as they are have none"""
    experts: Experts | None = None
    """beside FFN_KEY and FFN_VALUE, which have no pairs then"""

    def to(self, device: torch.device, dtype: torch.dtype) -> LayerPairs:
        """The same there, contiguous."""
        experts = None if self.experts is None else self.experts.to(device, dtype)
        return LayerPairs({target: pair.to(device, dtype) for target, pair in self.pairs.items()}, experts)

    @property
    def all_pairs(self) -> list[Pair]:
        """Those of experts among them."""
        own = [] if self.experts is None else [pair for one in self.experts.pairs for pair in one.values()]
        return [*self.pairs.values(), *own]


def padded(pair: Pair, step: int) -> tuple[Tensor, Tensor]:
    """(a [rank', in], b [out, rank']) fp32 with zeros up to a rank' that is a multiple of `step`."""
    more = -pair.rank % step
    return torch.nn.functional.pad(pair.a, (0, 0, 0, more)), torch.nn.functional.pad(pair.b, (0, more))
