"""Hopper's GEMMs of two-byte rows with int8 weights.

Fp16 GEMMs run in the same launch. The CPU runs the kernels thread by thread.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from bench.tools import cuda_check
from rwkv_batch.kernels.activation import Activation
from rwkv_batch.kernels.cuda import hopper_gemm, hopper_gemm_int8, hopper_quantised_launch
from rwkv_batch.kernels.cuda.hopper_gemm_int8 import Int8Gemm, launch_hopper_int8, pitch_of
from rwkv_batch.kernels.cuda.packed_weights import pack
from rwkv_batch.model.quant.formats import Format, dequantise, quantise
from test.model.emulated.library import emulation_of, send_launches_to
from test.model.row_bytes import assert_items_fit, bytes_of, meaning

pytestmark = pytest.mark.skipif(cuda_check.unavailable_reason() is not None, reason="no CUDA headers")


library = emulation_of("gemm_int8", splits=(1, 4))
"""The kernels, for the CPU."""


of_transposed = emulation_of("gemm_int8_transposed", splits=(1, 4))
"""Those of weights [k, n]."""


@pytest.fixture(autouse=True)
def on_cpu(library: ctypes.CDLL, of_transposed: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches go to the emulation, which runs one block at a time: none may wait for another."""

    def library_of(name: str) -> ctypes.CDLL:
        return of_transposed if name.endswith("transposed") else library

    send_launches_to(library_of, monkeypatch, hopper_gemm, hopper_gemm_int8)
    monkeypatch.setattr(hopper_quantised_launch, "is_mps_active", lambda: True)
    monkeypatch.setattr(hopper_quantised_launch, "FP16_SPLITS", 1)
    monkeypatch.setattr(hopper_quantised_launch, "fits_fp16_gemms", lambda *args: True)
    for each in (library, of_transposed):
        each.emulation_set(1, 227 << 10)


def error(y: Tensor, reference: Tensor) -> float:
    return float((y.float() - reference).norm() / reference.norm())


