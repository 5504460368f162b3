"""The streaming products, their kernel run thread by thread on the CPU, against what the weights stand for."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor

from native import cuda_check
from rwkv_batch.kernels import cuda_stream
from rwkv_batch.kernels.activation import Activation
from rwkv_batch.kernels.cuda_quant import pack
from rwkv_batch.kernels.cuda_stream import Operand, StreamMap, stream
from rwkv_batch.model.quant.formats import Format, dequantise, quantise
from test.model.emulated.library import call, emulated

pytestmark = pytest.mark.skipif(cuda_check.why_not() is not None, reason="no CUDA headers")
FORMATS = (None, *Format)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """stream.cu for the CPU."""
    return emulated("stream", tmp_path_factory.mktemp("emulated"))


@pytest.fixture(autouse=True)
def on_cpu(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches go to the emulation."""

    class Kernels:
        """As cuda_library.Kernels."""

        def call(self, name: str, *args: object) -> None:
            """Run a launcher."""
            call(library, name, *args)

    monkeypatch.setattr(cuda_stream, "library", Kernels)
    monkeypatch.setattr(cuda_stream, "cuda_pointer", lambda tensor, dtype=None: tensor.data_ptr())


def operand(n: int, k: int, format_: Format | None) -> tuple[Operand, Tensor]:
    """A random weight and what it stands for."""
    weight = torch.randn(n, k) / k**0.5
    if format_ is None:
        return Operand(weight.half(), n, k), weight.half().float()
    stored = quantise(weight, format_)
    packed = pack(stored)
    return Operand(packed.codes, n, k, format_, packed.scales), dequantise(stored)


def check(maps: list[tuple[Operand, Tensor, Activation, torch.dtype]], rows: int) -> None:
    """A launch of these maps against fp32."""
    work, wanted = [], []
    for weight, meaning, activation, dtype in maps:
        x = torch.randn(rows, weight.k).half()
        work.append(StreamMap(weight, x, torch.full((rows, weight.n), torch.nan, dtype=dtype), activation))
        y = x.float() @ meaning.T
        wanted.append(y.relu().square() if activation is Activation.RELU_SQUARED else y)
    stream(work)
    for m, y in zip(work, wanted, strict=True):
        assert ((m.y.float() - y).norm() / y.norm()).item() < 1e-3, (m.operand.format, m.operand.n, m.operand.k, rows)


@pytest.mark.parametrize("lazy", [0, 1])
@pytest.mark.parametrize("rows", [1, 3, 6, 13])
@pytest.mark.parametrize("format_", FORMATS)
def test_products(format_: Format | None, rows: int, lazy: int, library: ctypes.CDLL) -> None:
    library.emulation_set(3, 227 << 10 if lazy else 99 << 10, lazy)
    check([(*operand(96, 2048, format_), Activation.RELU_SQUARED, torch.float16)], rows)
    check([(*operand(160, 768, format_), Activation.NONE, torch.float32)], rows)


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("format_", Format)
def test_maps_of_halves_share_a_launch_with_codes(format_: Format, rows: int, library: ctypes.CDLL) -> None:
    library.emulation_set(5, 227 << 10, 1)
    kinds = [(160, 512, format_), (32, 512, None), (64, 1024, None), (96, 512, format_)]
    check([(*operand(*kind), Activation.NONE, torch.float16) for kind in kinds], rows)
