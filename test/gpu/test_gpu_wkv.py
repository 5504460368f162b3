"""WKV of whole rows on a GPU against plain torch in fp32: usual and extreme inputs, the same bits in any batch."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rwkv_batch.kernels.naive import NaiveOps
from rwkv_batch.model.layer import Projections
from rwkv_batch.model.step_inputs import CONTINUES, StepInputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

GPU = torch.device("cuda", 0)
WIDTH = 512
CHUNK = 16
"""Tokens per chunk of the kernel."""
MANY_ROWS = 40
"""Rows of WIDTH that need more CTAs than any GPU has SMs."""


def make_layer(**change: float | Tensor) -> Any:
    """Return the constants of a time mix as both backends read them; a number fills [WIDTH]."""
    generator = torch.Generator(GPU).manual_seed(0)

    def normal(mean: float, deviation: float) -> Tensor:
        return mean + deviation * torch.randn(WIDTH, device=GPU, generator=generator)

    parts: dict[str, Any] = {"w0": normal(-2, 1), "a0": normal(0, 1), "k_k": normal(0.85, 0.1), "k_a": normal(1, 0.1)}
    parts |= {name: torch.zeros(WIDTH, device=GPU) + value for name, value in change.items()}
    ln_x = SimpleNamespace(weight=normal(1, 0.1), bias=normal(0, 0.1))
    r_k = normal(0, 0.1).view(WIDTH // 64, 64)
    return SimpleNamespace(**parts, r_k=r_k, ln_x=ln_x, v_residual=SimpleNamespace(v0=normal(0, 1)), output=None)


def make_parts(tokens: int, seed: int = 1) -> tuple[Projections, Tensor]:
    """Return the outputs of the projections, and v of the first layer: [tokens, WIDTH] fp16."""
    generator = torch.Generator(GPU).manual_seed(seed)
    parts = [torch.randn(tokens, WIDTH, device=GPU, generator=generator).half() for _ in range(8)]
    return Projections(*parts[:7]), parts[7]


def make_inputs(lengths: list[int], read_slots: list[int], write_slots: list[int]) -> StepInputs:
    ends = torch.tensor([0, *lengths], device=GPU).cumsum(0)
    reads, writes = torch.tensor(read_slots, device=GPU), torch.tensor(write_slots, device=GPU)
    return StepInputs(ends[:0], ends, reads, writes, ends[1:] - 1, max(lengths))


def run(layer: Any, parts: Projections, first: Tensor | None, wkv: Tensor, inputs: StepInputs) -> Tensor:
    """Return y [T, WIDTH] of the kernel; updates wkv."""
    from rwkv_batch.kernels.cuda.ops import CudaOps

    return CudaOps().time_mix(layer, parts, first, wkv, inputs)[0]


def expected_output(layer: Any, parts: Projections, first: Tensor | None, wkv: Tensor, inputs: StepInputs) -> Tensor:
    """Return y [T, WIDTH] in fp32; updates the fp32 wkv."""
    names = ("r", "w", "k", "v", "a", "g", "v_gate")
    wide = Projections(*(getattr(parts, name).float() for name in names))
    if first is None:
        layer = SimpleNamespace(**{**vars(layer), "v_residual": None})
    return NaiveOps().time_mix(layer, wide, None if first is None else first.float(), wkv, inputs)[0]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def assert_right(
    layer: Any, parts: Projections, first: Tensor | None, state: Tensor, inputs: StepInputs, tolerance: float = 1e-3
) -> None:
    """Compare y and the written states with fp32. Other slots must not change."""
    wkv, expected = state.clone(), state.float()
    y, expected_y = run(layer, parts, first, wkv, inputs), expected_output(layer, parts, first, expected, inputs)
    written = inputs.write_slots
    assert torch.isfinite(y).all() and torch.isfinite(wkv).all()
    assert relative_error(y, expected_y) < tolerance
    assert relative_error(wkv[written], expected[written]) < tolerance
    others = torch.ones(len(wkv), dtype=torch.bool, device=GPU)
    others[written] = False
    assert torch.equal(wkv[others], state[others])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "lengths", [[2], [200], [300, 12], [1, 2, 15, 16, 17, 33, 300, 64], [5, 40] * MANY_ROWS, [150, 16, 300] * MANY_ROWS]
)
def test_ragged_rows(lengths: list[int], dtype: torch.dtype) -> None:
    """Every launch form: few rows, many, many short ones. They read slot 0, their own slot, or another one."""
    rows = len(lengths)
    state = 0.3 * torch.randn(2 * rows + 2, WIDTH // 64, 64, 64, device=GPU)
    state[0] = 0
    reads = [0 if i % 3 == 0 else i + 1 for i in range(rows)]
    writes = [i + 1 if i % 3 == 1 else rows + i + 1 for i in range(rows)]
    parts, first = make_parts(sum(lengths))
    assert_right(make_layer(), parts, first, state.to(dtype), make_inputs(lengths, reads, writes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("lengths", [[300, 12, 130, 17], [150, 3], [2, 5], [40, 5] * MANY_ROWS, [1, 4] * MANY_ROWS])
def test_rows_that_continue_others(lengths: list[int], dtype: torch.dtype) -> None:
    """Every launch form. Each second row continues the one before; both write their slots."""
    rows = len(lengths)
    state = 0.3 * torch.randn(2 * rows + 2, WIDTH // 64, 64, 64, device=GPU)
    reads = [CONTINUES if i % 2 else i + 1 for i in range(rows)]
    writes = [i + 1 if i % 4 == 0 else rows + i + 1 for i in range(rows)]
    parts, first = make_parts(sum(lengths))
    assert_right(make_layer(), parts, first, state.to(dtype), make_inputs(lengths, reads, writes))


def test_first_layer() -> None:
    parts, _ = make_parts(50)
    assert_right(make_layer(), parts, None, torch.zeros(2, 8, 64, 64, device=GPU), make_inputs([50], [0], [1]))


SIGNS = torch.tensor([1.0, -1.0, -1.0, 1.0]).repeat(WIDTH // 4)


@pytest.mark.parametrize("decay", [20.0, -20.0, SIGNS * 20], ids=["fastest", "slowest", "mixed"])
@pytest.mark.parametrize("rate", [20.0, -20.0, SIGNS.roll(1) * 20], ids=["a 1", "a 0", "a mixed"])
@pytest.mark.parametrize("keys", ["any", "large", "alike", "same", "none"])
def test_extremes(decay: float | Tensor, rate: float | Tensor, keys: str) -> None:
    """Extreme decays and in-context learning rates. The keys have any size and similarity."""
    layer = make_layer(
        w0=decay if isinstance(decay, float) else decay.to(GPU), a0=rate if isinstance(rate, float) else rate.to(GPU)
    )
    parts, first = make_parts(178)
    k = parts.k.float()
    k = {"any": k, "large": k * 60, "alike": k[:1] + 0.1 * k, "same": k[:1].expand_as(k), "none": k * 0}[keys]
    parts = replace(parts, k=k.half().contiguous())
    # 178 equal keys with a = 1 and no decay: the sum of 178 almost equal values is small next to each of them
    tolerance = 1e-2 if keys in ("same", "alike") else 1e-3
    state = torch.zeros(3, 8, 64, 64, device=GPU)
    if keys == "none":
        state[1:].normal_()  # so that there is something to compare
    assert_right(layer, parts, first, state, make_inputs([130, 48], [1, 2], [1, 2]), tolerance)


def test_state_of_any_size() -> None:
    for size in (1e-3, 300.0):
        parts, first = make_parts(100)
        state = size * torch.randn(2, 8, 64, 64, device=GPU)
        parts = replace(parts, v=(parts.v * min(size, 1)).contiguous())
        assert_right(make_layer(), parts, first * min(size, 1), state, make_inputs([100], [1], [1]))


def test_any_batch_same_bits() -> None:
    """A row alone and among others, for every launch form."""
    layer, length = make_layer(), 150
    own, own_first = make_parts(length, seed=7)
    results = []
    for lengths in ([length], [9, length], [length, 133, 170] * 12, [length, 33, 20] * 12, [20] * MANY_ROWS + [length]):
        rows = len(lengths)
        parts, first = make_parts(sum(lengths), seed=8)
        at = sum(lengths[: lengths.index(length)])
        for name in ("r", "w", "k", "v", "a", "g", "v_gate"):
            getattr(parts, name)[at : at + length] = getattr(own, name)
        first[at : at + length] = own_first
        wkv = torch.zeros(rows + 1, 8, 64, 64, device=GPU)
        y = run(layer, parts, first, wkv, make_inputs(lengths, [0] * rows, list(range(1, rows + 1))))
        results.append((y[at : at + length], wkv[1 + lengths.index(length)]))
    for y, state in results[1:]:
        assert torch.equal(y, results[0][0])
        assert torch.equal(state, results[0][1])


@pytest.mark.parametrize("cut", [CHUNK, 10 * CHUNK])
def test_cut_between_chunks_same_bits(cut: int) -> None:
    """With fp32 states, a prompt in two steps equals one step. The cut must be between the kernel's chunks."""
    layer, length = make_layer(), 300
    parts, first = make_parts(length)
    whole = torch.zeros(2, 8, 64, 64, device=GPU)
    y = run(layer, parts, first, whole, make_inputs([length], [0], [1]))
    wkv = torch.zeros_like(whole)
    names = ("r", "w", "k", "v", "a", "g", "v_gate")
    for piece, read in ((slice(0, cut), 0), (slice(cut, length), 1)):
        some = Projections(*(getattr(parts, name)[piece] for name in names))
        count = piece.stop - piece.start
        assert torch.equal(run(layer, some, first[piece], wkv, make_inputs([count], [read], [1])), y[piece])
    assert torch.equal(wkv, whole)
