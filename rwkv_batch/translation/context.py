"""What a model reads before a text: the page around it, or what was translated before it.

All texts with the same context begin with the same tokens. The engine reads these once and keeps the state.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

PAGE_CHARACTERS = 6000
"""Characters of a page that serve as context if the request has none."""
CHUNK_SEGMENTS = 8
"""Most segments of a rolling translation that run together, with the same context.

At first each doubles the segments before, so short documents have a context too.
"""
_MAX_CHARACTERS, _KEPT_CHARACTERS = 6000, 2000
"""A longer history is cut. In between it only grows, so each chunk's context begins with that of the chunk before."""


class ContextMode(StrEnum):
    """What is read before each text."""

    NONE = "none"
    PAGE = "page"
    """The request's context, or its own texts."""
    ROLLING = "rolling"
    """The context, then the segments before with their translations."""


class Example(NamedTuple):
    """A text with its translation."""

    source: str
    text: str
    translation: str


History = tuple[Example, ...]


def extended(history: History, examples: Iterable[Example]) -> History:
    """Return the history with more examples. If it is too long, the oldest ones are dropped."""
    all_examples = (*history, *examples)
    if sum(map(_length, all_examples)) <= _MAX_CHARACTERS:
        return all_examples
    kept: list[Example] = []
    room = _KEPT_CHARACTERS
    for example in reversed(all_examples):
        room -= _length(example)
        if room < 0:
            break
        kept.insert(0, example)
    return tuple(kept)


def _length(example: Example) -> int:
    return len(example.text) + len(example.translation)


def page_context(texts: Sequence[str]) -> str:
    """Return the beginning of a page's texts, as the context of each."""
    return "\n".join(texts)[:PAGE_CHARACTERS]


@functools.lru_cache(maxsize=64)
def digest(context: str, history: History) -> str:
    """Return a short key of a context. Keys of cached translations have it."""
    parts = (context, *(part for example in history for part in example))
    return hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
