"""Finds tokens by their bytes, without a loop over the vocabulary."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

END = 0
"""Id of the token that ends a text; it has no bytes."""
_MAX_CACHED, _MAX_FLAGS = 1024, 64
K = TypeVar("K")
V = TypeVar("V")
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
        self._flags: dict[bytes, Flags] = {}
        self._suffixes: dict[tuple[bytes, bytes], Suffixes] = {}
        self._split: dict[tuple[bytes, bytes], SplitTokens] = {}

    def with_any(self, special: bytes) -> Flags:
        """Return which tokens [V] have one of these bytes."""
        found = self._flags.get(special)
        if found is None:
            found = np.zeros(len(self.table), np.bool_)
            found[self._owners[np.isin(self._bytes, np.array([*special], np.uint8))]] = True
            put(self._flags, special, found, _MAX_FLAGS)
        return found

    def with_text(self, text: bytes) -> Flags:
        """Return which tokens [V] have this text. It has more than one byte."""
        found = self._flags.get(text)
        if found is None:
            found = self.with_any(text[:1]).copy()
            for number in np.flatnonzero(found).tolist():
                found[number] = text in self.table[number]
            put(self._flags, text, found, _MAX_FLAGS)
        return found

    def starting_with(self, start: bytes) -> list[bytes]:
        """Return the tokens that begin with these bytes."""
        return starting(self._sorted, start)

    def split_after(self, start: bytes, special: bytes) -> SplitTokens:
        """Return the tokens that begin with `start`, by whether special bytes follow."""
        found = self._split.get((start, special))
        if found is None:
            plain, others = [], []
            for token in self.starting_with(start):
                if set(special).isdisjoint(token[len(start) :]):
                    plain.append(self.id_of[token])
                else:
                    others.append((self.id_of[token], token))
            found = SplitTokens(np.array(plain, np.int64), others)
            put(self._split, (start, special), found)
        return found

    def suffixes(self, leads: bytes, barred: bytes) -> Suffixes:
        """Return a lead byte's tokens, by their bytes from the first.

        Tokens with a barred byte before it are left out.
        """
        found = self._suffixes.get((leads, barred))
        if found is None:
            groups: dict[bytes, list[int]] = defaultdict(list)
            for number in np.flatnonzero(self.with_any(leads)).tolist():
                token = self.table[number]
                at = min(place for place in map(token.find, map(_byte, leads)) if place >= 0)
                if set(barred).isdisjoint(token[:at]):
                    groups[token[at:]].append(number)
            tokens = {suffix: np.array(ids, np.int64) for suffix, ids in groups.items()}
            found = Suffixes(tokens, sorted(tokens))
            put(self._suffixes, (leads, barred), found)
        return found


def starting(texts: list[bytes], start: bytes) -> list[bytes]:
    """Return those of the sorted texts that begin with `start`."""
    end = at = bisect_left(texts, start)
    while end < len(texts) and texts[end].startswith(start):
        end += 1
    return texts[at:end]


def _byte(number: int) -> bytes:
    return bytes((number,))


def put(cache: dict[K, V], key: K, value: V, limit: int = _MAX_CACHED) -> None:
    """Add a value; at the limit remove the oldest."""
    while len(cache) >= limit:
        del cache[next(iter(cache))]
    cache[key] = value
