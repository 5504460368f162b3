"""Per-row adapters: each kind against its formula in plain torch, on each backend and ragged steps."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

from demo.random_weights import random_weights
from rwkv_batch.kernels.naive import NaiveOps
from rwkv_batch.model.adapters.files import Adapter, read_adapter
from rwkv_batch.model.adapters.merge import merge_adapters
from rwkv_batch.model.adapters.per_row import per_row_adapter
from rwkv_batch.model.layer import Layer
from rwkv_batch.model.step_inputs import StepInputs, step_inputs
from rwkv_batch.model.tensor_files import FileError
from rwkv_batch.model.weights import weights_from
from rwkv_batch.runner.pipeline import Pipeline
from test.adapter_files import MAPS, random_experts, random_lora, write_adapter

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
    """Two-dimensional, with blocks of 20 inputs, which do not divide the width."""
    sizes = {name: WIDTH * (4 if name == "ffn.key" else 1) for name in MAPS}
    return {f"blocks.{i}.{n}.disha": normal(20, out, seed=seed + i) for i in range(LAYERS) for n, out in sizes.items()}


def few(seed: int) -> dict[str, Tensor]:
    """On some maps only, with different ranks."""
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
    made = Pipeline(merge_adapters(WEIGHTS, given) if merge else WEIGHTS, ("cpu", "cpu"), dtype, kernels)
    made.allocate_slots(10)
    for number, adapter in enumerate(() if merge else given, 1):
        made.put_adapter(number, per_row_adapter(WEIGHTS, adapter).layers)
    return made


def tokens_of(rows: list[list[int]], numbers: list[int]) -> Tensor:
    """Return [T]: the adapter number of each token's row."""
    return torch.tensor([number for row, number in zip(rows, numbers, strict=True) for _ in row])


def inputs(numbers: list[int] | None) -> StepInputs:
    made = step_inputs(ROWS, [0] * len(ROWS), list(range(2, 2 + len(ROWS))), list(range(len(ROWS))))
    return dataclasses.replace(made, adapters=None if numbers is None else tokens_of(ROWS, numbers))


@pytest.mark.parametrize("kernels", ["naive", "cpu"])
def test_a_row_equals_merged_weights(adapters: list[Adapter], kernels: str) -> None:
    numbers = [1, 2, 3, 4, 0]
    both = pipeline(kernels, *adapters)
    plain = both.forward(inputs(None)).clone()
    found = both.forward(inputs(numbers))
    for row, number in enumerate(numbers):
        if number == 0:
            assert torch.equal(found[row], plain[row])
            continue
        expected = pipeline("naive", adapters[number - 1], merge=True).forward(inputs(None))[row]
        assert (found[row] - expected).abs().max() < 1e-4 * max(1, expected.abs().max())
        assert (expected - plain[row]).abs().max() > 0.1


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_a_row_has_the_same_bits_in_any_batch(adapters: list[Adapter], dtype: str) -> None:
    """In any batch, with and without an adapter. For every storage of the weights."""
    made = pipeline("cpu", *adapters, dtype=dtype)
    plain = made.forward(inputs(None)).clone()
    first = made.forward(inputs([1, 2, 0, 3, 0])).clone()
    second = made.forward(inputs([1, 0, 0, 4, 2])).clone()
    assert torch.equal(first[0], second[0]) and torch.equal(first[2], second[2])
    assert torch.equal(first[2], plain[2]) and torch.equal(first[4], plain[4]) and torch.equal(second[1], plain[1])
    assert not torch.equal(second[4], plain[4])
    alone = step_inputs([ROWS[3]], [0], [5], [0])
    alone.adapters = tokens_of([ROWS[3]], [3])
    assert torch.equal(made.forward(alone)[0], first[3])


