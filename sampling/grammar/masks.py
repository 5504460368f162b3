"""The token masks of a step's constrained rows.

Those of grammars are computed on several threads. Those of required texts recur, so the device keeps them in a table.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import llguidance
import torch
from torch import Tensor

from native.priority import cores
from native.tensors import on_device
from sampling.grammar.constraint import GrammarError, in_one_line
from sampling.grammar.matcher import Matcher
from sampling.grammar.required_text import AnyMatcher, Mask, RequiredTextMatcher

SLOW_STEP_S = 0.05
"""After a slower step, the next masks are timed one by one, to find the slow grammar."""
TIMED_STEPS = 64
_MAX_THREADS = 8
TABLE_ROWS = 1024
"""Masks of required texts on the device, at least: 8 KiB each with 65,536 tokens."""
RING = 4
"""Mask buffers, so that the host writes one while the device reads others."""


def mask_threads(device: torch.device) -> int:
    # On a CPU the step waits for its masks. With a GPU, the host has other work meanwhile.
    threads = torch.get_num_threads() if device.type == "cpu" else cores() // 2
    return max(1, min(_MAX_THREADS, threads))


_BITS = [1 << bit if bit < 31 else -(1 << 31) for bit in range(32)]
"""Mask words with one token."""


class Masks:
    """Mask buffers on the host and on the samplers' device. Engine thread."""

    def __init__(self, vocab: int, device: torch.device, threads: int) -> None:
        self._words = -(-vocab // 32)
        self._device = device
        self._threads = llguidance.LLExecutor(threads)
        self._ring: list[_Staging] = [_Staging(device) for _ in range(RING if device.type == "cuda" else 1)]
        self._ring_index = 0
        self._timed_steps = 0
        self._table = torch.empty(0, self._words, dtype=torch.int32, device=device)
        self._table_rows: dict[int, int] = {}
        """by `id` of a mask in `_in_table`"""
        self._in_table: list[Mask] = []
        """the masks of the table's rows"""

    def fill(self, matchers: Sequence[AnyMatcher]) -> tuple[Tensor, list[GrammarError | None]]:
        """Compute masks [m, V/32] int32 and an error or None per matcher.

        The masks are on the device. The mask of a matcher with an error allows all tokens. Valid until the next call.
        """
        required = [one for one in matchers if isinstance(one, RequiredTextMatcher)]
        if len(required) == len(matchers) and self._device.type != "cpu":
            table_rows = on_device(self._table_rows_of([one.mask() for one in required]), torch.int64, self._device)
            return self._table[table_rows], [None] * len(matchers)
        staging = self._next_staging()
        host = staging.host(len(matchers), self._words)
        address, size = host.data_ptr(), 4 * self._words
        grammars = [(index, one) for index, one in enumerate(matchers) if isinstance(one, Matcher)]
        if required:
            rows = host.numpy()
            for index, one in enumerate(matchers):
                if not isinstance(one, Matcher):
                    rows[index] = one.mask()
        started = time.perf_counter()
        if self._timed_steps:
            self._timed_steps -= 1
            self._fill_timed(grammars, address, size)
        elif grammars:
            self._threads.unsafe_compute_mask_ptr(_by_lexer(grammars), address, size, len(matchers))
            if time.perf_counter() - started > SLOW_STEP_S:
                self._timed_steps = TIMED_STEPS
        errors: list[GrammarError | None] = [None] * len(matchers)
        for index, matcher in grammars:
            errors[index] = error = _error(matcher)
            if error is not None:
                host[index] = -1
            elif (token := matcher.forced_token) is not None:
                host[index] = 0
                host[index, token // 32] = _BITS[token % 32]
        return staging.on_device(host), errors

    def _next_staging(self) -> _Staging:
        self._ring[self._ring_index].mark_read()
        self._ring_index = (self._ring_index + 1) % len(self._ring)
        return self._ring[self._ring_index]

    def _table_rows_of(self, masks: list[Mask]) -> list[int]:
        """Return the table's rows with these masks. New masks are copied to it."""
        table_rows = self._table_rows
        new = {id(mask): mask for mask in masks if id(mask) not in table_rows}
        if len(self._in_table) + len(new) > len(self._table):  # the same stream reads the table, so it may be rewritten
            table_rows.clear()
            self._in_table.clear()
            new = {id(mask): mask for mask in masks}
            if len(new) > len(self._table):
                size = max(TABLE_ROWS, 2 * len(new))
                self._table = torch.empty(size, self._words, dtype=torch.int32, device=self._device)
        if new:
            first, staging = len(self._in_table), self._next_staging()
            host = staging.host(len(new), self._words)
            for row, mask in zip(host.numpy(), new.values(), strict=True):
                row[:] = mask
            self._table[first : first + len(new)].copy_(staging.on_device(host))
            table_rows.update(zip(new, range(first, first + len(new)), strict=True))
            self._in_table += new.values()
        return [table_rows[id(mask)] for mask in masks]

    @staticmethod
    def _fill_timed(matchers: Sequence[tuple[int, Matcher]], address: int, size: int) -> None:
        for index, matcher in matchers:
            grammar = matcher.grammar
            if grammar.is_too_slow:
                continue
            started = time.thread_time()  # not wall time, which includes other threads
            matcher.state.unsafe_compute_mask_ptr(address + index * size, size)
            grammar.mask_s += time.thread_time() - started
            grammar.masks += 1


def _by_lexer(matchers: Sequence[tuple[int, Matcher]]) -> list[tuple[llguidance.LLMatcher, int]]:
    """Return the matchers' states and mask indices, sorted by lexer.

    A thread takes a run of them, and threads with the same lexer wait for each other.
    """
    states = [(matcher.state, index, (id(matcher.grammar), matcher.template_index)) for index, matcher in matchers]
    return [(state, index) for state, index, _ in sorted(states, key=lambda one: one[2])]


def _error(matcher: Matcher) -> GrammarError | None:
    if matcher.grammar.is_too_slow:
        return GrammarError("its masks take too long to compute; write it with less ambiguity")
    if matcher.state.is_error():
        return GrammarError(f"cannot be matched any further: {in_one_line(matcher.state.get_error())}")
    return None


class _Staging:
    """One step's masks: a host buffer and a device buffer."""

    def __init__(self, device: torch.device) -> None:
        self._host = torch.empty(0, 0, dtype=torch.int32)
        self._device = device
        self._target = torch.empty(0, 0, dtype=torch.int32)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._arrived = torch.cuda.Event() if device.type == "cuda" else None
        self._read: torch.cuda.Event | None = None

    def host(self, rows: int, words: int) -> Tensor:
        """Return the host buffer, [rows, words] int32 to write."""
        if self._arrived is not None:
            self._arrived.synchronize()
        if len(self._host) < rows:
            size = (max(rows, 2 * len(self._host)), words)
            self._host = torch.zeros(size, dtype=torch.int32, pin_memory=self._stream is not None)
            if self._stream is not None:
                self._target = torch.empty(size, dtype=torch.int32, device=self._device)
                # Earlier users of this memory may still be reading it on the current stream.
                self._read = torch.cuda.current_stream(self._device).record_event()
        return self._host[:rows]

    def on_device(self, host: Tensor) -> Tensor:
        """Copy host masks [rows, words] int32 to the device, on another stream. The current stream waits for it."""
        if self._stream is None or self._arrived is None:
            return host
        target = self._target[: len(host)]
        with torch.cuda.stream(self._stream):
            if self._read is not None:
                self._stream.wait_event(self._read)
            target.copy_(host, non_blocking=True)
            self._arrived.record(self._stream)
        torch.cuda.current_stream(self._device).wait_event(self._arrived)
        return target

    def mark_read(self) -> None:
        """Record that the current stream has all launches that read these masks."""
        if self._stream is not None:
            self._read = torch.cuda.current_stream(self._device).record_event()
