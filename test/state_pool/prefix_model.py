"""Prompts over the prefix cache for the model test. Every state is compared with its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from state_pool.cache.prefix_cache import MIN_TOKENS, PrefixHit
from state_pool.layout import ZERO_SLOT, unpack_tokens
from test.pool_fakes import Driver, expected_state

MAX_ROWS = 3
BLOCK = MIN_TOKENS


@dataclass(eq=False)
class Row:
    """A prompt in prefill. It starts from a cached state or zero and has its own slot."""

    tokens: list[int]
    slot: int
    hit: PrefixHit | None
    borders: list[int] = field(default_factory=list)

    @property
    def start(self) -> int:
        """Tokens of the state that it starts from."""
        return 0 if self.hit is None else self.hit.num_tokens


class Prompts:
    """Rows without sessions over a pool. Checks the read and the cached states at each step."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.pool = driver.pool
        self.rows: list[Row] = []

    @property
    def slots(self) -> list[int]:
        return [row.slot for row in self.rows]

    def read_whole(self, blocks: list[int], tail: int) -> None:
        """Run a prompt from start to end."""
        count = len(self.rows)
        self.begin(blocks, tail, announced=False)
        if len(self.rows) > count:
            row = self.rows[-1]
            while row in self.rows:
                self.advance(self.rows.index(row))

    def begin(self, blocks: list[int], tail: int, announced: bool) -> None:
        """Start a prompt of whole blocks and one unique token. Drops it if no slot is free."""
        tokens = [token for block in blocks for token in range(block * BLOCK, (block + 1) * BLOCK)] + [tail]
        if announced:
            self.pool.prefixes.observe(tokens)
        if len(self.rows) >= MAX_ROWS or (announced and self.pool.prefixes.should_wait(tokens)):
            return
        slot = self.pool.tiers.allocate()
        if slot is None:
            return
        hit = self.pool.prefixes.match(tokens)
        row = Row(tokens, slot, hit)
        assert row.start < len(tokens), "a hit leaves a token to compute"
        row.borders = [at for at in self.pool.prefixes.cache_points(tokens, announced) if at > row.start]
        self.rows.append(row)

    def advance(self, at: int) -> None:
        """Run a prompt to its next cache point and offer the state; without a cache point, to its end."""
        if not self.rows:
            return
        row = self.rows[at % len(self.rows)]
        if not row.borders:
            self._end(row)
            return
        border = row.borders.pop(0)
        self._read(row, border)
        fresh = self.pool.tiers.allocate()
        hit = None if fresh is None else self.pool.prefixes.offer(row.tokens[:border], row.slot)
        if fresh is None or hit is None:
            self.pool.prefixes.abandon(row.tokens[:border])
            self.cancel_row(row)
            if fresh is not None:
                self.pool.tiers.free(fresh)
            return
        self._leave(row)
        row.hit, row.slot = hit, fresh

    def cancel(self, at: int) -> None:
        if self.rows:
            self.cancel_row(self.rows[at % len(self.rows)])

    def cancel_row(self, row: Row) -> None:
        for border in row.borders:
            self.pool.prefixes.abandon(row.tokens[:border])
        self._leave(row)
        self.pool.tiers.free(row.slot)
        self.rows.remove(row)

    def cancel_all(self) -> None:
        for row in list(self.rows):
            self.cancel_row(row)
        assert not self.pool.prefixes._in_progress, "a prefix is awaited that nobody computes"

    def check(self) -> None:
        """Check that the states of rows and entries match their tokens. It covers every tier."""
        memory = self.driver.arena.memory
        for row in self.rows:
            read = ZERO_SLOT if row.hit is None else row.hit.slot
            assert np.array_equal(memory[read], expected_state(row.tokens[: row.start])), (
                "a prefix changed under its reader"
            )
        cache = self.pool.prefixes
        for entry in [*cache._l1, *cache._l2]:
            if entry.slot is not None:
                state = memory[entry.slot]
            else:
                assert entry.host is not None
                parts = entry.host.parts()
                state = np.frombuffer(bytes(parts["a.wkv"]) + bytes(parts["a.shift"]), dtype=np.uint32)
            assert np.array_equal(state, expected_state(unpack_tokens(entry.ids))), "a cached state is not its prefix's"

    def _read(self, row: Row, end: int) -> None:
        read = ZERO_SLOT if row.hit is None else row.hit.slot
        self.driver.arena.run(read, row.slot, row.tokens[row.start : end])

    def _end(self, row: Row) -> None:
        self._read(row, len(row.tokens))
        assert np.array_equal(self.driver.arena.memory[row.slot], expected_state(row.tokens))
        self.cancel_row(row)

    def _leave(self, row: Row) -> None:
        if row.hit is not None:
            self.pool.prefixes.unpin(row.hit)
            row.hit = None
