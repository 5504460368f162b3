"""Tokens of drafts on the device, against plain Python. The CPU runs the kernels thread by thread."""

from __future__ import annotations

import ctypes
import random

import pytest
import torch

from rwkv_batch.core.drafters import MAX_DRAFT_TOKENS
from rwkv_batch.kernels.cuda import draft_step
from rwkv_batch.kernels.cuda.draft_step import fill_guess_table, place_tokens
from rwkv_batch.runner.graphs.guess import NUM_NUMBERS, READ, TOKEN, WRITE
from state_pool.layout import DUMMY_SLOT, ZERO_SLOT
from test.guess_table import fill_table, random_rows
from test.model.emulated.library import emulation_of, needs_headers, send_launches_to

pytestmark = [pytest.mark.slow, needs_headers]
library = emulation_of("guess_tokens")
"""The kernels on the CPU."""


@pytest.mark.parametrize(("num_rows", "padded"), [(1, 1), (5, 8), (33, 40)])
def test_steps_after_accepted_guesses(
    num_rows: int, padded: int, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_launches_to(lambda name: library, monkeypatch, draft_step)
    rng = random.Random(num_rows)
    for num_steps in (1, 2, 17):
        rows, last, after = random_rows(rng, num_rows, MAX_DRAFT_TOKENS)
        numbers, first = torch.full((num_rows, NUM_NUMBERS + MAX_DRAFT_TOKENS), -9), 0
        for given, row in zip(numbers, rows, strict=True):
            given[: NUM_NUMBERS + len(row.tokens)] = torch.tensor([*row[:4], first, len(row.tokens), *row.tokens])
            first += len(row.tokens)
        table = torch.full((num_steps, 3, padded + 2), -7)
        fill_guess_table(table, numbers, num_rows, padded, last, after, 20)
        expected = torch.zeros(max(num_steps, 2), 3, num_rows, dtype=torch.int64)
        fill_table(expected, rows, last, after, 20)
        assert torch.equal(table[..., :num_rows], expected[:num_steps])
        unused = table[..., num_rows:padded]
        assert (unused[:, READ] == ZERO_SLOT).all() and (unused[:, WRITE] == DUMMY_SLOT).all()
        assert (unused[:, TOKEN] == 0).all() and (table[..., padded:] == -7).all()


def test_late_tokens_are_placed(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    send_launches_to(lambda name: library, monkeypatch, draft_step)
    to, tokens = torch.full((400,), -7), torch.randint(1000, (700,))
    places, sources = torch.randperm(400)[:300], torch.randint(700, (300,))
    expected = to.clone()
    expected[places] = tokens[sources]
    place_tokens(to, places, tokens, sources)
    assert torch.equal(to, expected)
