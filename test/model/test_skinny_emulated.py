"""Products of few rows by streamed weights, against plain torch. The CPU runs the kernels thread by thread."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from rwkv_batch.kernels.activation import Activation
from rwkv_batch.kernels.cuda import linear as cuda_linear
from rwkv_batch.kernels.cuda import skinny_quant
from rwkv_batch.kernels.cuda.linear import Gemm, skinny
from rwkv_batch.kernels.cuda.quant_linear import CudaQuantLinear
from rwkv_batch.kernels.cuda.skinny_quant import QuantGemm, multiply_few
from rwkv_batch.model.quant.formats import WEIGHT_ONLY, Format, dequantise, quantise
from test.model.emulated.library import emulated, error, needs_headers, send_launches_to

pytestmark = [pytest.mark.slow, needs_headers]
SHAPES = ((96, 512), (32, 256))


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ctypes.CDLL]:
    """Launcher -> its kernels on the CPU."""
    return {f"rwkv_{name}": emulated(name, tmp_path_factory.mktemp(name)) for name in ("skinny", "skinny_quant")}


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch, libraries: dict[str, ctypes.CDLL]) -> None:
    """Launches go to the emulation."""
    send_launches_to(libraries.__getitem__, monkeypatch, cuda_linear, skinny_quant)


def halves(rows: int) -> tuple[list[Gemm], list[Tensor]]:
    """Two maps of halves and what they give."""
    maps, expected = [], []
    for n, k, activation in ((32, 128, Activation.TANH), (32, 256, Activation.SIGMOID)):
        weight, x = torch.randn(n, k).half() / k**0.5, torch.randn(rows, k).half()
        maps.append(Gemm(weight, x, torch.full((rows, n), torch.nan).half(), activation))
        product = x.float() @ weight.float().T
        expected.append(product.tanh() if activation is Activation.TANH else product.sigmoid())
    return maps, expected


def codes(format_: Format, rows: int) -> tuple[list[QuantGemm], list[Tensor]]:
    """A map of codes of each shape and what they give."""
    maps, expected = [], []
    for i, (n, k) in enumerate(SHAPES):
        stored, x = quantise(torch.randn(n, k) / k**0.5, format_), torch.randn(rows, k).half()
        y = torch.full((rows, n), torch.nan, dtype=torch.float32 if i else torch.float16)
        maps.append(QuantGemm(CudaQuantLinear(stored), x, y, Activation.NONE if i else Activation.RELU_SQUARED))
        product = x.float() @ dequantise(stored).T
        expected.append(product if i else product.relu().square())
    return maps, expected


@pytest.mark.parametrize(("rows", "processors", "with_fp16"), [(1, 1, False), (1, 20, True), (5, 2, True)])
@pytest.mark.parametrize("format_", WEIGHT_ONLY)
def test_codes(libraries: dict[str, ctypes.CDLL], format_: Format, rows: int, processors: int, with_fp16: bool) -> None:
    """With few processors, a block makes several groups of outputs. With many processors, groups are narrower."""
    libraries["rwkv_skinny_quant"].emulation_set(processors, 227 << 10)
    maps, expected = codes(format_, rows)
    others, wanted_of_others = halves(rows) if with_fp16 else ([], [])
    multiply_few(maps, others)
    for m, reference in zip([*others, *maps], [*wanted_of_others, *expected], strict=True):
        assert error(m.y, reference) < 1e-3, (tuple(m.y.shape), m.activation)


@pytest.mark.parametrize(("rows", "processors"), [(8, 1), (11, 20)])
def test_halves(libraries: dict[str, ctypes.CDLL], processors: int, rows: int) -> None:
    libraries["rwkv_skinny"].emulation_set(processors, 227 << 10)
    maps, expected = halves(rows)
    skinny(maps)
    for m, reference in zip(maps, expected, strict=True):
        assert error(m.y, reference) < 1e-3, tuple(m.y.shape)


@pytest.mark.parametrize("format_", WEIGHT_ONLY)
def test_a_row_has_the_same_bits_alone_and_in_company(libraries: dict[str, ctypes.CDLL], format_: Format) -> None:
    """Alone its inputs are in shared memory."""
    libraries["rwkv_skinny_quant"].emulation_set(20, 227 << 10)
    maps, _ = codes(format_, 8)
    others, _ = halves(8)
    multiply_few(maps, others)
    row = slice(5, 6)
    alone = [QuantGemm(m.linear, m.x[row], torch.full_like(m.y[row], torch.nan), m.activation) for m in maps]
    others_alone = [Gemm(m.weight, m.x[row], torch.full_like(m.y[row], torch.nan), m.activation) for m in others]
    multiply_few(alone, others_alone)
    for one, m in zip([*others_alone, *alone], [*others, *maps], strict=True):
        assert torch.equal(one.y, m.y[row])


@pytest.mark.parametrize("format_", WEIGHT_ONLY)
def test_a_row_without_numbers_stays_so_behind_relu(libraries: dict[str, ctypes.CDLL], format_: Format) -> None:
    libraries["rwkv_skinny_quant"].emulation_set(20, 227 << 10)
    (m, *_), _ = codes(format_, 3)
    m.x[1, 70] = torch.nan
    multiply_few([m])
    assert m.activation is Activation.RELU_SQUARED
    assert m.y.isnan().all(1).tolist() == [False, True, False]
