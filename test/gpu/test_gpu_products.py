"""Our GEMM kernels on a GPU against fp32: every plan, shapes that fill no tile, on poisoned memory."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from rwkv_batch.kernels.activation import Activation
from rwkv_batch.kernels.cuda.hopper_gemm import (
    TILE_ROWS,
    GemmShape,
    has_hopper_gemm,
    launch_hopper_gemm,
    may_return_fp32,
)
from rwkv_batch.kernels.cuda.library import library
from rwkv_batch.kernels.cuda.linear import MAX_SKINNY_ROWS, CudaLinear, Gemm, multiply, multiply_transposed, skinny
from rwkv_batch.kernels.cuda.workspace import SPARSE_BLOCK_INPUTS, SPARSE_COLUMNS

GPU = torch.device("cuda", 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

ROWS = (1, 5, 8, 9, 16, 17, 32, 50, 64, 70, 80, 90, 97, 105, 112, 130, 180, 200, 230, 240, 256)
ACTIVATIONS = {
    Activation.NONE: lambda v: v,
    Activation.TANH: torch.tanh,
    Activation.SIGMOID: torch.sigmoid,
    Activation.RELU_SQUARED: lambda v: torch.relu(v).square(),
}


def normal(*size: int) -> Tensor:
    return torch.randn(*size, device=GPU, dtype=torch.float16)


def weight(n: int, k: int) -> Tensor:
    return normal(n, k) / k**0.5


def poisoned(rows: int, n: int) -> Tensor:
    return torch.full((rows + 4, n), torch.nan, device=GPU, dtype=torch.float16)


def assert_near(y: Tensor, reference: Tensor) -> None:
    assert torch.isfinite(y).all()
    assert (y.float() - reference).norm() < 1e-3 * reference.norm() + 1e-6


def skip_where_missing(rows: int) -> None:
    if rows > MAX_SKINNY_ROWS and not has_hopper_gemm(GPU):
        pytest.skip("products of many rows are cuBLAS's here")


def sparse_product(hidden: Tensor, transposed: Tensor) -> Tensor:
    """Return hidden @ transposed by the sparse kernel.

    hidden: [B <= 8, F]; transposed: [F, C]. The kernel gets a poisoned work space.
    """
    rows, (ffn, width) = len(hidden), transposed.shape
    y = torch.full((rows, width), torch.nan, device=GPU, dtype=torch.float16)
    partial = torch.full((-(-ffn // SPARSE_BLOCK_INPUTS) * rows * width,), torch.nan, device=GPU)
    counters = torch.zeros(-(-width // SPARSE_COLUMNS), device=GPU, dtype=torch.int32)
    tensors = (hidden, transposed, y, partial, counters)
    library().call("rwkv_sparse_value", *(tensor.data_ptr() for tensor in tensors), rows, width, ffn)
    assert not counters.any()
    return y


@pytest.mark.parametrize(
    ("run", "rows"), [*product([multiply], ROWS), *product([skinny], [r for r in ROWS if r <= MAX_SKINNY_ROWS])]
)
def test_grouped_gemms(run: Callable[[list[Gemm]], None], rows: int) -> None:
    """GEMMs of several shapes and activations in one launch; nothing is written after the last row."""
    skip_where_missing(rows)
    shapes: list[tuple[int, int, Activation]] = [(768, 768, Activation.NONE), (96, 768, Activation.TANH)]
    shapes += [(160, 768, Activation.SIGMOID), (512, 64, Activation.RELU_SQUARED), (1056, 320, Activation.NONE)]
    maps = [Gemm(weight(n, k), normal(rows, k), poisoned(rows, n), activation) for n, k, activation in shapes]
    run([Gemm(m.weight, m.x, m.y[:rows], m.activation) for m in maps])
    for m in maps:
        assert_near(m.y[:rows], ACTIVATIONS[m.activation](m.x.float() @ m.weight.float().T))
        assert torch.isnan(m.y[rows:]).all()


@pytest.mark.parametrize("rows", [1, 8, 13])
def test_few_rows_and_few_outputs(rows: int) -> None:
    """So few that the skinny kernel uses smaller tiles; several GEMMs."""
    maps = [Gemm(weight(n, k), normal(rows, k), poisoned(rows, n)) for n, k in [(992, 2048), (96, 1024), (544, 4096)]]
    skinny([Gemm(m.weight, m.x, m.y[:rows]) for m in maps])
    for m in maps:
        assert_near(m.y[:rows], m.x.float() @ m.weight.float().T)
        assert torch.isnan(m.y[rows:]).all()


@pytest.mark.parametrize(("rows", "shape"), product(ROWS, [(256, 1024), (1024, 4096), (4096, 1024)]))
def test_few_and_many_outputs(rows: int, shape: tuple[int, int]) -> None:
    """Few outputs cause split-K; a second run shows that the counters are reset."""
    skip_where_missing(rows)
    w, y = weight(*shape), poisoned(rows, shape[0])
    for _ in range(3):
        x = normal(rows, shape[1])
        y.fill_(torch.nan)
        multiply([Gemm(w, x, y[:rows])])
        assert_near(y[:rows], x.float() @ w.float().T)
    assert torch.isnan(y[rows:]).all()


@pytest.mark.parametrize("rows", [300, 470, 700, 1000])
def test_several_tiles_of_rows(rows: int) -> None:
    """Split-K over several tiles of rows; the last one may be smaller."""
    skip_where_missing(rows)
    w, x, y = weight(512, 1024), normal(rows, 1024), poisoned(rows, 512)
    launch_hopper_gemm([(w, x, y[:rows], Activation.NONE)], transposed=False)
    assert_near(y[:rows], x.float() @ w.float().T)
    assert torch.isnan(y[rows:]).all()


@pytest.mark.parametrize("rows", [17, 64, 80, 97, 240, 256])
def test_fp32_output(rows: int) -> None:
    """The last tile is narrower; nothing is rounded to fp16 or written after the end."""
    skip_where_missing(rows)
    outputs = 128 * torch.cuda.get_device_properties(GPU).multi_processor_count + 16
    assert may_return_fp32(rows, GemmShape(outputs, 512), GPU) and not may_return_fp32(rows, GemmShape(4096, 512), GPU)
    x, linear = normal(rows, 512), CudaLinear(weight(outputs, 512) * 1e4)
    out = torch.full((rows + 4, outputs), torch.nan, device=GPU)
    linear.to_fp32(x, out[:rows])
    reference = x.double() @ linear.weight.double().T
    assert (out[:rows] - reference).norm() < 1e-5 * reference.norm()
    assert torch.isnan(out[rows:]).all()


@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_row_is_the_same_in_every_tile(is_transposed: bool) -> None:
    """To the bit, with any number of other rows, with split-K."""
    skip_where_missing(TILE_ROWS[0])
    x, w = normal(TILE_ROWS[-1], 4096), weight(1024, 4096)
    transposed = w.T.contiguous()
    found = []
    for rows in TILE_ROWS:
        y = torch.empty(rows, 1024, device=GPU, dtype=torch.float16)
        if is_transposed:
            y = multiply_transposed(x[:rows], transposed)
        else:
            multiply([Gemm(w, x[:rows], y)])
        found.append(y[: TILE_ROWS[0]])
    assert all(torch.equal(y, found[0]) for y in found)


@pytest.mark.parametrize(("rows", "shape"), product(ROWS, [(1024, 256), (4096, 1024), (1024, 4096), (512, 448)]))
def test_transposed(rows: int, shape: tuple[int, int]) -> None:
    k, n = shape
    x, transposed = normal(rows, k), weight(n, k).T.contiguous()
    assert_near(multiply_transposed(x, transposed), x.float() @ transposed.float())


@pytest.mark.parametrize(("rows", "shape"), product(range(1, 9), [(256, 64), (1280, 320), (8192, 2048), (16384, 4096)]))
def test_zero_inputs_are_skipped(rows: int, shape: tuple[int, int]) -> None:
    """A few active inputs, none, all; unread weights hold NaN; a second run gives the same bits."""
    ffn, width = shape
    for active in (0.12, 0.0, 1.0):
        hidden = normal(rows, ffn).abs() * (torch.rand(rows, ffn, device=GPU) < active)
        transposed = weight(width, ffn).T.contiguous()
        reference = hidden.float() @ transposed.float()
        transposed[(hidden == 0).all(0)] = torch.nan
        ys = [sparse_product(hidden, transposed) for _ in range(3)]
        assert_near(ys[0], reference)
        assert all(torch.equal(y, ys[0]) for y in ys)


def test_equal_runs_give_equal_bits() -> None:
    """Split-K partials are added in a fixed order."""
    skip_where_missing(64)
    x, w = normal(64, 4096), weight(512, 4096)
    ys = [torch.empty(64, 512, device=GPU, dtype=torch.float16) for _ in range(20)]
    for y in ys:
        multiply([Gemm(w, x, y)])
    assert all(torch.equal(y, ys[0]) for y in ys)
