"""Cached prompt prefixes: states after the first tokens of prompts, in slots and in host memory. Engine thread only.

A lookup compares every token, so there are no false hits. Recent prompts decide what to cache: a state is stored at the
token where a prompt departs from earlier ones.
"""

from __future__ import annotations

import hashlib
import struct
import sys
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from state_pool.cache.tiers import Tiers
from state_pool.config import PoolConfig
from state_pool.layout import HostState, pack_tokens
from state_pool.origins import NO_PREFIX_BASE
from state_pool.session_key import Tier

KEY_TOKENS = 32
TOKEN_BYTES = 4
_KEY_BYTES = KEY_TOKENS * TOKEN_BYTES
_PER_BUCKET = 8
_BUCKET_BYTES = 400
"""Memory of a bucket without its prompts: key, table entry and tuple."""


class PromptHistory:
    """The last few prompts of each beginning. Forgets the least recently used beginnings first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
        """bytes of memory held, with the overhead per prompt and beginning"""
        self._buckets: OrderedDict[bytes, tuple[bytes, ...]] = OrderedDict()

    def add(self, ids: bytes) -> None:
        key = ids[:_KEY_BYTES]
        known = self._buckets.get(key, ())
        self.num_bytes += sys.getsizeof(ids) + (0 if known else _BUCKET_BYTES)
        if len(known) == _PER_BUCKET:
            self.num_bytes -= sys.getsizeof(known[0])
        self._buckets[key] = (*known[1 - _PER_BUCKET :], ids)
        self._buckets.move_to_end(key)
        while self.num_bytes > self._max_bytes:
            _, forgotten = self._buckets.popitem(last=False)
            self.num_bytes -= _BUCKET_BYTES + sum(map(sys.getsizeof, forgotten))

    def shared_bytes(self, ids: bytes, observed: bool) -> list[int]:
        """Return the common length with each recent prompt of the same beginning.

        Lengths are in bytes, of whole tokens, at most one token less than the prompt. `observed`: this prompt was
        added, so one copy of it does not count.
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


MIN_TOKENS = KEY_TOKENS
"""Shortest prefix that is cached. Entries are looked up by this many tokens."""
_BASES = 1 << 31
"""Values from here on are not token ids; they encode the base."""
_SALT_WORDS = struct.Struct("<4I")


def prefix_base(numbers: Iterable[int], salt: str) -> bytes:
    """Return the base of prompts. Prompts with different bases share nothing.

    numbers: of the tuned state that the tokens follow, and of the adapter that reads them
    salt: separates clients that must not see each other's hits, as vLLM's `cache_salt`; "" for none
    """
    words = [*numbers]
    if salt:
        digest = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=_SALT_WORDS.size).digest()
        words += _SALT_WORDS.unpack(digest)
    return pack_tokens([_BASES | word for word in words])


@dataclass(frozen=True, slots=True, eq=False)
class PrefixHit:
    """A cached state after the first `num_tokens` of the prompt. Return it with `unpin`."""

    slot: int
    num_tokens: int
    tier: Tier


@dataclass(slots=True, eq=False)
class _Entry:
    ids: bytes
    used: float
    slot: int | None = None
    host: HostState | None = None
    is_evicting: bool = False

    @property
    def num_tokens(self) -> int:
        return (len(self.ids) - _base_bytes(self.ids)) // TOKEN_BYTES


def _pack_prompt(tokens: Sequence[int], base: bytes) -> bytes:
    """Pack token ids with their base in front."""
    return base + pack_tokens(tokens)


def _base_bytes(ids: bytes) -> int:
    """Bytes of the base before the first token id. Packed little-endian."""
    at = 0
    while ids[at + TOKEN_BYTES - 1 : at + TOKEN_BYTES] >= b"\x80":
        at += TOKEN_BYTES
    return at


@dataclass(slots=True)
class PrefixCounters:
    hits: int = 0
    misses: int = 0
    saved_tokens: int = 0
    stored: int = 0
    dropped: int = 0