@pytest.mark.parametrize("layers", [(), (1.5, LAYERS - 1.5)])
@pytest.mark.parametrize("wkv_state", ["fp32", "fp16", "int8"])
def test_many_rows_of_one_adapter_have_the_same_bits_as_alone(
    tmp_path: Path, wkv_state: str, layers: tuple[float, ...]
) -> None:
    """For pairs and experts. Also where the second stage begins within a layer."""
    files = write_adapter(tmp_path / "lora.pth", KINDS["LoRA"](7)), write_adapter(tmp_path / "mole.pth", mole(3))
    made = Pipeline(WEIGHTS, ("cpu", "cpu"), "fp32", "cpu", wkv_state, layers)
    made.allocate_slots(40)
    for number, file in enumerate(files, 1):
        made.put_adapter(number, per_row_adapter(WEIGHTS, read_adapter(Path(file), 2.0)).layers)
    rows = [[(7 * i + j) % 300 for j in range(1 + i % 4)] for i in range(19)]
    for number in (1, 2):
        together = step_inputs(rows, [0] * len(rows), list(range(2, 2 + len(rows))), list(range(len(rows))))
        together.adapters = tokens_of(rows, [number] * len(rows))
        found = made.forward(together).clone()
        for i, row in enumerate(rows):
            alone = step_inputs([row], [0], [30], [0])
            alone.adapters = tokens_of([row], [number])
            assert torch.equal(made.forward(alone)[0], found[i]), (number, i)


def test_a_dropped_adapter_leaves_nothing(tmp_path: Path) -> None:
    made = Pipeline(WEIGHTS, ("cpu",), "fp32", "cpu", "int8")
    made.allocate_slots(4)
    file = write_adapter(tmp_path / "mole.pth", mole(3))
    step = step_inputs([[1, 2]], [0], [2], [0])
    step.adapters = tokens_of([[1, 2]], [1])
    for _ in range(2):  # the second one replaces the first
        made.put_adapter(1, per_row_adapter(WEIGHTS, read_adapter(Path(file), 1.0)).layers)
        made.forward(step)
    weights = weakref.ref(made.stages[0].adapters.pairs(1)[0].all_pairs[0].a)
    made.drop_adapter(1)
    gc.collect()
    assert weights() is None


def test_an_adapter_without_memory_is_on_no_stage(adapters: list[Adapter], monkeypatch: pytest.MonkeyPatch) -> None:
    made = pipeline("cpu")

    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(made.stages[1].adapters, "put", full)
    with pytest.raises(MemoryError):
        made.put_adapter(1, per_row_adapter(WEIGHTS, adapters[0]).layers)
    with pytest.raises(KeyError):
        made.stages[0].adapters.pairs(1)


def mole(seed: int, same: bool = False) -> dict[str, Tensor]:
    """Return four experts in every channel mix. Also returns pairs for the keys of the time mix."""
    return random_experts(seed, LAYERS, WIDTH, same=same, scale=0.1)


