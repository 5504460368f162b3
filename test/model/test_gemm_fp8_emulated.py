"""Hopper's fp8 GEMMs, and fp16 ones in the same launch; the kernels run thread by thread on the CPU."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rwkv_batch.kernels.activation import Activation
from rwkv_batch.kernels.cuda import hopper_gemm, hopper_gemm_fp8, hopper_quantised_launch, packed_weights
from rwkv_batch.kernels.cuda.hopper_gemm_fp8 import Fp8Gemm, launch_hopper_fp8
from rwkv_batch.model.quant.formats import Format, quantise
from test.model.emulated.library import emulated, emulation_of, error, needs_headers, send_launches_to

pytestmark = [pytest.mark.slow, needs_headers]


library = emulation_of("gemm_fp8", (96, 160, 320), (1,))
"""The kernels, for the CPU."""


of_parts = emulation_of("gemm_two_part", splits=(1, 4))
"""Those of rows in two parts."""


of_transposed = emulation_of("gemm_fp8_transposed", (96, 320), (1,))
"""Those of weights [k, n]."""


@pytest.fixture(autouse=True)
def on_cpu(
    library: ctypes.CDLL, of_parts: ctypes.CDLL, of_transposed: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches go to the emulation, which runs one block at a time: none may wait for another."""

    def library_of(name: str) -> ctypes.CDLL:
        return of_parts if name.endswith("two_part") else of_transposed if name.endswith("transposed") else library

    send_launches_to(library_of, monkeypatch, hopper_gemm, hopper_gemm_fp8)
    for module in (hopper_quantised_launch, hopper_gemm_fp8):
        monkeypatch.setattr(module, "is_mps_active", lambda: True)
    for each in (library, of_parts, of_transposed):
        each.emulation_set(2, 227 << 10)


