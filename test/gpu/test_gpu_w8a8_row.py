"""One row times W8A8 weights on Hopper (csrc/skinny/hopper_row.cu): every bit as the definition has it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rwkv_batch.kernels.activation import Activation
from rwkv_batch.kernels.cuda.hopper_gemm import has_hopper_gemm
from rwkv_batch.kernels.cuda.linear import Gemm
from rwkv_batch.kernels.cuda.ops import CudaOps
from rwkv_batch.kernels.cuda.quantised_rows import DeferredMix
from rwkv_batch.kernels.cuda.w8a8.linear import CudaW8A8Linear
from rwkv_batch.kernels.cuda.w8a8.row import RowGemm, multiply_row
from rwkv_batch.model.layer import Norm, Prologue
from rwkv_batch.model.quant.formats import Format, quantise
from rwkv_batch.model.quant.w8a8 import product, quantise_rows
from rwkv_batch.model.step_inputs import StepInputs
from test.gpu.test_gpu_w8a8 import GPU, Matrix, channels, same_bits

is_hopper = torch.cuda.is_available() and has_hopper_gemm(GPU)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not is_hopper, reason="not a Hopper GPU")]


def wanted(x: Tensor, matrix: Matrix) -> Tensor:
    return product(quantise_rows(x, matrix.transform), matrix.codes).half()


@pytest.mark.parametrize("inputs", ["normal", "outlier", "tiny", "zero", "zero but one"])
@pytest.mark.parametrize(
    ("n", "k"), [(4096, 4096), (64, 128), (64, 256), (192, 768), (2560, 2560), (16384, 1024), (65536, 4096)]
)
def test_any_inputs(n: int, k: int, inputs: str) -> None:
    torch.manual_seed(n + k)
    matrix = Matrix(n, channels(k))
    x = (torch.randn(1, k, device=GPU) * channels(k)).half()
    if inputs == "outlier":
        x[0, k // 2] = 20000
    elif inputs == "tiny":
        x *= 1e-4
    elif inputs == "zero":
        x[:] = 0
    elif inputs == "zero but one":
        x[0, 1:] = 0
    torch.cuda.synchronize()  # weights are read before the previous kernel ends
    for dtype in (torch.float16, torch.float32):
        y = torch.full((1, n + 8), torch.nan, device=GPU, dtype=dtype)
        for _ in range(10):
            multiply_row([RowGemm(matrix.weights, x, y[:, :n])])
            assert same_bits(y[:, :n].half(), wanted(x, matrix))
        assert y[:, n:].isnan().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_are_kept(value: float) -> None:
    matrix = Matrix(128, channels(768))
    x, y = torch.randn(1, 768, device=GPU).half(), torch.zeros(1, 128, device=GPU).half()
    x[0, 300] = value
    multiply_row([RowGemm(matrix.weights, x, y)])
    assert y.isnan().all()


@pytest.mark.parametrize("width", [4096, 1024, 768])
def test_several_matrices_and_fp16_products_in_one_launch(width: int) -> None:
    torch.manual_seed(width)
    matrices = [Matrix(n, channels(width)) for n in (width, 64, 4 * width)]
    halves = [torch.randn(n, width, device=GPU).half() / width**0.5 for n in (64, 512)]
    x = torch.randn(5, 1, width, device=GPU).half()
    ys = [torch.full((1, len(m.codes.codes)), torch.nan, device=GPU).half() for m in matrices]
    zs = [torch.full((1, len(weight)), torch.nan, device=GPU).half() for weight in halves]
    torch.cuda.synchronize()
    multiply_row(
        [RowGemm(m.weights, x[i], ys[i]) for i, m in enumerate(matrices)],
        [Gemm(weight, x[3 + i], zs[i], Activation.TANH) for i, weight in enumerate(halves)],
    )
    for i, matrix in enumerate(matrices):
        assert same_bits(ys[i], wanted(x[i], matrix)), i
    for i, weight in enumerate(halves):
        expected = torch.tanh(x[3 + i].float() @ weight.float().T)
        assert (zs[i].float() - expected).norm() < 1e-3 * expected.norm()


@pytest.mark.parametrize("has_delta", [True, False])
@pytest.mark.parametrize("width", [4096, 768])
def test_the_row_is_mixed_in_the_launch(width: int, has_delta: bool) -> None:
    """The bits of `shift_mix` for two rows, which stores fp16 with adapters."""
    torch.manual_seed(width)
    ops = CudaOps()
    ops.prepare_device(GPU, width, 4 * width)
    norm = Norm(channels(width), torch.randn(width, device=GPU) / 8)
    maps = [
        CudaW8A8Linear(quantise(torch.randn(128, width, device=GPU), Format.W8A8, 3 * norm.weight)) for _ in range(3)
    ]
    prologue = Prologue(norm, torch.rand(6, width, device=GPU).half(), maps[0], tuple(maps[1:]))
    x, shift = torch.randn(2, width, device=GPU).half(), torch.randn(4, width, device=GPU).half()
    delta = x.flip(0) if has_delta else None

    def step(rows: int) -> StepInputs:
        ends = torch.arange(rows + 1, device=GPU)
        read, written = torch.arange(rows, device=GPU), torch.arange(2, 2 + rows, device=GPU)
        return StepInputs(torch.zeros_like(read), ends, read, written, ends[1:] - 1, 1)

    both, one = step(2), step(1)
    both.adapters = torch.zeros(2, dtype=torch.int64)
    after, after_one = shift.clone(), shift.clone()
    out, mixed = ops.shift_mix(x, delta, prologue, after, both)
    torch.cuda.synchronize()
    out_one, row = ops.shift_mix(x[:1], None if delta is None else delta[:1], prologue, after_one, one)
    assert isinstance(mixed, Tensor) and isinstance(row, DeferredMix)
    y = torch.full((3, 1, 128), torch.nan, device=GPU).half()
    multiply_row([RowGemm(m.weights, row.mix[i], y[i]) for i, m in enumerate(maps)], norm=row.args)
    assert torch.equal(out_one[0], out[0])
    assert torch.equal(after_one[2], after[2])
    for i, linear in enumerate(maps):
        assert same_bits(y[i], linear(mixed[i].contiguous())[:1]), i


def test_a_channel_mix_of_one_row_has_the_bits_of_two() -> None:
    torch.manual_seed(5)
    stored = [
        quantise(torch.randn(n, k, device=GPU) / 32, Format.W8A8, 3 * channels(k))
        for n, k in ((3072, 768), (768, 3072))
    ]
    key, value = CudaW8A8Linear(stored[0]), CudaW8A8Linear(stored[1], squares_inputs=True)
    key.feed(value)
    x = torch.randn(2, 768, device=GPU).half()
    x[1] = x[0]
    together = value(key(x))
    alone = value.multiply_stored(key.to_stored(x[:1]))
    assert same_bits(alone[0], together[0])
    assert same_bits(key(x[:1]), key(x)[:1])


def test_shapes_that_do_not_fit_are_refused() -> None:
    matrix = Matrix(64, channels(256))
    x, y = torch.randn(1, 256, device=GPU).half(), torch.empty(1, 64, device=GPU).half()
    with pytest.raises(ValueError, match="do not fit"):
        multiply_row([RowGemm(matrix.weights, x[:, :128], y)])
    with pytest.raises(ValueError, match="takes 8"):
        multiply_row([RowGemm(matrix.weights, x, y)] * 9)
