"""The held-out share of the corpus, by construction: a stable hash of what a sample says decides its side."""

from __future__ import annotations

import hashlib
import re

HELD_OUT_ONE_IN = 50
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?")


def normal(text: str) -> str:
    """A text without casing and punctuation, so that variants of one meaning share their side."""
    return " ".join(_WORD.findall(text.lower()))


def held_out(meaning: str) -> bool:
    """Whether a meaning is kept for the evaluation; training never emits it."""
    digest = hashlib.blake2b(normal(meaning).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_ONE_IN == 0
