"""Approved translations: exact ones are used instead of the model, similar ones are examples for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from rwkv_batch.translation.context import Example

MAX_FUZZY_TEXTS = 64
"""Texts of a request that get examples."""
MAX_GROWTH = 1.6
"""Similar texts differ less in length."""
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

    NONE = "none"
    """The text stays as it is."""
    MEMORY = "memory"
    CACHE = "cache"
    MODEL = "model"


@dataclass(frozen=True, slots=True)
class Memory:
    """The approved translations that fit a request."""

    exact: Mapping[Key, str] = field(default_factory=dict)
    examples: Mapping[Key, tuple[Example, ...]] = field(default_factory=dict)
