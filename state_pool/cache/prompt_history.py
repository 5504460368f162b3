"""The beginnings that recent prompts had in common. Bounded in bytes; no states, only token ids."""

from __future__ import annotations

from collections import OrderedDict, deque

KEY_TOKENS = 32
TOKEN_BYTES = 4
_KEY_BYTES = KEY_TOKENS * TOKEN_BYTES
_PER_BUCKET = 8


class PromptHistory:
    """Remembers the last few prompts of each beginning, the least recently met beginnings forgotten first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._buckets: OrderedDict[bytes, deque[bytes]] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """Bytes of token ids held."""
        return self._bytes

    def add(self, ids: bytes) -> None:
        """Remember a prompt's packed token ids."""
        bucket = self._buckets.setdefault(ids[:_KEY_BYTES], deque())
        self._buckets.move_to_end(ids[:_KEY_BYTES])
        bucket.append(ids)
        self._bytes += len(ids)
        if len(bucket) > _PER_BUCKET:
            self._bytes -= len(bucket.popleft())
        while self._bytes > self._max_bytes:
            _, forgotten = self._buckets.popitem(last=False)
            self._bytes -= sum(map(len, forgotten))

    def shared_bytes(self, ids: bytes, observed: bool) -> list[int]:
        """For each recent prompt that begins alike, how far: whole tokens, one less than the prompt at most.

        `observed`: this very prompt is among them once, and doesn't count.
        """
        others = list(self._buckets.get(ids[:_KEY_BYTES], ()))
        if observed and ids in others:
            others.remove(ids)
        longest = len(ids) - TOKEN_BYTES
        return [min(longest, common_bytes(ids, other)) for other in others]


def common_bytes(one: bytes, other: bytes) -> int:
    """Length of the common beginning in whole tokens, in bytes."""
    length = min(len(one), len(other))
    differing = int.from_bytes(one[:length], "big") ^ int.from_bytes(other[:length], "big")
    return (length - (differing.bit_length() + 7) // 8) // TOKEN_BYTES * TOKEN_BYTES
