"""Finds tokens by their bytes, without a loop over the vocabulary."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

END = 0
"""Id of the token that ends a text; it has no bytes."""
MAX_CACHED, _MAX_FLAGS = 1024, 64
Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]


class SplitTokens(NamedTuple):
    """Tokens by what follows a given beginning."""

    plain: Ids
    """those without special bytes after it"""
    special: list[tuple[int, bytes]]
    """the others, with their bytes"""


class Suffixes(NamedTuple):
    """Tokens by their bytes from the first lead byte on."""

    tokens: dict[bytes, Ids]
    order: list[bytes]
    """The keys, sorted."""


class TokenIndex:
    """A vocabulary, searched by bytes. Answers are cached; callers do not change them. One thread."""

    def __init__(self, byte_table: Sequence[bytes], size: int) -> None:
        """
        byte_table: bytes of each id, b"" for ids without a token
        size: number of logits, which may exceed the number of ids
        """
        self.table = [*byte_table[:size], *[b""] * (size - len(byte_table))]
        self.table[END] = b""
        self.id_of = {token: number for number, token in enumerate(self.table) if token}
        self._sorted = sorted(self.id_of)
        lengths = np.fromiter(map(len, self.table), np.int64, size)
        self.has_bytes: Flags = lengths > 0
        self._bytes = np.frombuffer(b"".join(self.table), np.uint8)
        self._owners = np.repeat(np.arange(size), lengths)
        self.with_any: Callable[[bytes], Flags] = lru_cache(_MAX_FLAGS)(self._with_any)
        self.with_text: Callable[[bytes], Flags] = lru_cache(_MAX_FLAGS)(self._with_text)
        self.split_after: Callable[[bytes, bytes], SplitTokens] = lru_cache(MAX_CACHED)(self._split_after)
        self.suffixes: Callable[[bytes, bytes], Suffixes] = lru_cache(MAX_CACHED)(self._find_suffixes)

    def _with_any(self, special: bytes) -> Flags:
        """Return which tokens [V] have one of these bytes."""
        found = np.zeros(len(self.table), np.bool_)
        found[self._owners[np.isin(self._bytes, np.array([*special], np.uint8))]] = True
        return found

    def _with_text(self, text: bytes) -> Flags:
        """Return which tokens [V] have this text. It has more than one byte."""
        found = self.with_any(text[:1]).copy()
        for number in np.flatnonzero(found).tolist():
            found[number] = text in self.table[number]
        return found

    def starting_with(self, start: bytes) -> list[bytes]:
        """Return the tokens that begin with these bytes."""
        return starting(self._sorted, start)

    def _split_after(self, start: bytes, special: bytes) -> SplitTokens:
        """Return the tokens that begin with `start`, by whether special bytes follow."""
        plain, others = [], []
        for token in self.starting_with(start):
            if set(special).isdisjoint(token[len(start) :]):
                plain.append(self.id_of[token])
            else:
                others.append((self.id_of[token], token))
        return SplitTokens(np.array(plain, np.int64), others)

    def _find_suffixes(self, leads: bytes, barred: bytes) -> Suffixes:
        """Return a lead byte's tokens, by their bytes from the first.

        Tokens with a barred byte before it are left out.
        """
        groups: dict[bytes, list[int]] = defaultdict(list)
        for number in np.flatnonzero(self.with_any(leads)).tolist():
            token = self.table[number]
            at = min(place for place in map(token.find, leads) if place >= 0)
            if set(barred).isdisjoint(token[:at]):
                groups[token[at:]].append(number)
        tokens = {suffix: np.array(ids, np.int64) for suffix, ids in groups.items()}
        return Suffixes(tokens, sorted(tokens))


def starting(texts: list[bytes], start: bytes) -> list[bytes]:
    """Return those of the sorted texts that begin with `start`."""
    end = at = bisect_left(texts, start)
    while end < len(texts) and texts[end].startswith(start):
        end += 1
    return texts[at:end]
