"""Low-rank pairs that an adapter adds to a layer's weights: W x + B (A x)."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

MAX_RANK = 128
"""of a per-row pair"""


class Target(enum.IntEnum):
    """The weights of a layer that an adapter may extend."""

    RECEPTANCE = 0
    KEY = 1
    VALUE = 2
    OUTPUT = 3
    FFN_KEY = 4
    FFN_VALUE = 5


@dataclass(frozen=True, slots=True)
class Pair:
    """Adds b (a x) to the output of a weight [out, in]."""

    a: Tensor
    """[rank, in] fp32"""
    b: Tensor
    """[out, rank] fp32, including the scale"""

    @property
    def rank(self) -> int:
        return len(self.a)

    def to(self, device: torch.device, dtype: torch.dtype) -> Pair:
        return Pair(self.a.to(device, dtype).contiguous(), self.b.to(device, dtype).contiguous())


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in one channel mix (MoLE). Each token uses a few experts, with pairs of their own.

    The score of the first expert is 0, those of the others are router @ x. A softmax over the `active` highest scores
    gives the weights of these experts' channel mixes.
    """

    router: Tensor
    """[experts - 1, C] fp32"""
    pairs: tuple[Mapping[Target, Pair], ...]
    """of each expert, for FFN_KEY and FFN_VALUE"""
    active: int
    """experts per token"""

    def to(self, device: torch.device, dtype: torch.dtype) -> Experts:
        pairs = tuple({target: pair.to(device, dtype) for target, pair in one.items()} for one in self.pairs)
        return Experts(self.router.to(device, dtype).contiguous(), pairs, self.active)


@dataclass(frozen=True, slots=True)
class LayerPairs:
    pairs: Mapping[Target, Pair] = field(default_factory=dict)
    """only for the weights that change"""
    experts: Experts | None = None
    """for FFN_KEY and FFN_VALUE, which then have no entry in `pairs`"""

    def to(self, device: torch.device, dtype: torch.dtype) -> LayerPairs:
        experts = None if self.experts is None else self.experts.to(device, dtype)
        return LayerPairs({target: pair.to(device, dtype) for target, pair in self.pairs.items()}, experts)

    @property
    def all_pairs(self) -> list[Pair]:
        """All pairs, including those of experts."""
        own = [] if self.experts is None else [pair for one in self.experts.pairs for pair in one.values()]
        return [*self.pairs.values(), *own]


def padded(pair: Pair, step: int) -> tuple[Tensor, Tensor]:
    """Return (a [rank', in], b [out, rank']) fp32, padded with zeros. rank' is a multiple of `step`."""
    more = -pair.rank % step
    return torch.nn.functional.pad(pair.a, (0, 0, 0, more)), torch.nn.functional.pad(pair.b, (0, more))
