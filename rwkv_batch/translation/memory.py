"""Approved translations: exact ones are used instead of the model, similar ones are examples for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from rapidfuzz.fuzz import ratio
from rapidfuzz.process import cdist

from rwkv_batch.translation.context import Example

MAX_FUZZY_TEXTS = 64
"""Texts of a request that get examples. The comparison of one takes up to 2 ms."""
MAX_GROWTH = 1.6
"""Similar texts differ less in length."""
_MIN_SIMILARITY = 75
_MAX_EXAMPLES = 2
Key = tuple[str, str]
"""Source language as the request has it, and text."""


class CacheUse(StrEnum):
    """Whether cached translations are read and written."""

    USE = "use"
    REFRESH = "refresh"
    """Written, not read."""
    OFF = "off"


class Origin(StrEnum):
    """Where a translation comes from."""

    MEMORY = "memory"
    CACHE = "cache"
    MODEL = "model"


@dataclass(frozen=True, slots=True)
class Memory:
    """The approved translations that fit a request."""

    exact: Mapping[Key, str] = field(default_factory=dict)
    examples: Mapping[Key, tuple[Example, ...]] = field(default_factory=dict)


def similar(texts: Sequence[str], others: Sequence[str]) -> list[list[int]]:
    """Return each text's most similar others by index, best last."""
    if not texts or not others:
        return [[] for _ in texts]
    scores = cdist(texts, others, scorer=ratio, score_cutoff=_MIN_SIMILARITY, dtype=np.uint8)
    best = np.argsort(scores, axis=1, kind="stable")[:, -_MAX_EXAMPLES:]
    return [[int(index) for index in row if scores[at, index]] for at, row in enumerate(best)]
