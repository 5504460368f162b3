"""The host's arrays for a graph of decode rows and prompts: each row in its place, padding elsewhere."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rwkv_batch.model.step_inputs import step_inputs
from rwkv_batch.runner.graphs.mixed import DECODE_SIZES, PROMPT_SIZES, MixedGraphs, MixedSize, usable_mixed_sizes
from state_pool.layout import DUMMY_SLOT, ZERO_SLOT

NOBODY = 777
NAMES = ("tokens", "token_rows", "cu_seqlens", "read_slots", "write_slots", "logit_tokens", "req_slots", "req_slots32")


def staged() -> tuple[MixedGraphs, dict[str, Any]]:
    """Graphs without a device, and the arrays that they fill."""
    host = {name: np.full(1000, -5, dtype=np.int64) for name in NAMES}

    @contextmanager
    def filling() -> Iterator[dict[str, Any]]:
        yield host

    mixed = object.__new__(MixedGraphs)
    mixed.__dict__ |= {
        "_decode": SimpleNamespace(dummy_req_slot=NOBODY),
        "_token_range": np.arange(DECODE_SIZES[-1]),
        "_staged": SimpleNamespace(filling=filling),
    }
    return mixed, host


@pytest.mark.parametrize("seed", range(40))
def test_rows_are_in_place_and_padding_is_harmless(seed: int) -> None:
    dice = random.Random(seed)
    size = MixedSize(dice.choice(DECODE_SIZES), dice.choice(PROMPT_SIZES))
    count, rows = dice.randint(1, size.decoding), dice.randint(1, size.prompts.rows)
    longest = (size.prompts.tokens - size.prompts.rows - 1) // rows
    prompts = [[dice.randrange(1, 99) for _ in range(dice.randint(1, longest))] for _ in range(rows)]
    slots = dice.sample(range(2, 4000), 2 * (count + rows))
    reads, writes = slots[: count + rows], slots[count + rows :]
    samples = sorted(dice.sample(range(rows), dice.randint(0, rows)))
    req_slots, prompt_req_slots = list(range(count)), [700 + i for i in samples]
    mixed, host = staged()
    decoding = {"req_slots": req_slots, "read_slots": reads[:count], "write_slots": writes[:count]}
    mixed._fill(size, decoding, step_inputs(prompts, reads[count:], writes[count:], samples), prompt_req_slots, [0])

    first, last = size.decoding, size.decoding + size.prompts.rows + 1
    bounds = host["cu_seqlens"][: last + 1].tolist()
    assert bounds[0] == 0 and bounds[-1] == size.tokens and all(a < b for a, b in pairwise(bounds))
    assert bounds[: first + 1] == list(range(first + 1)), "rows that decode have a token each"
    tokens = [None] * first + host["tokens"][: size.prompts.tokens].tolist()
    for i, prompt in enumerate(prompts):
        assert tokens[bounds[first + i] : bounds[first + i + 1]] == prompt
    for name, expected, padding in (("read_slots", reads, ZERO_SLOT), ("write_slots", writes, DUMMY_SLOT)):
        actual = host[name][:last].tolist()
        assert actual[:count] == expected[:count] and actual[first : first + rows] == expected[count:]
        assert set(actual[count:first] + actual[first + rows :]) <= {padding}
    for row in range(last):
        assert set(host["token_rows"][bounds[row] : bounds[row + 1]]) == {row}
    ends = [bounds[first + i + 1] - 1 for i in samples]
    assert host["logit_tokens"][: first + len(ends)].tolist() == [*range(first), *ends]
    actual = host["req_slots"][: size.num_sampled].tolist()
    assert actual[:count] == req_slots and actual[first : first + len(samples)] == prompt_req_slots
    assert set(actual[count:first] + actual[first + len(samples) :]) <= {NOBODY}
    assert host["req_slots32"][: size.num_sampled].tolist() == [NOBODY, *actual[1:]], "row 0 samples later"


def test_sizes_fit_every_mixed_step() -> None:
    sizes = usable_mixed_sizes(300)
    assert max(size.decoding for size in sizes) == 320
    assert sizes == tuple(sorted(sizes, key=lambda size: size.tokens))
    assert {size.decoding for size in usable_mixed_sizes(20)} == {8, 16, 32}
