"""RWKV-4, 5 and 6 against the reference package: logits and states, for every split and batch."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rwkv_batch.kernels.cpu import library as cpu_library
from rwkv_batch.model.step_inputs import step_inputs
from rwkv_batch.model.tensor_files import FileError
from rwkv_batch.model.tuned_state import read_tuned_state
from rwkv_batch.model.weights import Weights, WeightsError, weights_from
from rwkv_batch.runner.pipeline import Pipeline
from test.conftest import rest_slow
from test.model.random_older_weights import random_older_weights
from test.model.test_model import (
    CUTS,
    KERNELS,
    assert_same_bits_in_a_batch,
    feed,
    needs_compiler,
    pipeline,
    random_rows,
)

pytestmark = pytest.mark.slow

CASES: dict[str, dict[str, Any]] = {
    "RWKV-4": {"version": "4", "layers": 3, "width": 128},
    "RWKV-5.0": {"version": "5.0", "layers": 2, "width": 128, "heads": 4},
    "RWKV-5.0, bonus as a logarithm": {"version": "5.0", "layers": 2, "width": 128, "has_time_first": True},
    "RWKV-5.1": {"version": "5.1", "layers": 2, "width": 192},
    "RWKV-5.2": {"version": "5.2", "layers": 3, "width": 128, "dtype": torch.float32},
    "RWKV-6": {"version": "6", "layers": 3, "width": 192},
    "RWKV-6, one head": {"version": "6", "layers": 2, "width": 64},
}
ORACLE = """
import sys, torch
from rwkv.model import RWKV
for folder in sys.argv[1:]:
    model = RWKV(model=folder + "/model.pth", strategy="cpu fp32", verbose=False)
    logits, state = model.forward(torch.load(folder + "/prompt.pt"), None, full_output=True)
    torch.save({"logits": logits, "state": state}, folder + "/answer.pt")
"""
"""In another process: at import, the package decides between RWKV-7 and older versions."""


@dataclass
class Case:
    """A random model, a prompt, and the reference's results."""

    name: str
    weights: Weights
    prompt: list[int]
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    """[T, V]"""
    state: list[Tensor] = field(default_factory=list)
    """in the package's layout"""


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    pytest.importorskip("rwkv")
    folders = {name: tmp_path_factory.mktemp("oracle") for name in CASES}
    made: dict[str, Case] = {}
    for name, folder in folders.items():
        tensors = random_older_weights(seed=7, **CASES[name])
        torch.save({name: tensor.float() for name, tensor in tensors.items()}, folder / "model.pth")
        weights = weights_from(tensors)
        prompt = torch.randint(1, weights.shape.vocab, (23,), generator=torch.Generator().manual_seed(1)).tolist()
        torch.save(prompt, folder / "prompt.pt")
        made[name] = Case(name, weights, prompt)
    env = {**os.environ, "RWKV_V7_ON": "0", "RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0"}
    arguments = [sys.executable, "-c", ORACLE, *map(str, folders.values())]
    subprocess.run(arguments, env=env, check=True, capture_output=True)
    for name, folder in folders.items():
        made[name].logits, made[name].state = torch.load(folder / "answer.pt").values()
    return made


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, cases: dict[str, Case]) -> Case:
    return cases[request.param]


def states(model: Pipeline, slot: int) -> list[Tensor]:
    """Return a slot's state in the package's layout."""
    found: list[Tensor] = []
    for stage in model.stages:
        assert stage.state is not None
        for wkv, shift in zip(stage.state.wkv[slot], stage.state.shift[slot], strict=True):
            parts = list(wkv) if wkv.dim() == 2 else [wkv.transpose(1, 2)]
            found += [shift[0], *parts, shift[1]]
    return found


def test_a_version_is_recognised_by_its_tensors(case: Case) -> None:
    shape, expected = case.weights.shape, CASES[case.name]
    assert shape.version == case.name.partition(",")[0] and shape.layers == expected["layers"]
    assert case.name.startswith("RWKV-4") or shape.heads == expected.get("heads", expected["width"] // 64)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
def test_logits_and_state_equal_the_reference(case: Case, kernels: str, cuts: tuple[int, ...]) -> None:
    model = pipeline(case.weights, kernels)
    logits = feed(model, case.prompt, cuts)
    ends = torch.tensor(cuts).cumsum(0) - 1
    assert (logits - case.logits[ends]).abs().max() < 1e-4
    for mine, expected in zip(states(model, 2), case.state, strict=True):
        assert (mine - expected).abs().max() < 1e-4


@pytest.mark.parametrize("kernels", KERNELS)
def test_several_stages_equal_one(case: Case, kernels: str) -> None:
    one, two = pipeline(case.weights, kernels), pipeline(case.weights, kernels, stages=2)
    assert two.slot_bytes == one.slot_bytes
    assert torch.equal(feed(one, case.prompt, CUTS["chunked"]), feed(two, case.prompt, CUTS["chunked"]))


@needs_compiler
@pytest.mark.parametrize("dtype", rest_slow(["fp32", "int8", "bf16"], long=["bf16"]))
def test_same_bits_alone_and_among_200_others(case: Case, dtype: str) -> None:
    model = Pipeline(case.weights, devices=("cpu",), kernels="cpu", dtype=dtype)
    assert_same_bits_in_a_batch(model, case.weights, states)
    assert all(not t.any() for t in states(model, 0)), "the zero slot stays zero"


def test_the_number_of_threads_changes_no_bit(case: Case) -> None:
    """An odd number splits tensors within a vector register."""
    threads, found = torch.get_num_threads(), []
    rows = random_rows(case.weights, [301, 1, 1], seed=9)
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            model = pipeline(case.weights, "auto")
            found.append(model.forward(step_inputs(rows, [0, 0, 0], [2, 3, 4], [0, 1, 2])))
    finally:
        torch.set_num_threads(threads)
    assert cpu_library.library_unavailable_reason() is not None or torch.equal(*found)


def test_unsupported_options_of_a_version() -> None:
    six = weights_from(random_older_weights("6", 2, 128))
    for form in ("fp16", "int8"):
        with pytest.raises(ValueError, match=f"states of RWKV-6 must be fp32, not {form}; omit --wkv-state .in"):
            Pipeline(six, devices=("cpu",), wkv_state=form)
    with pytest.raises(ValueError, match="the cuda kernels are RWKV-7's; RWKV-6 runs on plain torch"):
        Pipeline(six, devices=("cpu",), kernels="cuda")
    with pytest.raises(WeightsError, match=r"\(RWKV-6\) lacks the tensor 'blocks.1.att.time_decay_w1'"):
        weights_from({n: t for n, t in random_older_weights("6", 2, 64).items() if n != "blocks.1.att.time_decay_w1"})


def test_tuned_states_of_older_versions(tmp_path: Path) -> None:
    """State tuning stores [value, key]; the package transposes a time_state too."""
    shape = weights_from(random_older_weights("6", 2, 128)).shape
    wkv = torch.randn(2, 2, 64, 64)
    torch.save({f"blocks.{i}.att.time_state": one for i, one in enumerate(wkv)}, tmp_path / "s.pth")
    assert torch.equal(read_tuned_state(tmp_path / "s.pth", shape).wkv, wkv)
    with pytest.raises(FileError, match="RWKV-4 has no tuned states"):
        read_tuned_state(tmp_path / "s.pth", weights_from(random_older_weights("4", 2, 128)).shape)