class PrefixCache:
    """Owns the entries. `Tiers` provides slots and copies. `base`: see `prefix_base`."""

    def __init__(self, tiers: Tiers, config: PoolConfig) -> None:
        self.counters = PrefixCounters()
        self._tiers = tiers
        self._config = config
        self._buckets: dict[bytes, list[_Entry]] = {}
        """First tokens -> entries with these, longest first."""
        self._l1: OrderedDict[_Entry, None] = OrderedDict()
        self._l2: OrderedDict[_Entry, None] = OrderedDict()
        self._closed = False
        self._recent = PromptHistory(config.prompt_history_bytes)
        self._in_progress: dict[bytes, None] = {}
        """Prefixes that rows are computing and will offer; at most one per row."""
        self._wait_decisions: dict[int, bool] = {}
        """Answers of `should_wait` by id(prompt), since it is asked every step. Cleared when `_in_progress` changes.

        A new list at the same address gets a wrong answer. Its row then starts sooner or later, with the same result.
        """

    @property
    def enabled(self) -> bool:
        return self._config.prefix_cache_slots > 0 and not self._closed

    @property
    def history_bytes(self) -> int:
        """Return the memory of recent prompts."""
        return self._recent.num_bytes

    @property
    def sizes(self) -> tuple[int, int]:
        """Return (entries in slots, entries in host memory)."""
        return len(self._l1), len(self._l2)

    def match(self, tokens: Sequence[int], base: bytes = NO_PREFIX_BASE) -> PrefixHit | None:
        """Return the longest cached prefix, with its slot pinned. It leaves at least one token to compute."""
        if not self._buckets or len(tokens) <= MIN_TOKENS:
            self.counters.misses += self.enabled
            return None
        ids = _pack_prompt(tokens, base)
        for entry in self._prefixes_of(ids):
            hit = self._pin_entry(entry)
            if hit is not None:
                return hit
        self.counters.misses += 1
        return None

    def unpin(self, hit: PrefixHit) -> None:
        self._tiers.unpin(hit.slot)

    def observe(self, tokens: Sequence[int], base: bytes = NO_PREFIX_BASE) -> None:
        """Announce a prompt. Optional: lets prompts that wait together share a prefill."""
        if self.enabled and len(tokens) > MIN_TOKENS:
            self._recent.add(_pack_prompt(tokens, base))

    def cache_points(
        self, tokens: Sequence[int], observed: bool = False, base: bytes = NO_PREFIX_BASE, wanted: int = 0
    ) -> list[int]:
        """Return the position, if any, where prefill should pause and call `offer`. At most one.

        It is `wanted`, or where the prompt departs from earlier ones. Of several such points, it is the one that would
        have saved the most tokens. `observed`: the prompt was announced by `observe`. Other rows may wait for this
        state (`should_wait`), so a row that ends early must call `abandon`.
        """
        if not self.enabled or len(tokens) <= MIN_TOKENS:
            return []
        ids = _pack_prompt(tokens, base)
        start = _base_bytes(ids)
        cached = max(self._longest(ids), start)
        at = start + TOKEN_BYTES * wanted
        if not cached < at < len(ids):
            shared = self._recent.shared_bytes(ids, observed)
            gains = [((at - cached) * sum(other >= at for other in shared), at) for at in set(shared)]
            at = max(gains, default=(0, 0))[1]
        if not observed:
            self._recent.add(ids)
        if at - cached < _KEY_BYTES:
            return []
        self._in_progress[ids[:at]] = None
        self._wait_decisions.clear()
        return [(at - start) // TOKEN_BYTES]

    def should_wait(self, tokens: Sequence[int], base: bytes = NO_PREFIX_BASE) -> bool:
        """Whether a longer prefix than the cached one is being computed."""
        if not self._in_progress or len(tokens) <= MIN_TOKENS:
            return False
        answer = self._wait_decisions.get(id(tokens))
        if answer is None:
            ids = _pack_prompt(tokens, base)
            longest = max((len(computing) for computing in self._in_progress if ids.startswith(computing)), default=0)
            answer = self._wait_decisions[id(tokens)] = self._longest(ids) < longest < len(ids)
        return answer

    def abandon(self, tokens: Sequence[int], base: bytes = NO_PREFIX_BASE) -> None:
        """Record that the state after `tokens`, promised by `cache_points`, is not offered."""
        self._in_progress.pop(_pack_prompt(tokens, base), None)
        self._wait_decisions.clear()

    def _prefixes_of(self, ids: bytes) -> list[_Entry]:
        """Return the entries that are shorter prefixes of `ids`, longest first."""
        bucket = self._buckets.get(ids[:_KEY_BYTES], ())
        return [entry for entry in bucket if len(entry.ids) < len(ids) and ids.startswith(entry.ids)]

    def _longest(self, ids: bytes) -> int:
        return next((len(entry.ids) for entry in self._prefixes_of(ids)), 0)

    def offer(self, tokens: Sequence[int], slot: int, base: bytes = NO_PREFIX_BASE) -> PrefixHit | None:
        """Cache the state after `tokens`, which the caller's slot holds.

        The cache takes the slot and pins it for the caller, who may still read it but must write to another. None:
        refused, the slot stays the caller's.
        """
        ids = _pack_prompt(tokens, base)
        self._in_progress.pop(ids, None)
        self._wait_decisions.clear()
        if not self.enabled or len(tokens) < MIN_TOKENS or self._find(ids) is not None:
            return None
        if not self._tiers.pin(slot):
            return None
        entry = _Entry(ids, time.time(), slot=slot)
        bucket = self._buckets.setdefault(ids[:_KEY_BYTES], [])
        bucket.append(entry)
        bucket.sort(key=lambda e: -len(e.ids))
        self._l1[entry] = None
        self.counters.stored += 1
        return PrefixHit(slot, entry.num_tokens, Tier.SLOT)

    @property
    def slots(self) -> list[int]:
        return [entry.slot for entry in self._l1 if entry.slot is not None]

    def close(self) -> None:
        """Drop all entries. Copies that are still running are ignored at their end.

        Sessions are stored after this call. So it touches no slot: an error in this cache must not stop that.
        """
        self._closed = True
        self._buckets, self._l1, self._l2 = {}, OrderedDict(), OrderedDict()
        self._in_progress.clear()
        self._wait_decisions.clear()

    # -- evictable, for the tiers ----------------------------------------------------------------------

    def oldest(self) -> float | None:
        """See `Evictable.oldest`: of the entries whose slot nobody reads."""
        entry = self._oldest_idle()
        return None if entry is None else entry.used

    def evict(self) -> None:
        entry = self._oldest_idle()
        if entry is not None:
            self._demote(entry)

    def trim(self) -> None:
        is_evicting = sum(entry.is_evicting for entry in self._l1)
        if len(self._l1) - is_evicting > self._config.prefix_cache_slots:
            self.evict()
        while len(self._l2) > self._config.prefix_cache_l2:
            self._forget(next(iter(self._l2)))

    # -- inside ----------------------------------------------------------------------------------------

    def _pin_entry(self, entry: _Entry) -> PrefixHit | None:
        """Pin an entry's slot. Brings it back from host memory if needed. None: no slot is free."""
        tier = Tier.SLOT if entry.slot is not None else Tier.HOST
        if entry.slot is None and not self._promote(entry):
            return None
        assert entry.slot is not None
        if not self._tiers.pin(entry.slot):
            return None
        entry.used = time.time()
        self._l1.move_to_end(entry)
        self.counters.hits += 1
        self.counters.saved_tokens += entry.num_tokens
        return PrefixHit(entry.slot, entry.num_tokens, tier)

    def _promote(self, entry: _Entry) -> bool:
        """Start to copy an entry to a slot. Returns False if no slot is free."""
        host, entry.host = entry.host, None
        if host is None:
            return False
        # It is on neither list meanwhile: making room may demote other entries and then trim `_l2`.
        del self._l2[entry]
        entry.slot = self._tiers.load(host)
        if entry.slot is None:
            entry.host = host
            self._l2[entry] = None
            return False
        self._l1[entry] = None
        return True

    def _find(self, ids: bytes) -> _Entry | None:
        return next((entry for entry in self._buckets.get(ids[:_KEY_BYTES], ()) if entry.ids == ids), None)

    def _oldest_idle(self) -> _Entry | None:
        slots = self._tiers.slots
        return next(
            (e for e in self._l1 if not e.is_evicting and e.slot is not None and slots.ref_count(e.slot) == 1), None
        )

    def _demote(self, entry: _Entry) -> None:
        slot = entry.slot
        assert slot is not None
        if self._config.prefix_cache_l2 == 0:
            self._forget(entry)
            return
        entry.is_evicting = True

        def arrived(host: HostState) -> None:
            entry.is_evicting = False
            if self._closed or entry.slot != slot or self._tiers.slots.ref_count(slot) != 1:
                return
            self._tiers.slots.drop_ref(slot)
            entry.slot, entry.host = None, host
            self._l1.pop(entry, None)
            self._l2[entry] = None
            self.trim()

        self._tiers.save(slot, arrived)

    def _forget(self, entry: _Entry) -> None:
        bucket = self._buckets[entry.ids[:_KEY_BYTES]]
        bucket.remove(entry)
        if not bucket:
            del self._buckets[entry.ids[:_KEY_BYTES]]
        self._l1.pop(entry, None)
        self._l2.pop(entry, None)
        if entry.slot is not None:
            self._tiers.slots.drop_ref(entry.slot)
            entry.slot = None
        entry.host = None
        self.counters.dropped += 1
