"""The host's part of adapters on a GPU: tokens into tiles, and the table that graphs read. No GPU."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from rwkv_batch.kernels.cuda_adapters import NOBODY, TILE, CudaAdapterTable, fill_tiles, max_tiles
from rwkv_batch.model.low_rank import Experts, LayerPairs, Pair, Target


@pytest.mark.parametrize(("tokens", "adapters"), product([0, 1, 5, 16, 17, 100, 320], [0, 1, 8, 200]))
def test_every_token_is_in_one_tile_of_its_adapter(tokens: int, adapters: int) -> None:
    numbers = np.random.default_rng(tokens).integers(0, adapters + 1, tokens)
    most = max_tiles(tokens, adapters)
    places, tiles = np.full(most * TILE, 99_999, dtype=np.int32), np.full(most, 99_999, dtype=np.int32)
    count = fill_tiles(numbers, places, tiles)
    found = []
    for tile, own in zip(tiles[:count], places[: count * TILE].reshape(-1, TILE), strict=True):
        here = own[own != NOBODY]
        assert len(here) and (numbers[here] == tile).all()
        found += here.tolist()
    assert sorted(found) == list(range(tokens)) and (tiles[count:] == NOBODY).all()
    without = tiles[:count] == 0
    assert (np.sort(without) == without).all(), "rows without an adapter come last: kernels stop there"


def test_the_table_says_where_pairs_are() -> None:
    """Ranks padded to 16; one that a step has made can be written to between steps."""
    table = CudaAdapterTable(2, 4, torch.device("cpu"), torch.float16)
    with torch.inference_mode():
        assert not table.table.any()
    a, b = torch.arange(6 * 32.0).view(6, 32), torch.arange(64 * 6.0).view(64, 6)
    table.put(3, {3: LayerPairs({Target.OUTPUT: Pair(a, b)}), 9: LayerPairs({Target.KEY: Pair(a, b)})})
    at_a, at_b, rank = table.table[3, 1, Target.OUTPUT].tolist()
    memory = table._memory[3]
    assert (at_a, at_b - at_a, rank) == (memory.data_ptr(), 16 * 32 * 2, 16)
    assert torch.equal(memory[: 6 * 32].view(6, 32), a.half()) and not memory[6 * 32 : 16 * 32].any()
    assert (
        torch.equal(memory[16 * 32 :].view(64, 16)[:, :6], b.half()) and not memory[16 * 32 :].view(64, 16)[:, 6:].any()
    )
    assert table.table[..., 2].sum() == 16, "no other pair is there"
    table.drop(3)


def test_it_takes_no_experts() -> None:
    table = CudaAdapterTable(0, 1, torch.device("cpu"), torch.float16)
    with pytest.raises(ValueError, match="--kernels cpu or naive"):
        table.put(1, {0: LayerPairs({}, Experts(torch.ones(1, 64), ({}, {}), 1))})
