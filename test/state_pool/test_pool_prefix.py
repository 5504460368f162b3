"""The prefix cache: exact, bounded, and without cost for prompts that share nothing."""

from __future__ import annotations

import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from state_pool.cache.prefix_cache import NO_PREFIX_BASE, PromptHistory, common_bytes, prefix_base
from state_pool.layout import ZERO_SLOT, pack_tokens
from test.pool_fakes import Driver, FakeArena, config_in, expected_state, opened
from test.pool_integrity import integrity_faults

SYSTEM = [random.Random(1).randrange(65536) for _ in range(2000)]


class Prompts:
    """Plays the engine: prefill through the cache."""

    def __init__(self, folder: Path, **changes: object) -> None:
        self.driver = Driver(FakeArena(num_slots=24), config_in(folder, state_db="", **changes))
        self.pool = self.driver.pool
        self.computed = 0

    def prefill(self, tokens: list[int], base: bytes = NO_PREFIX_BASE) -> np.ndarray:
        """Return the state after a prompt. Counts the computed tokens."""
        hit = self.pool.prefixes.match(tokens, base)
        read, at = (ZERO_SLOT, 0) if hit is None else (hit.slot, hit.num_tokens)
        slot = self.driver.slot()
        for border in [b for b in self.pool.prefixes.cache_points(tokens, base=base) if b > at]:
            self.driver.arena.run(read, slot, tokens[at:border])
            self.computed += border - at
            if hit is not None:
                self.pool.prefixes.unpin(hit)
            fresh = self.driver.slot()
            hit = self.pool.prefixes.offer(tokens[:border], slot, base)
            assert hit is not None
            read, slot, at = hit.slot, fresh, border
        self.driver.arena.run(read, slot, tokens[at:])
        self.computed += len(tokens) - at
        if hit is not None:
            self.pool.prefixes.unpin(hit)
        state = self.driver.arena.memory[slot].copy()
        self.pool.tiers.free(slot)
        self.pool.poll()
        return state

    def close(self) -> None:
        """Check that all slots are free again."""
        self.driver.settle()
        assert integrity_faults(self.pool) == []
        self.pool.close()


def test_shared_system_prompt_is_cached_at_its_second_use(tmp_path: Path) -> None:
    prompts = Prompts(tmp_path)
    for i in range(64):
        tail = [60_000 + i, i, 7]
        assert np.array_equal(prompts.prefill(SYSTEM + tail), expected_state(SYSTEM + tail))
    assert prompts.computed == 2 * len(SYSTEM) + 64 * 3
    counters = prompts.pool.stats()["prefix_cache"]
    assert (counters["hits"], counters["saved_tokens"], counters["stored"]) == (62, 62 * 2000, 1)
    prompts.close()


def test_prompts_of_different_bases_share_nothing(tmp_path: Path) -> None:
    """A base is the numbers of a state and an adapter, and a salt. Each may be missing."""
    prompts = Prompts(tmp_path)
    origins, salts = ((), (1,), (2,), (1, 2), (3, 2)), ("", "anna\0", "anna\0x", "bert\0")
    bases = [prefix_base(numbers, salt) for numbers in origins for salt in salts]
    assert len(set(bases)) == len(bases) and bases[0] == NO_PREFIX_BASE
    for base in bases:
        computed = prompts.computed
        for tail in range(3):
            assert np.array_equal(prompts.prefill([*SYSTEM, tail], base), expected_state([*SYSTEM, tail]))
        assert prompts.computed - computed == 2 * len(SYSTEM) + 3
    prompts.close()


