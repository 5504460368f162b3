"""Input projections of a time mix in one launch on Hopper; the kernel runs thread by thread on the CPU."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from rwkv_batch.kernels.activation import Activation
from rwkv_batch.kernels.cuda import fused_input_projections, hopper_gemm
from rwkv_batch.kernels.cuda.fused_input_projections import launch_fused_projections
from rwkv_batch.kernels.cuda.hopper_gemm import Fp16Gemm, HopperWorkspace
from test.model.emulated.library import emulation_of, error, needs_headers, send_launches_to

pytestmark = [pytest.mark.slow, needs_headers]
ROWS = 21


library = emulation_of("gemm_input_projections", (80,), (1,))
"""The kernel compiled for the CPU. It has tiles of 80 rows and no split-K."""


@pytest.fixture(autouse=True)
def on_cpu(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> HopperWorkspace:
    """Launches go to the emulation. It runs one CTA after the other, so a CTA must wait for earlier ones only."""
    work = send_launches_to(lambda name: library, monkeypatch, hopper_gemm, fused_input_projections)
    monkeypatch.setattr(fused_input_projections, "FP16_SPLITS", 1)
    return work


def poisoned(n: int) -> Tensor:
    return torch.full((ROWS, n), torch.nan, dtype=torch.float16)


def weight(n: int, k: int) -> Tensor:
    return (torch.randn(n, k) / k**0.5).half()


def product(x: Tensor, w: Tensor) -> Tensor:
    return x.float() @ w.float().T


@pytest.mark.parametrize("num_sms", [1, 5])
def test_input_projections(num_sms: int, library: ctypes.CDLL, on_cpu: HopperWorkspace) -> None:
    """Two full-rank products and two low-rank pairs.

    The second products of the pairs read the outputs of the first.
    With one SM, one CTA computes all. With five, another CTA computes the second products and waits for the first.
    """
    library.emulation_set(num_sms, 227 << 10)
    none = Activation.NONE
    full_rank: list[Fp16Gemm] = [(weight(n, 256), torch.randn(ROWS, 256).half(), poisoned(n), none) for n in (272, 128)]
    low_rank_down: list[Fp16Gemm] = [
        (weight(64, 256), torch.randn(ROWS, 256).half(), poisoned(64), Activation.TANH),
        (weight(128, 192), torch.randn(ROWS, 192).half(), poisoned(128), none),
    ]
    low_rank_up: list[Fp16Gemm] = [
        (weight(n, m[2].shape[1]), m[2], poisoned(n), none) for n, m in zip((160, 272), low_rank_down, strict=True)
    ]
    for _ in range(2):  # the first launch must reset its counters
        for _, _, y, _ in (*full_rank, *low_rank_down, *low_rank_up):
            y.fill_(torch.nan)
        launch_fused_projections(full_rank, low_rank_down, low_rank_up)
        assert not on_cpu.counters.any()
        for w, x, y, activation in (*full_rank, *low_rank_down, *low_rank_up):
            reference = product(x, w)
            assert error(y, reference.tanh() if activation is Activation.TANH else reference) < 1e-3
