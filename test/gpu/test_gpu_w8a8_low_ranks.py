"""W8A8 r, k, v and the low ranks in one launch on a GPU. They equal separate launches to the bit."""

from __future__ import annotations

import pytest
import torch

from rwkv_batch.kernels.activation import Activation
from rwkv_batch.kernels.cuda.hopper_gemm import GemmShape, has_hopper_gemm, launch_hopper_gemm
from rwkv_batch.kernels.cuda.w8a8.mixed_launch import fits_mixed_launch, launch_mixed
from rwkv_batch.kernels.cuda.w8a8.products import W8A8Gemm, multiply
from test.gpu.test_gpu_input_projections import assert_near, assert_nothing_is_left, normal, poisoned, weight
from test.gpu.test_gpu_w8a8 import random_codes, random_weights, same_bits, wanted

GPU = torch.device("cuda", 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not has_hopper_gemm(GPU), reason="needs a GPU of sm_90"),
]
ROWS = (1, 3, 8, 17, 32, 33, 64, 65, 128, 140, 160, 161, 250, 320)
RANKS = (128, 128, 128, 512)
ACTIVATIONS = (Activation.NONE, Activation.TANH, Activation.NONE, Activation.SIGMOID)


@pytest.mark.parametrize("width", [4096, 3072])
@pytest.mark.parametrize("is_pending", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_one_launch_equals_separate_launches(rows: int, is_pending: bool, width: int) -> None:
    """Many runs; each clears the previous results. is_pending: without the second low-rank products."""
    torch.manual_seed(rows)
    full = [GemmShape(width, width)] * 3
    assert fits_mixed_launch(rows, full, [GemmShape(n, width) for n in RANKS], GPU)
    pairs = [random_weights(width, width) for _ in range(3)]
    down, up = [weight(n, width) for n in RANKS], [weight(width, n) for n in RANKS]
    ys = [poisoned(rows, width) for _ in range(3)]
    lows, outs = [poisoned(rows, n) for n in RANKS], [poisoned(rows, width) for _ in RANKS]
    for turn in range(6):
        gemms = [
            W8A8Gemm(random_codes(rows, width, unsigned=False), weights, y[:rows])
            for (weights, _), y in zip(pairs, ys, strict=True)
        ]
        low = [
            (w, normal(rows, width), y[:rows], activation)
            for w, y, activation in zip(down, lows, ACTIVATIONS, strict=True)
        ]
        late = [(w, low[i][2], outs[i][:rows], Activation.NONE) for i, w in enumerate(up)]
        late = [] if is_pending else late
        for y in (*ys, *lows, *outs):
            y.fill_(torch.nan)
        if turn % 2:
            torch.cuda.synchronize()
        launch_mixed(gemms, low, late)
        found = [gemm.y.clone() for gemm in gemms] + [m[2].clone() for m in (*low, *late)]
        assert_nothing_is_left()
        for gemm, (_, codes), y in zip(gemms, pairs, ys, strict=True):
            assert same_bits(gemm.y, wanted(gemm.x, codes))
            assert y[rows:].isnan().all(), "rows past the end were written"
        multiply(gemms)
        for maps in (low, late):
            if maps:
                launch_hopper_gemm(maps, transposed=False)
        assert all(map(same_bits, found, [gemm.y for gemm in gemms] + [m[2] for m in (*low, *late)]))
        for w, x, y, activation in low:
            reference = x.float() @ w.float().T
            if activation is not Activation.NONE:
                reference = reference.tanh() if activation is Activation.TANH else reference.sigmoid()
            assert_near(y, reference)