def as_lora(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the effect of the first expert without a router."""
    first = {name.replace(".expert_0.", ".").removesuffix("_expert_0"): tensor for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in first.items() if "expert_" not in name and "lora_" in name}


def test_experts_equal_their_formula(tmp_path: Path) -> None:
    adapter = read_adapter(write_adapter(tmp_path / "mole.pth", tensors := mole(3)), 1.5)
    made = pipeline("naive", adapter)
    layer, at = made.stages[0].layers[0], "blocks.0.ffn"
    assert isinstance(layer, Layer)
    x = normal(20, WIDTH, seed=4) * 10
    inputs = step_inputs([[1]] * 20, [0] * 20, [2] * 20, [])
    inputs.adapters = torch.ones(20, dtype=torch.int64)
    added = made.stages[0].adapters.for_step(inputs)
    assert added is not None
    found = NaiveOps().channel_mix(layer, x, added.for_layer(0))
    key, value = (WEIGHTS.tensors[f"{at}.{name}.weight"] for name in ("key", "value"))
    chosen = set()
    for token, mixed in zip(x, found, strict=True):
        scores = [0.0, *(tensors[f"{at}.router.linear.weight"] @ token).tolist()]
        best = sorted(range(4), key=lambda e: -scores[e])[:2]
        weights = torch.softmax(torch.tensor([scores[e] for e in best]), 0)
        expected = torch.zeros(WIDTH)
        for e, weight in zip(best, weights, strict=True):
            pair = {
                n: tensors[f"{at}.expert_{e}.{n}_expert_0"]
                for n in ("key.lora_A", "key.lora_B", "value.lora_A", "value.lora_B")
            }
            own_key = key + 1.5 * pair["key.lora_B"] @ pair["key.lora_A"]
            own_value = value + 1.5 * pair["value.lora_B"] @ pair["value.lora_A"]
            expected += weight * (own_value @ torch.relu(own_key @ token).square())
        assert (mixed - expected).abs().max() < 1e-4 * max(1, expected.abs().max())
        chosen.add(tuple(best))
    assert len(chosen) > 4


@pytest.mark.parametrize("kernels", ["naive", "cpu"])
def test_identical_experts_equal_one_lora(tmp_path: Path, kernels: str) -> None:
    tensors = mole(5, same=True)
    adapter = read_adapter(write_adapter(tmp_path / "mole.pth", tensors), 1.5)
    lora = read_adapter(write_adapter(tmp_path / "lora.pth", as_lora(tensors)), 1.5)
    plain = pipeline(kernels).forward(inputs(None))
    found = pipeline(kernels, adapter).forward(inputs([1, 0, 1, 1, 0]))
    expected = pipeline("naive", lora, merge=True).forward(inputs(None))
    for row in (0, 2, 3):
        assert (found[row] - expected[row]).abs().max() < 1e-4 * expected[row].abs().max()
    assert torch.equal(found[1], plain[1]) and torch.equal(found[4], plain[4])


def test_experts_with_other_adapters(adapters: list[Adapter], tmp_path: Path) -> None:
    """Kernels equal plain torch. A row has the same bits alone."""
    adapter = read_adapter(write_adapter(tmp_path / "mole.pth", mole(9)), 1.5)
    numbers = [5, 2, 0, 5, 1]
    fast, naive = (pipeline(kernels, *adapters, adapter) for kernels in ("cpu", "naive"))
    found, expected = fast.forward(inputs(numbers)).clone(), naive.forward(inputs(numbers))
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    alone = step_inputs([ROWS[3]], [0], [5], [0])
    alone.adapters = tokens_of([ROWS[3]], [5])
    assert torch.equal(fast.forward(alone)[0], found[3])


WRONG = {
    "no router": ({"blocks.0.ffn.router.linear.weight": None}, "router.linear.weight is missing"),
    "a router of another width": ({"blocks.0.ffn.router.linear.weight": torch.ones(3, 64)}, r"\(3, 64\)"),
    "more experts than it knows": ({"blocks.0.ffn.router.linear.weight": torch.ones(1, WIDTH)}, "has 2 experts"),
    "half a pair": ({"blocks.0.ffn.expert_1.key.lora_B_expert_0": None}, "not a supported kind"),
    "Bone": ({"blocks.0.ffn.expert_1.key.bone_expert_0": torch.ones(24, 8, 8)}, "Bone experts"),
    "a pair and experts": (
        {"blocks.0.ffn.key.lora_A": torch.ones(2, WIDTH), "blocks.0.ffn.key.lora_B": torch.ones(4 * WIDTH, 2)},
        "has both experts",
    ),
    "a layer that is not": ({"blocks.9.ffn.router.linear.weight": torch.ones(3, WIDTH)}, "no weight 'blocks.9.ffn'"),
    "NaN active": ({"moe_info": torch.tensor([4, torch.nan])}, "NaN or infinity"),
    "as many active as never end": ({"moe_info": torch.tensor([4, torch.inf])}, "NaN or infinity"),
    "half an expert": ({"moe_info": torch.tensor([4, 1.5])}, "1.5 active experts"),
    "more active than there are": ({"moe_info": torch.tensor([4, 9])}, "has 4 experts"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_experts_that_are_refused(tmp_path: Path, kind: str) -> None:
    changes, why = WRONG[kind]
    tensors = {name: tensor for name, tensor in (mole(3) | changes).items() if tensor is not None}
    with pytest.raises(FileError, match=why):
        per_row_adapter(WEIGHTS, read_adapter(write_adapter(tmp_path / "wrong.pth", tensors), 1.0))


def test_experts_are_not_merged(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="load it with --adapter-serve"):
        merge_adapters(WEIGHTS, [read_adapter(write_adapter(tmp_path / "mole.pth", mole(3)), 1.0)])
