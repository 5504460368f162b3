"""A pair of low-rank matrices beside a weight of a layer: W x + B (A x), for the rows whose adapter has it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

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


LayerPairs = Mapping[Target, Pair]
"""Of one layer; weights that are left as they are have none."""
