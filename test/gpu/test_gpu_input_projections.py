"""Input projections of a time mix in one launch on a GPU. They equal separate launches to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rwkv_batch.kernels.activation import Activation
from rwkv_batch.kernels.cuda.fused_input_projections import MIN_ROWS, fits_fused_projections, launch_fused_projections
from rwkv_batch.kernels.cuda.hopper_gemm import (
    TILE_ROWS,
    Fp16Gemm,
    has_hopper_gemm,
    launch_hopper_gemm,
    prepare_hopper_gemm,
)

GPU = torch.device("cuda", 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not has_hopper_gemm(GPU), reason="needs a GPU of sm_90"),
]
ROWS = (65, 80, 96, 105, 128, 160, 180, 200, 240, 256)
NONE = Activation.NONE
INPUT_PROJECTIONS = [((2944,) * 3, (128, 128, 128, 512), 512), ((4096,) * 3, (128, 128, 128, 512), 4096)]
"""Outputs of r, k, v and of the low ranks; inputs."""


def normal(*size: int) -> Tensor:
    return torch.randn(*size, device=GPU, dtype=torch.float16)


def weight(n: int, k: int) -> Tensor:
    return normal(n, k) / k**0.5


def poisoned(rows: int, n: int) -> Tensor:
    """Return outputs with extra rows after the written ones."""
    return torch.full((rows + 4, n), torch.nan, device=GPU, dtype=torch.float16)


def assert_near(y: Tensor, reference: Tensor) -> None:
    assert torch.isfinite(y).all()
    assert (y.float() - reference).norm() < 1e-3 * reference.norm() + 1e-6


def assert_nothing_is_left() -> None:
    assert not prepare_hopper_gemm(GPU).counters.any()


@pytest.mark.parametrize(("outputs", "ranks", "width"), INPUT_PROJECTIONS)
@pytest.mark.parametrize("rows", ROWS)
def test_one_launch_equals_separate_launches(
    rows: int, outputs: tuple[int, ...], ranks: tuple[int, ...], width: int
) -> None:
    """Many runs; each clears the previous results."""
    acts = [NONE, Activation.TANH, NONE, Activation.SIGMOID]
    weights = (
        [weight(n, width) for n in outputs],
        [weight(n, width) for n in ranks],
        [weight(outputs[0], n) for n in ranks],
    )
    assert fits_fused_projections(rows, *weights)
    ys = [[poisoned(rows, len(w)) for w in part] for part in weights]
    low = [y[:rows] for y in ys[1]]
    for turn in range(6):
        x = [normal(rows, width) for _ in range(7)]
        whole: list[Fp16Gemm] = [(w, x[i], ys[0][i][:rows], NONE) for i, w in enumerate(weights[0])]
        shared: list[Fp16Gemm] = [(w, x[3 + i], low[i], acts[i]) for i, w in enumerate(weights[1])]
        late: list[Fp16Gemm] = [(w, low[i], ys[2][i][:rows], NONE) for i, w in enumerate(weights[2])]
        for y in (y for part in ys for y in part):
            y.fill_(torch.nan)
        if turn % 2:
            torch.cuda.synchronize()
        launch_fused_projections(whole, shared, late)
        found = [m[2].clone() for m in (*whole, *shared, *late)]
        for maps in (whole, shared, late):
            launch_hopper_gemm(maps, transposed=False)
        assert all(torch.equal(one, m[2]) for one, m in zip(found, (*whole, *shared, *late), strict=True))
    assert_near(found[0], x[0].float() @ weights[0][0].float().T)
    assert_near(found[4], torch.tanh(x[4].float() @ weights[1][1].float().T))
    assert_near(found[-1], found[6].float() @ weights[2][3].float().T)
    assert all(torch.isnan(y[rows:]).all() for part in ys for y in part)
    assert_nothing_is_left()


def test_a_row_is_the_same_in_every_tile() -> None:
    """To the bit, with any number of other rows."""
    x, weights = normal(7, TILE_ROWS[-1], 512), [weight(n, 512) for n in (*(2944,) * 3, *(128,) * 3, 512)]
    up_weights = [weight(2944, n) for n in (128, 128, 128, 512)]
    found = []
    for rows in (size for size in TILE_ROWS if size >= MIN_ROWS):
        ys = [poisoned(rows, len(w))[:rows] for w in (*weights, *up_weights)]
        maps: list[Fp16Gemm] = [(w, one[:rows], y, NONE) for w, one, y in zip(weights, x, ys, strict=False)]
        late: list[Fp16Gemm] = [(w, one, y, NONE) for w, one, y in zip(up_weights, ys[3:7], ys[7:], strict=True)]
        launch_fused_projections(maps[:3], maps[3:], late)
        found.append([y[:MIN_ROWS] for y in ys])
    assert all(torch.equal(y, first) for ys in found for y, first in zip(ys, found[0], strict=True))