def int8_map(
    x: tuple[Tensor, Tensor], n: int, in_bytes: bool, activation: Activation = Activation.NONE
) -> tuple[Int8Gemm, Tensor]:
    """Return a random map over rows in bytes, and its dequantised matrix.

    The matrix is [n, k]. The results of the map are poisoned.
    """
    rows, _, k = x[0].shape
    stored = quantise(torch.randn(n, k) * 10.0 ** torch.randint(-1, 1, (n, 1)) / k**0.5, Format.INT8)
    packed = pack(stored)
    y: Tensor = torch.full((rows, n), torch.nan, dtype=torch.float16)
    scales = None
    if in_bytes:
        y, scales = torch.full((rows, 2, n), 77, dtype=torch.int8), torch.full((n // 128, pitch_of(rows), 2), torch.nan)
    return Int8Gemm(packed.qweight, packed.scales, *x, y, scales, activation), dequantise(stored)


def transposed(m: Int8Gemm) -> Int8Gemm:
    """Return the same map with quantised weights [k, n]. Its results have memory of their own, which is poisoned."""
    return m._replace(weight=m.weight.T.contiguous(), y=torch.full_like(m.y, torch.nan), transposed=True)


@pytest.mark.parametrize(("rows", "group"), [(5, 64), (32, 128), (41, 64)])
def test_rows_in_bytes(rows: int, group: int) -> None:
    """With fp16 GEMMs in the launch, also dependent ones; output in fp16 and in two bytes."""
    maps, expected = [], []
    for n, k, activation in ((272, 256, Activation.NONE), (256, 128, Activation.RELU_SQUARED)):
        given = bytes_of(torch.randn(rows, k).half() * 10.0 ** torch.randint(-2, 2, (rows, k)).half(), group)
        made, w = int8_map(given, n, activation is Activation.RELU_SQUARED, activation)
        maps.append(made)
        reference = meaning(*given) @ w.T
        expected.append(reference.relu().square() if activation is Activation.RELU_SQUARED else reference)
    launch_hopper_int8(maps)
    alone = [m.y.clone() for m in maps]
    weight, x = torch.randn(64, 192).half() / 8, torch.randn(rows, 192).half()
    y, weight_late = torch.full((rows, 64), torch.nan, dtype=torch.float16), torch.randn(160, 64).half() / 8
    y_late = torch.full((rows, 160), torch.nan, dtype=torch.float16)
    launch_hopper_int8(maps, [(weight, x, y, Activation.TANH)], [(weight_late, y, y_late, Activation.NONE)])
    assert all(torch.equal(m.y, one) for m, one in zip(maps, alone, strict=True) if m.y_scales is None)
    assert error(maps[0].y, expected[0]) < 3e-4
    assert maps[1].y_scales is not None
    assert error(meaning(maps[1].y, maps[1].y_scales), expected[1].half().float()) < 3e-4
    assert_items_fit(maps[1].y, maps[1].y_scales)
    assert error(y, (x.float() @ weight.float().T).tanh()) < 1e-3
    assert error(y_late, y.float() @ weight_late.float().T) < 1e-3


@pytest.mark.parametrize("rows", [9, 25, 41])
def test_codes_as_inputs_lie(rows: int) -> None:
    """To the bit what codes [n, k] give. The map's last tile is narrower; what is no number stays so."""
    halves = torch.randn(rows, 384).half() * 10.0 ** torch.randint(-2, 2, (rows, 384)).half()
    halves[3, 200] = torch.nan
    made, _ = int8_map(bytes_of(halves), 272, False)
    other = transposed(made)
    launch_hopper_int8([made])
    launch_hopper_int8([other])
    assert torch.equal(other.y.view(torch.int16), made.y.view(torch.int16))
    assert made.y.isfinite().all(1).tolist() == [row != 3 for row in range(rows)]


def test_a_row_is_the_same_whatever_the_others_hold() -> None:
    rows = 9
    halves = torch.randn(rows, 256).half()
    made, _ = int8_map(bytes_of(halves), 128, True)
    launch_hopper_int8([made])
    halves[1:] = 60000
    x = bytes_of(halves)
    x[1][:, 4:] = torch.nan
    assert made.y_scales is not None
    y, scales = torch.empty_like(made.y), torch.empty_like(made.y_scales)
    launch_hopper_int8([made._replace(x=x[0], x_scales=x[1], y=y, y_scales=scales)])
    assert torch.equal(y[0], made.y[0])
    assert torch.equal(scales[:, 0], made.y_scales[:, 0])


@pytest.mark.parametrize("activation", [Activation.NONE, Activation.RELU_SQUARED])
def test_what_is_not_finite_stays_so(activation: Activation) -> None:
    halves = torch.randn(6, 128).half()
    halves[2, 5], halves[4, 70] = torch.inf, torch.nan
    made, _ = int8_map(bytes_of(halves), 64, False, activation)
    launch_hopper_int8([made])
    assert made.y.isfinite().all(1).tolist() == [True, True, False, True, False, True]
    assert not made.y[[2, 4]].isfinite().any()


def test_shapes_that_do_not_fit_are_refused() -> None:
    made, _ = int8_map(bytes_of(torch.randn(9, 128).half()), 96, False)
    other, _ = int8_map(bytes_of(torch.randn(9, 128).half(), 64), 96, False)
    with pytest.raises(ValueError, match="do not fit"):
        launch_hopper_int8([made, other])
    with pytest.raises(ValueError, match="do not fit"):
        launch_hopper_int8([made._replace(y_scales=torch.empty(1, 10, 2), y=torch.empty(9, 2, 96, dtype=torch.int8))])
    with pytest.raises(ValueError, match="do not fit"):
        launch_hopper_int8([made._replace(x_scales=made.x_scales[:, :9])])
    for refused in (other, made._replace(y_scales=torch.empty(1, 10, 2), y=torch.empty(9, 2, 96, dtype=torch.int8))):
        with pytest.raises(ValueError, match="do not fit"):
            launch_hopper_int8([refused._replace(weight=refused.weight.T.contiguous(), transposed=True)])
    with pytest.raises(ValueError, match="do not fit"):
        launch_hopper_int8([transposed(made), transposed(made)])
    with pytest.raises(ValueError, match="64 rows, not 1 of 65"):
        launch_hopper_int8([int8_map(bytes_of(torch.randn(65, 128).half()), 32, False)[0]])
    shares = made._replace(y=torch.empty(1, 9, 96))
    half = torch.empty(16, 128).half(), torch.empty(9, 128).half(), torch.empty(9, 16).half(), Activation.NONE
    for maps, halves, late in (([shares, made], [], []), ([shares], [half], []), ([shares], [], [half])):
        with pytest.raises(ValueError, match="partials takes one GEMM, not 2"):
            launch_hopper_int8(maps, halves, late)


@pytest.mark.parametrize("rows", [7, 20, 40])
def test_shares(library: ctypes.CDLL, of_transposed: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """What blocks that share k come to; none waits for another. The map's last tile is narrower. Of both orders."""
    for each in (library, of_transposed):
        each.emulation_set(8, 227 << 10)
    monkeypatch.setattr(hopper_quantised_launch, "is_mps_active", lambda: False)
    made, w = int8_map(bytes_of(torch.randn(rows, 1024).half()), 144, False)
    shares = torch.full((4, rows, 144), torch.nan)
    launch_hopper_int8([made._replace(y=shares)])
    assert error(shares.sum(0), meaning(made.x, made.x_scales) @ w.T) < 1e-5
    in_turn = torch.full_like(shares, torch.nan)
    launch_hopper_int8([transposed(made)._replace(y=in_turn)])
    assert torch.equal(in_turn, shares)
    k = 256 * torch.arange(5)
    first = meaning(made.x, made.x_scales)[:, k[1] : k[2]] @ w[:, k[1] : k[2]].T
    assert error(shares[1], first) < 1e-5
