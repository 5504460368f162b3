"""Token ids of recent prompts, grouped by their first tokens. Bounded in bytes; no states."""

from __future__ import annotations

import sys
from collections import OrderedDict

KEY_TOKENS = 32
TOKEN_BYTES = 4
_KEY_BYTES = KEY_TOKENS * TOKEN_BYTES
_PER_BUCKET = 8
_BUCKET_BYTES = 400
"""Memory of a bucket without its prompts: key, table entry and tuple."""


class PromptHistory:
    """Forgets the least recently used beginnings first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._buckets: OrderedDict[bytes, tuple[bytes, ...]] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """Includes the overhead per prompt and beginning."""
        return self._bytes

    def add(self, ids: bytes) -> None:
        key = ids[:_KEY_BYTES]
        known = self._buckets.get(key, ())
        self._bytes += sys.getsizeof(ids) + (0 if known else _BUCKET_BYTES)
        if len(known) == _PER_BUCKET:
            self._bytes -= sys.getsizeof(known[0])
        self._buckets[key] = (*known[1 - _PER_BUCKET :], ids)
        self._buckets.move_to_end(key)
        while self._bytes > self._max_bytes:
            _, forgotten = self._buckets.popitem(last=False)
            self._bytes -= _BUCKET_BYTES + sum(map(sys.getsizeof, forgotten))

    def shared_bytes(self, ids: bytes, observed: bool) -> list[int]:
        """Return the common length with each recent prompt of the same beginning, in bytes.

        Lengths are whole tokens, at most one token less than the prompt. `observed`: this prompt was added, so one copy
        of it does not count.
        """
        others = list(self._buckets.get(ids[:_KEY_BYTES], ()))
        if observed and ids in others:
            others.remove(ids)
        longest = len(ids) - TOKEN_BYTES
        return [min(longest, common_bytes(ids, other)) for other in others]


def common_bytes(one: bytes, other: bytes) -> int:
    """Length of the common prefix in whole tokens, in bytes."""
    length = min(len(one), len(other))
    differing = int.from_bytes(one[:length], "big") ^ int.from_bytes(other[:length], "big")
    return (length - (differing.bit_length() + 7) // 8) // TOKEN_BYTES * TOKEN_BYTES
