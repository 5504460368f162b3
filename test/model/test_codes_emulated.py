"""Hopper's products of halves with weights of 8 and 4 bits. The CPU runs the kernels thread by thread."""

from __future__ import annotations

import ctypes

import pytest
import torch

from rwkv_batch.kernels.activation import Activation
from rwkv_batch.kernels.cuda import hopper_gemm, hopper_gemm_weight_only
from rwkv_batch.kernels.cuda.hopper_gemm_weight_only import fp16_gemm, launch_weight_only
from rwkv_batch.kernels.cuda.packed_weights import pack
from rwkv_batch.model.quant.formats import WEIGHT_ONLY, Format, dequantise, quantise
from test.model.emulated.library import emulated, error, needs_headers, send_launches_to

pytestmark = [pytest.mark.slow, needs_headers]


@pytest.fixture(scope="module", params=WEIGHT_ONLY)
def format_(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Format:
    found: Format = request.param
    LIBRARIES[found] = emulated(f"weight_only_{found}", tmp_path_factory.mktemp("emulated"), (32, 64), (1,))
    return found


LIBRARIES: dict[Format, ctypes.CDLL] = {}


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches go to the emulation, which runs one block at a time: none may wait for another."""

    def library_of(name: str) -> ctypes.CDLL:
        return LIBRARIES[Format(name.rpartition("_")[2])]

    send_launches_to(library_of, monkeypatch, hopper_gemm, hopper_gemm_weight_only)
    monkeypatch.setattr(hopper_gemm_weight_only, "is_mps_active", lambda: True)


@pytest.mark.parametrize("transposed", [False, True])
def test_products(format_: Format, transposed: bool) -> None:
    if format_ is Format.FP8 and transposed:
        pytest.skip("fp8 is multiplied as stored")
    LIBRARIES[format_].emulation_set(2, 227 << 10)
    for rows, shapes in ((19, ((352, 512), (64, 256))), (64, ((128, 256),))):
        maps, expected = [], []
        for i, (n, k) in enumerate(shapes):
            stored = quantise(torch.randn(n, k) / k**0.5, format_)
            packed = pack(stored, transposed)
            x = torch.randn(rows, k).half()
            y = torch.full((rows, n), torch.nan, dtype=torch.float32 if i else torch.float16)
            maps.append(packed.weight_only_gemm(x, y, Activation.NONE if i else Activation.RELU_SQUARED))
            reference = x.float() @ dequantise(stored).T
            expected.append(reference if i else reference.relu().square())
        weight, x, y = (
            torch.randn(96, 192).half() / 14,
            torch.randn(rows, 192).half(),
            torch.full((rows, 96), torch.nan),
        )
        maps.append(fp16_gemm(weight, x, y.half(), Activation.TANH))
        expected.append((x.float() @ weight.float().T).tanh())
        launch_weight_only(maps)
        for m, reference in zip(maps, expected, strict=True):
            assert error(m.y, reference) < 1e-3, (m.n, m.k, rows)