def test_prompts_that_wait_together_share_a_prefill(tmp_path: Path) -> None:
    prompts = Prompts(tmp_path)
    waiting = [[*SYSTEM, 60000 + i, i] for i in range(64)]
    for tokens in waiting:
        prompts.pool.prefixes.observe(tokens)
    first = waiting[0]
    assert not prompts.pool.prefixes.should_wait(first)
    assert prompts.pool.prefixes.cache_points(first, observed=True) == [2000]
    assert all(prompts.pool.prefixes.should_wait(tokens) for tokens in waiting[1:])
    slot = prompts.driver.slot()
    prompts.driver.arena.run(ZERO_SLOT, slot, SYSTEM)
    hit = prompts.pool.prefixes.offer(SYSTEM, slot)
    assert hit is not None
    assert not any(prompts.pool.prefixes.should_wait(tokens) for tokens in waiting[1:])
    for tokens in waiting[1:]:
        found = prompts.pool.prefixes.match(tokens)
        assert found is not None
        assert found.num_tokens == 2000
        prompts.pool.prefixes.unpin(found)
    prompts.pool.prefixes.unpin(hit)
    prompts.close()


def test_prompts_without_a_shared_prefix_are_not_cached(tmp_path: Path) -> None:
    prompts = Prompts(tmp_path)
    rng = random.Random(2)
    for _ in range(50):
        tokens = [rng.randrange(65536) for _ in range(500)]
        assert prompts.pool.prefixes.cache_points(tokens) == []
        assert prompts.pool.prefixes.match(tokens) is None
    assert prompts.pool.stats()["prefix_cache"]["stored"] == 0
    prompts.close()


def test_growing_conversation_hits_its_last_turn(tmp_path: Path) -> None:
    prompts = Prompts(tmp_path)
    rng = random.Random(3)
    history = SYSTEM[:200]
    for _ in range(12):
        history = history + [rng.randrange(65536) for _ in range(100)]
        assert np.array_equal(prompts.prefill(history), expected_state(history))
    assert prompts.computed < 12 * 250
    prompts.close()


def test_disabled_cache_stores_nothing(tmp_path: Path) -> None:
    prompts = Prompts(tmp_path, prefix_cache_slots=0)
    for i in range(5):
        prompts.prefill([*SYSTEM, i])
    assert prompts.computed == 5 * 2001
    assert prompts.pool.stats()["prefix_cache"]["enabled"] is False
    prompts.close()


@pytest.mark.parametrize("l2", [0, 5])
def test_the_cache_is_bounded_on_both_tiers(tmp_path: Path, l2: int) -> None:
    prompts = Prompts(tmp_path, prefix_cache_slots=3, prefix_cache_l2=l2)
    rng = random.Random(4)
    heads = [[rng.randrange(65536) for _ in range(64)] for _ in range(20)]
    for round_ in range(4):
        for head in heads:
            tokens = [*head, 1000 + round_, 5]
            assert np.array_equal(prompts.prefill(tokens), expected_state(tokens))
    prompts.driver.settle()
    for _ in range(20):
        prompts.pool._do_housekeeping(0.0)
        prompts.driver.settle()
    cache = prompts.pool.stats()["prefix_cache"]
    assert cache["l1"] <= 3
    assert cache["l2"] <= l2
    prompts.close()


def head_of(number: int) -> list[int]:
    """Return a prefix that only prompts with this number share."""
    return list(range(1000 * number, 1000 * number + 40))


def cache(prompts: Prompts, number: int) -> None:
    for tail in (60_000, 60_001):
        prompts.prefill([*head_of(number), tail])


def test_promoted_prefix_is_not_trimmed_meanwhile(tmp_path: Path) -> None:
    """No slot is free, so the other prefix moves to host memory. That has room for one."""
    prompts = Prompts(tmp_path, prefix_cache_slots=1, prefix_cache_l2=1)
    held: list[int] = []
    cache(prompts, 1)
    while prompts.pool.stats()["prefix_cache"]["l2"] == 0:
        held.append(prompts.driver.slot())
    prompts.pool.tiers.free(held.pop())
    prompts.pool.tiers.free(held.pop())
    cache(prompts, 2)
    while prompts.pool.tiers.slots.num_free:
        held.append(prompts.driver.slot())
    hit = prompts.pool.prefixes.match([*head_of(1), 7])
    assert integrity_faults(prompts.pool, rows=held) == []
    assert hit is not None
    assert np.array_equal(prompts.driver.arena.memory[hit.slot], expected_state(head_of(1)))
    prompts.pool.prefixes.unpin(hit)
    for slot in held:
        prompts.pool.tiers.free(slot)
    prompts.close()


