"""The model against the reference package on a CPU: logits and states, for every split of a prompt."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from demo.random_weights import random_weights
from rwkv_batch.kernels.cpu import library as cpu_library
from rwkv_batch.model.step_inputs import step_inputs
from rwkv_batch.model.weights import Weights, weights_from
from rwkv_batch.runner.pipeline import Pipeline

SLOTS = 12
PROBLEM = cpu_library.library_unavailable_reason()
needs_compiler = pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))
KERNELS = ["naive", pytest.param("cpu", marks=needs_compiler)]
SHAPES: dict[str, dict[str, Any]] = {
    "multi-head": {"layers": 3, "width": 256, "vocab": 512},
    "odd ranks": {"layers": 2, "width": 128, "vocab": 300, "ranks": (20, 24, 12, 40)},
    "missing v keys": {"layers": 3, "width": 192, "vocab": 256, "first_v": False, "ranks": (16, 8, 32, 64)},
    "whole vocabulary": {"layers": 2, "width": 64, "vocab": 65536},
    "one layer, fp32 file": {"layers": 1, "width": 320, "vocab": 257, "dtype": torch.float32, "ranks": (7, 9, 3, 33)},
}
CUTS = {"whole": (23,), "chunked": (5, 1, 9, 8), "token by token": (1,) * 23}


@dataclass
class Case:
    """A random model, a prompt, and the reference's results."""

    weights: Weights
    prompt: list[int]
    logits: Tensor
    """[T, V]"""
    wkv: Tensor
    """[L, H, 64, 64]"""
    shifts: Tensor
    """[L, 2, C]"""


def oracle(path: Path) -> Any:
    """The reference model. At import it reads settings from the environment; it prints while it loads."""
    os.environ |= {"RWKV_V7_ON": "1", "RWKV_JIT_ON": "1", "RWKV_CUDA_ON": "0"}
    module = pytest.importorskip("rwkv.model")
    with contextlib.redirect_stdout(io.StringIO()):
        return module.RWKV(model=str(path.with_suffix("")), strategy="cpu fp32")


@pytest.fixture(scope="module", params=SHAPES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    tensors = random_weights(seed=7, **SHAPES[request.param])
    path = tmp_path_factory.mktemp("oracle") / "model.pth"
    torch.save(tensors, path)
    weights = weights_from(tensors)
    g = torch.Generator().manual_seed(1)
    prompt = torch.randint(1, weights.shape.vocab, (23,), generator=g).tolist()
    with torch.inference_mode():
        logits, state = oracle(path).forward(prompt, None, full_output=True)
    shifts = torch.stack([torch.stack((state[i], state[i + 2])) for i in range(0, len(state), 3)])
    return Case(weights, prompt, logits.float(), torch.stack(state[1::3]), shifts)


def pipeline(weights: Weights, kernels: str, dtype: str = "fp32", stages: int = 1) -> Pipeline:
    made = Pipeline(weights, devices=("cpu",) * stages, kernels=kernels, dtype=dtype)
    made.allocate_slots(SLOTS)
    return made


def feed(model: Pipeline, prompt: list[int], cuts: tuple[int, ...], slot: int = 2) -> Tensor:
    """Return logits [pieces, V] after each piece of a prompt. The prompt starts from the zero state."""
    rows, at = [], 0
    for n, length in enumerate(cuts):
        rows.append(model.forward(step_inputs([prompt[at : at + length]], [slot if n else 0], [slot], [0])))
        at += length
    return torch.cat(rows)


def states(model: Pipeline, slot: int) -> tuple[Tensor, Tensor]:
    """Return a slot's WKV and shift states over all stages. They are [L, H, 64, 64] and [L, 2, C]."""
    arenas = [stage.state for stage in model.stages if stage.state is not None]
    return torch.cat([a.wkv[slot] for a in arenas]), torch.cat([a.shift[slot] for a in arenas])


def assert_same_bits_in_a_batch(
    model: Pipeline, weights: Weights, states: Callable[[Pipeline, int], Iterable[Tensor]] = states
) -> None:
    """A prompt has the same logits and state in any pieces. Also among 200 other rows. The prompt has 40 tokens."""
    model.allocate_slots(220)
    prompt, *others = random_rows(weights, [40] + [1] * 150 + [3] * 49 + [61], seed=5)
    alone = feed(model, prompt, (40,))
    for cuts in ((1,) * 40, (16, 17, 7), (39, 1)):
        assert torch.equal(feed(model, prompt, cuts, slot=3)[-1], alone[0])
        assert all(torch.equal(a, b) for a, b in zip(states(model, 2), states(model, 3), strict=True))
    rows = [*others[:100], prompt[:33], *others[100:]]
    slots = list(range(4, 4 + len(rows)))
    model.forward(step_inputs(rows, [0] * len(rows), slots, []))
    rows = [row[:1] for row in rows]
    rows[100] = prompt[33:]
    batch = model.forward(step_inputs(rows, slots, slots, list(range(len(rows)))))
    assert torch.equal(batch[100], alone[0])


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
def test_logits_and_state_equal_the_reference(case: Case, kernels: str, cuts: tuple[int, ...]) -> None:
    model = pipeline(case.weights, kernels)
    logits = feed(model, case.prompt, cuts)
    ends = torch.tensor(cuts).cumsum(0) - 1
    assert (logits - case.logits[ends]).abs().max() < 1e-4
    wkv, shifts = states(model, 2)
    assert (wkv - case.wkv).abs().max() < 1e-4
    assert (shifts - case.shifts).abs().max() < 1e-4


@pytest.mark.parametrize("kernels", KERNELS)
def test_bf16_is_close(case: Case, kernels: str) -> None:
    logits = feed(pipeline(case.weights, kernels, "bf16"), case.prompt, CUTS["chunked"])
    expected = case.logits[torch.tensor(CUTS["chunked"]).cumsum(0) - 1]
    assert (logits - expected).abs().mean() < 0.02 * expected.abs().mean() + 0.01
    assert torch.nn.functional.cosine_similarity(logits, expected).min() > 0.999


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("stages", [2, 3])
def test_several_stages_equal_one(case: Case, kernels: str, stages: int) -> None:
    if case.weights.shape.layers < stages:
        pytest.skip("fewer layers than stages")
    one, several = pipeline(case.weights, kernels), pipeline(case.weights, kernels, stages=stages)
    assert len(several.stages) == stages and several.slot_bytes == one.slot_bytes
    assert torch.equal(feed(one, case.prompt, CUTS["chunked"]), feed(several, case.prompt, CUTS["chunked"]))
    assert all(torch.equal(a, b) for a, b in zip(states(one, 2), states(several, 2), strict=True))


def random_rows(weights: Weights, lengths: list[int], seed: int) -> list[list[int]]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(1, weights.shape.vocab, (n,), generator=g).tolist() for n in lengths]


