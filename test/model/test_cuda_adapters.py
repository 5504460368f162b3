"""The host's part of adapters on a GPU: tiles of tokens, and the table that graphs read. No GPU."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rwkv_batch.kernels.cuda.adapters import NO_TOKEN, TILE, CudaAdapterTable, fill_tiles, max_tiles
from rwkv_batch.kernels.cuda.channel_mix import mix_experts
from rwkv_batch.model.adapter_table import AdapterTable
from rwkv_batch.model.low_rank import Experts, LayerPairs, Pair, Target
from rwkv_batch.model.step_inputs import step_inputs


@pytest.mark.parametrize(("tokens", "adapters"), product([0, 1, 5, 16, 17, 100, 320], [0, 1, 8, 200]))
def test_every_token_is_in_one_tile_of_its_adapter(tokens: int, adapters: int) -> None:
    numbers = np.random.default_rng(tokens).integers(0, adapters + 1, tokens)
    maximum = max_tiles(tokens, adapters)
    places, tiles = np.full(maximum * TILE, 99_999, dtype=np.int32), np.full(maximum, 99_999, dtype=np.int32)
    count = fill_tiles(numbers, places, tiles)
    found = []
    for tile, own in zip(tiles[:count], places[: count * TILE].reshape(-1, TILE), strict=True):
        here = own[own != NO_TOKEN]
        assert len(here) and (numbers[here] == tile).all()
        found += here.tolist()
    assert sorted(found) == list(range(tokens)) and (tiles[count:] == NO_TOKEN).all()
    without = tiles[:count] == 0
    assert (np.sort(without) == without).all(), "rows without an adapter come last: kernels stop there"


def test_the_table_has_the_addresses_of_pairs() -> None:
    """Ranks are padded to 16. A pair that a step created can be replaced between steps."""
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


def experts(seed: int, layers: int = 2) -> dict[int, LayerPairs]:
    """Four experts in every channel mix of width 64, two per token; the last has no key pair."""
    generator = torch.Generator().manual_seed(seed)

    def pair(out: int, inputs: int) -> Pair:
        return Pair(torch.randn(3, inputs, generator=generator) * 0.2, torch.randn(out, 3, generator=generator) * 0.2)

    found = {}
    for i in range(layers):
        pairs = [{Target.FFN_KEY: pair(256, 64), Target.FFN_VALUE: pair(64, 256)} for _ in range(4)]
        del pairs[3][Target.FFN_KEY]
        router = torch.randn(3, 64, generator=generator)
        found[i] = LayerPairs({Target.KEY: pair(64, 64)}, Experts(router, tuple(pairs), 2))
    return found


@pytest.mark.parametrize("is_squared", [True, False])
def test_experts_equal_plain_torch(is_squared: bool) -> None:
    """Two adapters with experts, and rows without. The other rows' tokens stay bit for bit."""
    cpu = torch.device("cpu")
    table, plain = CudaAdapterTable(0, 2, cpu, torch.float16), AdapterTable(0, 2, cpu, torch.float32)
    for number in (2, 5):
        table.put(number, experts(number)), plain.put(number, experts(number))
    assert table.is_routed(2) and not table.is_routed(1) and not plain.is_routed(2)
    numbers = [0, 2, 2, 5, 0, 2, 5, 0]
    inputs = step_inputs([[1]] * 8, [0] * 8, list(range(2, 10)), [])
    inputs.adapters = torch.tensor(numbers)
    generator = torch.Generator().manual_seed(1)
    weight = (torch.randn(256, 64, generator=generator) / 8).half()
    layer: Any = SimpleNamespace(ffn_key=lambda x: x @ weight.T)
    x = torch.randn(8, 64, generator=generator).half()
    before = torch.relu(layer.ffn_key(x)) if not is_squared else torch.relu(layer.ffn_key(x)).square()
    hidden, expected, added = before.clone(), before.float(), torch.zeros(8, 64)
    for_step, reference = table.for_step(inputs), plain.for_step(inputs)
    assert for_step is not None and reference is not None
    actual = mix_experts(layer, x, hidden, for_step.for_layer(1), is_squared)
    reference.for_layer(1).mix_experts(x.float(), layer.ffn_key(x).float(), expected, added)
    assert actual is not None and (expected - before.float()).norm() > 0.3 * expected.norm()
    for row, number in enumerate(numbers):
        if number == 0:
            assert torch.equal(hidden[row], before[row]) and not actual[row].any()
            continue
        found = hidden[row].float() if is_squared else hidden[row].float().square()
        assert (found - expected[row]).norm() < 2e-3 * expected[row].norm()
        assert (actual[row].float() - added[row]).norm() < 2e-3 * added[row].norm()


def test_a_step_without_their_rows_runs_no_experts() -> None:
    table = CudaAdapterTable(0, 2, torch.device("cpu"), torch.float16)
    table.put(1, {0: LayerPairs({Target.KEY: Pair(torch.ones(2, 64), torch.ones(64, 2))})})
    table.put(2, {1: experts(2)[1]})
    inputs = step_inputs([[1]] * 2, [0] * 2, [2, 3], [])
    inputs.adapters = torch.tensor([1, 0])
    x = torch.ones(2, 64).half()
    for numbers, layer in (([1, 0], 1), ([2, 0], 0)):
        inputs.adapters = torch.tensor(numbers)
        for_step = table.for_step(inputs)
        assert for_step is not None
        assert mix_experts(SimpleNamespace(), x, x, for_step.for_layer(layer)) is None  # type: ignore[arg-type]
    table.drop(2)
    assert not table.is_routed(2)