def test_broken_prefix_cache_does_not_stop_close(tmp_path: Path) -> None:
    driver = Driver(FakeArena(num_slots=24), config_in(tmp_path, prefix_cache_slots=2))
    prompts = Prompts(tmp_path, prefix_cache_slots=2)  # another cache, to borrow an entry from
    cache(prompts, 1)
    driver.turn("s", [1, 2])
    for entry in prompts.pool.prefixes._l1:
        driver.pool.prefixes._l1[entry] = None  # on the list but in no bucket
    driver.pool.close()
    driver = opened(tmp_path)
    lease = driver.ready(driver.pool.turns.checkout("s"))
    assert (lease.exists, lease.replay) == (True, []), "the state was stored, not the log alone"
    driver.pool.turns.release(lease)
    driver.pool.close()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=90), min_size=1, max_size=12), st.integers(0, 40))
def test_output_equals_an_uncached_run(
    tmp_path_factory: pytest.TempPathFactory, tails: list[list[int]], head: int
) -> None:
    """Few different tokens and long common prefixes: each hit has the prompt's state."""
    prompts = Prompts(tmp_path_factory.mktemp("prefix"), prefix_cache_slots=2, prefix_cache_l2=2)
    for tail in tails:
        tokens = [9] * head + tail
        assert np.array_equal(prompts.prefill(tokens), expected_state(tokens))
    prompts.close()


@given(st.lists(st.integers(0, 2), max_size=20), st.lists(st.integers(0, 2), max_size=20))
def test_common_bytes(one: list[int], other: list[int]) -> None:
    expected = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    assert common_bytes(pack_tokens(one), pack_tokens(other)) == 4 * expected


@pytest.mark.parametrize("num_tokens", [33, 200])
def test_prompt_history_stays_within_its_memory(num_tokens: int) -> None:
    """Also for short prompts with different beginnings. There the overhead exceeds the token ids."""
    limit = 1 << 20
    tracemalloc.start()
    try:
        recent = PromptHistory(limit)
        for number in range(10_000):
            recent.add(pack_tokens([number] * num_tokens))
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert limit / 2 < used < 1.1 * limit
    assert limit / 2 < recent.num_bytes <= limit


def test_a_small_prefix_cache_remembers_few_prompts(tmp_path: Path) -> None:
    prompts = Prompts(tmp_path, prefix_cache_slots=1, prefix_cache_l2=1)
    sizes: list[int] = []
    for number in range(3000):
        prompts.pool.prefixes.observe([number] * 100)
        sizes.append(prompts.pool.stats()["prefix_cache"]["history_bytes"])
    assert sizes[100] < sizes[1000] == pytest.approx(512 << 10, rel=0.01)
    assert max(sizes) <= 512 << 10
    prompts.close()


def test_prompt_history_keeps_recent_beginnings() -> None:
    recent = PromptHistory(max_bytes=100_000)
    for number in range(1000):
        recent.add(pack_tokens([number] * 200))
        recent.add(pack_tokens([0] * 200))  # one beginning that is used repeatedly
    for number in (0, *range(980, 1000)):
        assert recent.shared_bytes(pack_tokens([number] * 201), observed=False)[0] == 800
    for number in range(1, 800):
        assert recent.shared_bytes(pack_tokens([number] * 201), observed=False) == []


def test_announced_prompt_does_not_match_itself() -> None:
    recent = PromptHistory(max_bytes=100_000)
    ids = pack_tokens(range(100))
    recent.add(ids)
    assert recent.shared_bytes(ids, observed=True) == []
    recent.add(ids)
    assert recent.shared_bytes(ids, observed=True) == [99 * 4], "the other one that is just like it counts"


def test_prompt_history_is_bounded() -> None:
    recent = PromptHistory(max_bytes=100_000)
    for i in range(1000):
        recent.add(pack_tokens([i] * 200))
        recent.add(pack_tokens([7] * 200))
    assert recent.num_bytes <= 100_000
    assert recent.shared_bytes(pack_tokens([7] * 201), observed=False) == [800] * 8