@pytest.mark.parametrize("kernels", KERNELS)
def test_rows_of_a_ragged_batch_are_isolated(case: Case, kernels: str) -> None:
    model = pipeline(case.weights, kernels)
    rows = random_rows(case.weights, [1, 7, 1, 19], seed=2)
    feed(model, case.prompt, (23,), slot=5)
    before = [t.clone() for t in states(model, 5)]
    together = model.forward(step_inputs(rows, [0, 5, 5, 0], [2, 3, 4, 6], [0, 1, 2, 3]))
    assert all(torch.equal(a, b) for a, b in zip(states(model, 5), before, strict=True)), "a slot only read is kept"
    assert all(not t.any() for t in states(model, 0)), "the zero slot stays zero"
    tolerance = 1e-4 if kernels == "naive" else 0
    for i, (read, write) in enumerate(((0, 2), (5, 3), (5, 4), (0, 6))):
        alone = model.forward(step_inputs([rows[i]], [read], [8], [0]))
        assert (alone[0] - together[i]).abs().max() <= tolerance
        assert all(
            (a - b).abs().max() <= tolerance for a, b in zip(states(model, 8), states(model, write), strict=True)
        )


@needs_compiler
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("file_dtype", [torch.bfloat16, torch.float32])
def test_same_bits_alone_and_among_200_others(dtype: str, file_dtype: torch.dtype) -> None:
    """Same request and seed give the same text: neither batch nor chunking changes a bit."""
    weights = weights_from(random_weights(3, 128, 300, seed=4, ranks=(20, 24, 12, 40), dtype=file_dtype))
    model = Pipeline(weights, devices=("cpu",), kernels="cpu", dtype=dtype)
    assert_same_bits_in_a_batch(model, weights)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_step_without_logits(case: Case, kernels: str) -> None:
    assert pipeline(case.weights, kernels).forward(step_inputs([[1, 2]], [0], [2], [])).shape == (
        0,
        case.weights.shape.vocab,
    )


@pytest.mark.parametrize("kernels", KERNELS)
def test_fp16_states_are_close(case: Case, kernels: str) -> None:
    model = Pipeline(case.weights, devices=("cpu",), kernels=kernels, dtype="fp32", wkv_state="fp16")
    model.allocate_slots(SLOTS)
    logits = feed(model, case.prompt, CUTS["chunked"])
    assert (logits[-1] - case.logits[-1]).abs().max() < 0.05
