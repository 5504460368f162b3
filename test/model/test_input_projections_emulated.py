"""Input projections of a time mix in one launch on Hopper; the kernel runs thread by thread on the CPU."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from bench.tools import cuda_check
from rwkv_batch.kernels.activation import Activation
from rwkv_batch.kernels.cuda import fused_input_projections
from rwkv_batch.kernels.cuda import hopper_gemm as cuda_wide
from rwkv_batch.kernels.cuda.fused_input_projections import launch_fused_projections
from rwkv_batch.kernels.cuda.hopper_gemm import Fp16Gemm, HopperWorkspace
from test.model.emulated.library import call, emulated

pytestmark = pytest.mark.skipif(cuda_check.unavailable_reason() is not None, reason="no CUDA headers")
ROWS = 21


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernel, for the CPU."""
    return emulated("gemm_input_projections", tmp_path_factory.mktemp("emulated"), (80,), (1,))


@pytest.fixture(autouse=True)
def on_cpu(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> HopperWorkspace:
    """Launches go to the emulation, one block after the other: only earlier ones may be waited for."""

    class Kernels:
        """As library.Kernels."""

        def call(self, name: str, *args: object) -> None:
            """Run a launcher."""
            call(library, name, *args)

    work = HopperWorkspace(torch.empty(132, 1), torch.zeros(132, 2, dtype=torch.int32))
    monkeypatch.setattr(cuda_wide, "hopper_library", Kernels)
    monkeypatch.setattr(cuda_wide, "cuda_pointer", lambda tensor, dtype=None: tensor.data_ptr())
    monkeypatch.setattr(fused_input_projections, "prepare_hopper_gemm", lambda device: work)
    monkeypatch.setattr(fused_input_projections, "FP16_SPLITS", 1)
    return work


def poisoned(n: int) -> Tensor:
    return torch.full((ROWS, n), torch.nan, dtype=torch.float16)


def weight(n: int, k: int) -> Tensor:
    return (torch.randn(n, k) / k**0.5).half()


def error(y: Tensor, true: Tensor) -> float:
    return ((y.float() - true).norm() / true.norm()).item()


def times(x: Tensor, w: Tensor) -> Tensor:
    return x.float() @ w.float().T


@pytest.mark.parametrize("processors", [1, 5])
def test_input_projections(processors: int, library: ctypes.CDLL, on_cpu: HopperWorkspace) -> None:
    """r, k; two low ranks, and their exits from what those give: all by one block, or the exits by the fifth."""
    library.emulation_set(processors, 227 << 10)
    none = Activation.NONE
    whole: list[Fp16Gemm] = [(weight(n, 256), torch.randn(ROWS, 256).half(), poisoned(n), none) for n in (272, 128)]
    shared: list[Fp16Gemm] = [
        (weight(64, 256), torch.randn(ROWS, 256).half(), poisoned(64), Activation.TANH),
        (weight(128, 192), torch.randn(ROWS, 192).half(), poisoned(128), none),
    ]
    late: list[Fp16Gemm] = [
        (weight(n, m[2].shape[1]), m[2], poisoned(n), none) for n, m in zip((160, 272), shared, strict=True)
    ]
    for _ in range(2):  # counters are as they were
        for _, _, y, _ in (*whole, *shared, *late):
            y.fill_(torch.nan)
        launch_fused_projections(whole, shared, late)
        assert not on_cpu.counters.any()
        for w, x, y, activation in (*whole, *shared, *late):
            true = times(x, w)
            assert error(y, true.tanh() if activation is Activation.TANH else true) < 1e-3
