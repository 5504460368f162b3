"""Adapters beside the weights: each kind against its formula in plain torch, each backend, on ragged steps."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from demo.random_weights import random_weights
from rwkv_batch.model.adapters.files import Adapter, read_adapter
from rwkv_batch.model.adapters.merge import merged
from rwkv_batch.model.adapters.served import served
from rwkv_batch.model.step_inputs import StepInputs, step_inputs
from rwkv_batch.model.weights import weights_from
from rwkv_batch.runner.pipeline import Pipeline
from test.adapter_files import MAPS, random_lora, write_adapter

LAYERS, WIDTH = 3, 192
WEIGHTS = weights_from(random_weights(LAYERS, WIDTH, vocab=300, seed=3, dtype=torch.float32))
ROWS = [[1, 2, 3, 4, 5], [6], [7, 8], [9, 10, 11], [12]]


def normal(*size: int, seed: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)) * 0.1


def pissa(seed: int) -> dict[str, Tensor]:
    first = {
        name.replace("lora_", "init_lora_"): tensor for name, tensor in random_lora(seed + 50, LAYERS, WIDTH).items()
    }
    return random_lora(seed, LAYERS, WIDTH) | first


def miss(seed: int) -> dict[str, Tensor]:
    """Two-dimensional: a block of 20 inputs, which divides no width."""
    sizes = {name: WIDTH * (4 if name == "ffn.key" else 1) for name in MAPS}
    return {f"blocks.{i}.{n}.disha": normal(20, out, seed=seed + i) for i in range(LAYERS) for n, out in sizes.items()}


def few(seed: int) -> dict[str, Tensor]:
    """Beside some maps only, of another rank each."""
    return {
        "blocks.0.att.value.lora_A": normal(3, WIDTH, seed=seed),
        "blocks.0.att.value.lora_B": normal(WIDTH, 3, seed=seed + 1),
        "blocks.2.ffn.key.lora_A": normal(40, WIDTH, seed=seed + 2),
        "blocks.2.ffn.key.lora_B": normal(4 * WIDTH, 40, seed=seed + 3),
    }


KINDS = {"LoRA": lambda seed: random_lora(seed, LAYERS, WIDTH), "PiSSA": pissa, "MiSS": miss, "few": few}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Adapter]:
    """One of each kind, numbered from 1."""
    folder = tmp_path_factory.mktemp("adapters")
    files = [write_adapter(folder / f"{name}.pth", make(seed * 10)) for seed, (name, make) in enumerate(KINDS.items())]
    return [read_adapter(Path(file), 2.0) for file in files]


def pipeline(kernels: str, *given: Adapter, merge: bool = False, dtype: str = "fp32") -> Pipeline:
    made = Pipeline(merged(WEIGHTS, given) if merge else WEIGHTS, ("cpu", "cpu"), dtype, kernels)
    made.allocate_slots(10)
    for number, adapter in enumerate(() if merge else given, 1):
        made.put_adapter(number, served(WEIGHTS, adapter))
    return made


def inputs(numbers: list[int] | None) -> StepInputs:
    made = step_inputs(ROWS, [0] * len(ROWS), list(range(2, 2 + len(ROWS))), list(range(len(ROWS))))
    return dataclasses.replace(made, adapters=None if numbers is None else torch.tensor(numbers))


@pytest.mark.parametrize("kernels", ["naive", "cpu"])
def test_a_row_is_computed_as_by_the_merged_weights(adapters: list[Adapter], kernels: str) -> None:
    numbers = [1, 2, 3, 4, 0]
    both = pipeline(kernels, *adapters)
    plain = both.forward(inputs(None)).clone()
    found = both.forward(inputs(numbers))
    for row, number in enumerate(numbers):
        if number == 0:
            assert torch.equal(found[row], plain[row])
            continue
        wanted = pipeline("naive", adapters[number - 1], merge=True).forward(inputs(None))[row]
        assert (found[row] - wanted).abs().max() < 1e-4 * max(1, wanted.abs().max())
        assert (wanted - plain[row]).abs().max() > 0.1


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_a_row_has_the_same_bits_beside_any_others(adapters: list[Adapter], dtype: str) -> None:
    """Alone and in company, with an adapter and without, whatever the weights are stored in."""
    made = pipeline("cpu", *adapters, dtype=dtype)
    plain = made.forward(inputs(None)).clone()
    first = made.forward(inputs([1, 2, 0, 3, 0])).clone()
    second = made.forward(inputs([1, 0, 0, 4, 2])).clone()
    assert torch.equal(first[0], second[0]) and torch.equal(first[2], second[2])
    assert torch.equal(first[2], plain[2]) and torch.equal(first[4], plain[4]) and torch.equal(second[1], plain[1])
    assert not torch.equal(second[4], plain[4])
    alone = step_inputs([ROWS[3]], [0], [5], [0])
    alone.adapters = torch.tensor([3])
    assert torch.equal(made.forward(alone)[0], first[3])


def test_an_adapter_that_fits_no_memory_is_on_no_stage(
    adapters: list[Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = pipeline("cpu")

    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(made.stages[1].adapters, "put", full)
    with pytest.raises(MemoryError):
        made.put_adapter(1, served(WEIGHTS, adapters[0]))
    with pytest.raises(KeyError):
        made.stages[0].adapters.pairs(1)