def codes(rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and scales of random rows, and what they mean."""
    found, scales = torch.randn(rows, columns).to(torch.float8_e4m3fn), torch.rand(rows) + 0.5
    return found, scales, found.float() * scales.unsqueeze(1)


def parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return halves [rows, k] as parts [rows, 2, k] and their meaning."""
    first = x.clamp(-57344, 57344).to(torch.float8_e5m2)
    second = ((x - first.half()) * 8).clamp(-57344, 57344).to(torch.float8_e5m2)
    found = torch.stack([first, second], dim=1)
    return found, meaning(found)


def transposed(weight: Tensor) -> Tensor:
    """Codes [n, k] as [k, n]."""
    return weight.view(torch.uint8).T.contiguous().view(weight.dtype)


def meaning(found: Tensor) -> Tensor:
    return found[:, 0].float() + found[:, 1].float() / 8


@pytest.mark.parametrize("rows", [70, 130])
def test_fp16_and_fp8_in_one_launch(rows: int, library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    library.emulation_set(1, 227 << 10)  # one SM: no CTA waits for another
    monkeypatch.setattr(hopper_quantised_launch, "FP16_SPLITS", 1)
    monkeypatch.setattr(hopper_quantised_launch, "fits_fp16_gemms", lambda *args: True)
    gemms, fp16_gemms, expected = [], [], []
    for n, k, activation in ((272, 256, Activation.NONE), (128, 128, Activation.RELU_SQUARED)):
        (weight, weight_scales, w), (x, x_scales, meant) = codes(n, k), codes(rows, k)
        y = torch.full((rows, n), torch.nan, dtype=torch.float16)
        gemms.append(Fp8Gemm(weight, weight_scales / 64, x, x_scales, y, activation))
        reference = meant @ w.T / 64
        expected.append(reference.relu().square() if activation is Activation.RELU_SQUARED else reference)
    for n, k, activation in ((64, 192, Activation.TANH), (192, 128, Activation.NONE)):
        weight, x = torch.randn(n, k).half() / 8, torch.randn(rows, k).half()
        y = torch.full((rows, n), torch.nan, dtype=torch.float16)
        fp16_gemms.append((weight, x, y, activation))
        reference = x.float() @ weight.float().T
        expected.append(reference.tanh() if activation is Activation.TANH else reference)
    dependent = []
    for n, (_, _, x, _) in ((160, fp16_gemms[0]), (48, fp16_gemms[1])):  # reads what the launch itself has written
        k = x.shape[1] // 64 * 64
        weight, y = torch.randn(n, k).half() / 8, torch.full((rows, n), torch.nan, dtype=torch.float16)
        dependent.append((weight, x, y, Activation.NONE))
    launch_hopper_fp8(gemms, fp16_gemms, dependent)
    launch_hopper_fp8(gemms, fp16_gemms, dependent)  # the first launch must reset its counters
    expected += [x.float() @ weight.float().T for weight, x, _, _ in dependent]
    actual = [m.y for m in gemms] + [y for _, _, y, _ in (*fp16_gemms, *dependent)]
    assert [error(y, reference) < 1e-3 for y, reference in zip(actual, expected, strict=True)] == [True] * 6


def test_codes_alone() -> None:
    (weight, weight_scales, w), (x, x_scales, meant) = codes(144, 256), codes(290, 256)
    y = torch.full((290, 144), torch.nan, dtype=torch.float16)
    launch_hopper_fp8([Fp8Gemm(weight, weight_scales / 64, x, x_scales, y, Activation.NONE)])
    assert error(y, meant @ w.T / 64) < 1e-3


@pytest.mark.parametrize("rows", [90, 290])
def test_codes_as_inputs_lie(rows: int) -> None:
    """To the bit what codes [n, k] give."""
    (weight, weight_scales, _), (x, x_scales, _) = codes(144, 256), codes(rows, 256)
    ys = torch.full((2, rows, 144), torch.nan, dtype=torch.float16)
    for needs_transposed, y in enumerate(ys):
        w = transposed(weight) if needs_transposed else weight
        launch_hopper_fp8([Fp8Gemm(w, weight_scales / 64, x, x_scales, y, Activation.NONE, bool(needs_transposed))])
    assert torch.equal(*ys) and ys.isfinite().all()


@pytest.mark.parametrize("rows", [9, 40])
def test_parts_as_inputs_lie(rows: int, of_parts: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit-identical to codes [n, k]: as fp16, in two parts, and as split-K partials."""
    (weight, weight_scales, _), (x, _) = codes(144, 256), parts(torch.randn(rows, 256).half())
    halves = torch.full((2, rows, 144), torch.nan, dtype=torch.float16)
    in_parts = torch.full((2, rows, 2, 144), torch.nan).to(torch.float8_e5m2)
    for of_orders in (halves, in_parts):
        for needs_transposed, y in enumerate(of_orders):
            w = transposed(weight) if needs_transposed else weight
            launch_hopper_fp8(
                [Fp8Gemm(w, weight_scales / 64, x, None, y, Activation.RELU_SQUARED, bool(needs_transposed))]
            )
    assert torch.equal(*halves) and halves.isfinite().all()
    assert torch.equal(*in_parts.view(torch.uint8))
    monkeypatch.setattr(hopper_quantised_launch, "is_mps_active", lambda: False)
    of_parts.emulation_set(8, 227 << 10)
    (weight, weight_scales, w), (x, meant) = codes(144, 1024), parts(torch.randn(rows, 1024).half())
    shares = torch.full((4, rows, 144), torch.nan)
    launch_hopper_fp8([Fp8Gemm(transposed(weight), weight_scales, x, None, shares, Activation.NONE, True)])
    for i, share in enumerate(shares):
        of_share = slice(256 * i, 256 * (i + 1))
        assert error(share, meant[:, of_share] @ w[:, of_share].T) < 1e-5


def test_matrices_of_a_size_are_turned_in_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """[k, n] -> [n, k]; the last tile of outputs may be narrower."""
    kernels = emulated("transpose_weights", tmp_path)

    send_launches_to(lambda name: kernels, monkeypatch, packed_weights)
    for n in (256, 160):
        matrices = [quantise(torch.randn(n, 256), Format.FP8) for _ in range(2)]
        place = packed_weights.transposed_buffer(matrices[0].codes)
        for stored in matrices:
            found = packed_weights.pack(stored, transposed=True).output_major()
            assert torch.equal(found.view(torch.uint8), stored.codes.view(torch.uint8))
            assert found.data_ptr() == place.data_ptr()


@pytest.mark.parametrize("rows", [90, 290])
def test_codes_to_floats(rows: int) -> None:
    """Of a map whose last tile is narrower; nothing is rounded to fp16."""
    (weight, weight_scales, w), (x, x_scales, meant) = codes(144, 256), codes(rows, 256)
    y = torch.full((rows, 144), torch.nan)
    launch_hopper_fp8([Fp8Gemm(weight, weight_scales * 1e4, x, x_scales, y, Activation.NONE)])
    assert error(y, meant @ w.T * 1e4) < 1e-5


def test_more_rows_than_a_tile_are_not_made_floats() -> None:
    (weight, weight_scales, _), (x, x_scales, _) = codes(144, 256), codes(321, 256)
    with pytest.raises(ValueError, match="12 GEMMs of 320 rows, not 1 of 321"):
        launch_hopper_fp8([Fp8Gemm(weight, weight_scales, x, x_scales, torch.empty(321, 144), Activation.NONE)])


@pytest.mark.parametrize("rows", [9, 20, 40])
def test_rows_in_parts(rows: int, of_parts: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fp16 GEMMs in the launch, also dependent ones; output in fp16 and in two parts."""
    of_parts.emulation_set(1, 227 << 10)
    monkeypatch.setattr(hopper_quantised_launch, "FP16_SPLITS", 1)
    monkeypatch.setattr(hopper_quantised_launch, "fits_fp16_gemms", lambda *args: True)
    maps, expected = [], []
    for n, k, activation in ((272, 256, Activation.NONE), (128, 128, Activation.RELU_SQUARED)):
        (weight, weight_scales, w), (x, meant) = codes(n, k), parts(torch.randn(rows, k).half() * 30)
        y = torch.full((rows, n), torch.nan, dtype=torch.float16)
        if activation is Activation.RELU_SQUARED:
            y = torch.full((rows, 2, n), torch.nan).to(torch.float8_e5m2)
        maps.append(Fp8Gemm(weight, weight_scales / 512, x, None, y, activation))
        reference = meant @ w.T / 512
        expected.append(reference.relu().square() if activation is Activation.RELU_SQUARED else reference)
    launch_hopper_fp8(maps)
    alone = [m.y.clone() for m in maps]
    weight, x = torch.randn(64, 192).half() / 8, torch.randn(rows, 192).half()
    y, weight_late = torch.full((rows, 64), torch.nan, dtype=torch.float16), torch.randn(160, 64).half() / 8
    y_late = torch.full((rows, 160), torch.nan, dtype=torch.float16)
    launch_hopper_fp8(maps, [(weight, x, y, Activation.TANH)], [(weight_late, y, y_late, Activation.NONE)])
    assert all(torch.equal(m.y.view(torch.uint8), one.view(torch.uint8)) for m, one in zip(maps, alone, strict=True))
    assert error(maps[0].y, expected[0]) < 1e-3
    halves = expected[1].half()
    assert torch.equal(meaning(parts(halves)[0]), parts(halves)[1])
    assert error(meaning(maps[1].y), halves.float()) < 4e-3
    assert ((meaning(maps[1].y) - expected[1]).abs() <= expected[1] / 60 + 1e-5).all()
    assert error(y, (x.float() @ weight.float().T).tanh()) < 1e-3
    assert error(y_late, y.float() @ weight_late.float().T) < 1e-3


@pytest.mark.parametrize("rows", [9, 20, 40])
def test_shares(rows: int, of_parts: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a map whose last tile is narrower; no share is rounded to fp16, and no block waits for another."""
    monkeypatch.setattr(hopper_quantised_launch, "is_mps_active", lambda: False)
    of_parts.emulation_set(8, 227 << 10)
    n, k = 144, 1024
    (weight, weight_scales, w), (x, meant) = codes(n, k), parts(torch.randn(rows, k).half())
    shares = torch.full((4, rows, n), torch.nan)
    launch_hopper_fp8([Fp8Gemm(weight, weight_scales * 1e4, x, None, shares, Activation.NONE)])
    for i, share in enumerate(shares):
        of_share = slice(k // 4 * i, k // 4 * (i + 1))
        assert error(share, meant[:, of_share] @ w[:, of_share].T * 1e4) < 1e-5
    made = Fp8Gemm(weight, weight_scales, x, None, shares, Activation.NONE)
    half = torch.empty(16, 64).half(), torch.empty(rows, 64).half(), torch.empty(rows, 16).half(), Activation.NONE
    for maps, halves, late in (([made, made], [], []), ([made], [half], []), ([made], [], [half])):
        with pytest.raises(ValueError, match="partials takes one GEMM, not 2"):
            launch_hopper_fp8(maps, halves, late)


def test_parts_hold_whatever_a_half_holds(of_parts: ctypes.CDLL) -> None:
    """By a map that passes its inputs on."""
    k = 128
    x = (torch.randn(16, k) * 10.0 ** torch.randint(-5, 5, (16, k))).clamp(-65504, 65504).half()
    x[0, :4] = torch.tensor([65504, -65504, 0, 6e-8])
    weight, y = torch.eye(k).to(torch.float8_e4m3fn), torch.full((16, k), torch.nan, dtype=torch.float16)
    launch_hopper_fp8([Fp8Gemm(weight, torch.ones(k), parts(x)[0], None, y, Activation.NONE)])
    assert ((y.float() - x.float()).abs() <= x.float().abs() / 50 + 2e-6).all()


@pytest.mark.parametrize("in_parts", [True, False])
def test_a_row_without_numbers_stays_so_behind_relu(in_parts: bool) -> None:
    rows = 12 if in_parts else 70
    (weight, weight_scales, _), (x, scales, _) = codes(64, 128), codes(rows, 128)
    given: tuple[Tensor, Tensor | None] = (x, scales)
    if in_parts:
        given = parts(x.half())[0], None
    given[0].view(torch.uint8)[3, ..., 70] = 0x7F  # NaN of either form
    y = torch.full((rows, 64), 5, dtype=torch.float16)
    launch_hopper_fp8([Fp8Gemm(weight, weight_scales / 512, *given, y, Activation.RELU_SQUARED)])
    assert y.isnan().all(1).tolist() == [row == 3 for row in range(rows)]
    assert y[y.isfinite()].min() == 0
