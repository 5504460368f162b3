"""One row times quantised weights on Hopper, against fp32.

csrc/skinny/hopper_row.cu, also with norm and mix or with ffn.value in the launch; csrc/sparse/sparse_row_quant.cu.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bench.tools.gpu_model import random_stage
from rwkv_batch.kernels.activation import Activation
from rwkv_batch.kernels.cuda import shift_mix as cuda_shift_mix
from rwkv_batch.kernels.cuda.channel_mix import sparse_value_quantised
from rwkv_batch.kernels.cuda.library import RowValueArgs
from rwkv_batch.kernels.cuda.linear import Gemm
from rwkv_batch.kernels.cuda.ops import CudaOps
from rwkv_batch.kernels.cuda.quant_linear import CudaQuantLinear, CudaQuantValue
from rwkv_batch.kernels.cuda.quantised_rows import DeferredMix, RowSums, SingleRowInput, sum_partials
from rwkv_batch.kernels.cuda.skinny_quant import QuantGemm, fits_hopper_row, multiply_few
from rwkv_batch.kernels.cuda.workspace import Workspace
from rwkv_batch.model.layer import Norm, Prologue
from rwkv_batch.model.quant.formats import WEIGHT_ONLY, Format, dequantise, quantise
from rwkv_batch.model.state import StateFormat
from rwkv_batch.model.step_inputs import StepInputs

GPU = torch.device("cuda", 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
EXACT = 1e-3
"""fp32 results of fp16 inputs; the fp8 units accumulate in about 14 bits."""


def error(y: Tensor, reference: Tensor) -> float:
    return float((y.float() - reference.float()).norm() / reference.float().norm())


def normal(*size: int) -> Tensor:
    return torch.randn(*size, device=GPU).half()


def linear(format_: Format, n: int, k: int) -> tuple[CudaQuantLinear, Tensor]:
    stored = quantise(torch.randn(n, k, device=GPU) / k**0.5, format_)
    made = CudaQuantLinear(stored)
    if not fits_hopper_row(made, [k]):
        pytest.skip("a kernel for sm_90 only")
    return made, dequantise(stored)


@pytest.mark.parametrize("inputs", ["normal", "outlier", "tiny", "zero but one"])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (32, 256), (96, 768), (2560, 2560), (16384, 1024), (65536, 4096)])
@pytest.mark.parametrize("format_", WEIGHT_ONLY)
def test_any_inputs(format_: Format, n: int, k: int, inputs: str) -> None:
    map_, meant = linear(format_, n, k)
    x = normal(1, k)
    if inputs == "outlier":
        x[0, k // 2] = 20000
    elif inputs == "tiny":
        x *= 1e-4
    elif inputs == "zero but one":
        x[0, 1:] = 0
    out = torch.full((1, n), torch.nan, device=GPU)
    assert error(map_.to_fp32(x, out), x.float() @ meant.T) < EXACT


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("format_", WEIGHT_ONLY)
def test_nan_and_infinity_are_kept(format_: Format, value: float) -> None:
    """NaN may not count as zero. A comparison with NaN is false."""
    map_, _ = linear(format_, 96, 768)
    x = normal(1, 768)
    x[0, 300] = value
    assert not torch.isfinite(map_.to_fp32(x, torch.zeros(1, 96, device=GPU))).any()


@pytest.mark.parametrize("width", [4096, 1024, 768])
@pytest.mark.parametrize("format_", WEIGHT_ONLY)
def test_quantised_and_fp16_products_in_one_launch(format_: Format, width: int) -> None:
    sizes = (width, 32, 4 * width, 544)
    maps = [linear(format_, n, width) for n in sizes]
    halves = [normal(n, width) / width**0.5 for n in (64, 512)]
    x = normal(6, 1, width)
    ys = [torch.full((1, n), torch.nan, device=GPU).half() for n in (*sizes, 64, 512)]
    coded = [QuantGemm(map_, x[i], ys[i], Activation.RELU_SQUARED) for i, (map_, _) in enumerate(maps)]
    others = [Gemm(halves[i], x[4 + i], ys[4 + i], (Activation.TANH, Activation.SIGMOID)[i]) for i in range(2)]
    multiply_few(coded, others)
    for i, (_, meant) in enumerate(maps):
        assert error(ys[i], torch.relu(x[i].float() @ meant.T).square()) < 1e-3, i
    assert error(ys[4], torch.tanh(x[4].float() @ halves[0].float().T)) < 1e-3
    assert error(ys[5], torch.sigmoid(x[5].float() @ halves[1].float().T)) < 1e-3


def ops_of(width: int) -> CudaOps:
    ops = CudaOps()
    ops.workspaces[GPU] = Workspace.build(GPU, width, 64)
    return ops


def sums_of(delta: Tensor) -> RowSums:
    """Return [1, C] as the channel mix adds it."""
    return RowSums((delta.double() * 2.0**32).round().long().view(-1, 8).T.contiguous())


@pytest.mark.parametrize("has_delta", ["halves", "sums", ""])
@pytest.mark.parametrize("width", [4096, 768])
@pytest.mark.parametrize("format_", WEIGHT_ONLY)
def test_the_row_is_mixed_in_the_kernel(
    monkeypatch: pytest.MonkeyPatch, format_: Format, width: int, has_delta: str
) -> None:
    """Equal to shift_mix to the bit, with different read and write slots."""
    monkeypatch.setattr(cuda_shift_mix, "_defers_mix", lambda prologue: True)
    consumer, meant = linear(format_, 96, width)
    ops = ops_of(width)
    work = ops.workspaces[GPU]
    norm = Norm(torch.rand(width, device=GPU) + 0.5, torch.randn(width, device=GPU) / 8)
    build = Prologue(norm, torch.rand(6, width, device=GPU).half(), consumer)
    x, delta, shift = normal(2, width), normal(2, width) if has_delta else None, normal(4, width)
    low = normal(64, width) / width**0.5

    def step(rows: int) -> StepInputs:
        ends = torch.arange(rows + 1, device=GPU)
        read, written = torch.arange(rows, device=GPU), torch.arange(2, 2 + rows, device=GPU)
        return StepInputs(torch.zeros_like(read), ends, read, written, ends[1:] - 1, 1)

    after, alone = shift.clone(), shift.clone()
    out, mixed = ops.shift_mix(x, delta, build, after, step(2))
    one = step(1)  # the launch reads its slots
    alone_delta = None if delta is None else sums_of(delta[:1]) if has_delta == "sums" else delta[:1]
    out_alone, row = ops.shift_mix(x[:1], alone_delta, build, alone, one)
    assert isinstance(mixed, Tensor)
    assert isinstance(row, DeferredMix)
    y, z = torch.full((3, 1, 96), torch.nan, device=GPU).half(), torch.full((1, 64), torch.nan, device=GPU).half()
    maps = [QuantGemm(consumer, row.mix[i], y[i]) for i in range(3)]
    multiply_few(maps, [Gemm(low, row.mix[3], z, Activation.TANH)], row.args)
    assert torch.equal(out_alone[0], out[0])
    assert torch.equal(alone[2], after[2])
    assert torch.equal(alone[[0, 1, 3]], shift[[0, 1, 3]])
    assert work.mix_counter.item() == 0
    for i in range(3):
        assert error(y[i], mixed[i][:1].float() @ meant.T) < 1e-3, i
    assert error(z, torch.tanh(mixed[3][:1].float() @ low.float().T)) < 1e-3


@pytest.mark.parametrize("push", [-50.0, -2.3, -1.2, 0.0, 3.0, 50.0])
@pytest.mark.parametrize(("width", "ffn"), [(4096, 16384), (1024, 4096), (768, 3072), (2560, 10240)])
@pytest.mark.parametrize("format_", [Format.INT4])
def test_value_in_the_launch_of_the_key(format_: Format, width: int, ffn: int, push: float) -> None:
    """No to all rows active; added to earlier sums and to a residual stream; a second run gives the same bits."""
    weight = torch.randn(ffn, width, device=GPU) / width**0.5
    weight[:, 0] = 1.0
    key = CudaQuantLinear(quantise(weight, format_))
    if not fits_hopper_row(key, [width]):
        pytest.skip("a kernel for sm_90 only")
    stored = quantise(torch.randn(width, ffn, device=GPU) / ffn**0.5, format_)
    packed = CudaQuantValue(stored).packed
    x = normal(1, width)
    x[0, 0] = push
    hidden = torch.full((1, ffn), torch.nan, device=GPU).half()
    multiply_few([QuantGemm(key, x, hidden, Activation.RELU_SQUARED)])
    meant = hidden.double() @ dequantise(stored).double().T
    sums = [torch.full((8, width // 8), units << 32, device=GPU) for units in (0, 0, -3)]
    for into in sums:
        value = RowValueArgs(packed.qweight.data_ptr(), packed.scales.data_ptr(), into.data_ptr(), width)
        multiply_few([QuantGemm(key, x, torch.empty_like(hidden), Activation.RELU_SQUARED)], value=value)
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[2], sums[0] - (3 << 32))
    y = (sums[0].T.reshape(1, -1).double() * 2.0**-32).float()
    assert (y - meant).norm() <= 1e-5 * meant.norm()
    stream = normal(1, width)
    assert torch.equal(ops_of(width).add(stream, RowSums(sums[0])), stream + y.half())


@pytest.mark.parametrize("format_", [Format.INT4])
def test_sums_begin_with_zeros(format_: Format) -> None:
    """An aborted step's sums are not in the next channel mix."""
    width = 1024
    consumer, _ = linear(format_, 4 * width, width)
    ops = ops_of(width)
    ops.workspaces[GPU].row_sums.fill_(-1)
    norm = Norm(torch.rand(width, device=GPU) + 0.5, torch.randn(width, device=GPU) / 8)
    build = Prologue(norm, torch.rand(1, width, device=GPU).half(), consumer)
    ends, slot = torch.tensor([0, 1], device=GPU), torch.tensor([2], device=GPU)
    inputs = StepInputs(torch.zeros_like(slot), ends, slot, slot, ends[1:] - 1, 1)
    _, (row,) = ops.shift_mix(normal(1, width), None, build, normal(3, width), inputs)
    assert isinstance(row, SingleRowInput)
    assert not row.added.any()


@pytest.mark.parametrize("share", [0.0, 0.01, 0.12, 0.5, 1.0])
@pytest.mark.parametrize(("width", "ffn"), [(4096, 16384), (768, 3072), (2560, 10240)])
@pytest.mark.parametrize("format_", WEIGHT_ONLY)
def test_active_rows(format_: Format, width: int, ffn: int, share: float) -> None:
    """Any share of non-zero inputs, isolated and adjacent; a second run gives the same bits."""
    stored = quantise(torch.randn(width, ffn, device=GPU) / ffn**0.5, format_)
    value = CudaQuantValue(stored)
    hidden = torch.rand(1, ffn, device=GPU) * (torch.rand(1, ffn, device=GPU) < share)
    hidden[0, :2], hidden[0, 200], hidden[0, -600:-200] = -0.0, 1.0, 1.5
    hidden = hidden.half()
    other = CudaQuantValue(quantise(torch.randn(width, ffn, device=GPU), format_))
    ys = []
    for _ in range(20):  # whatever has lain in a processor's shared memory before
        ys.append(sum_partials(sparse_value_quantised(value, hidden)))
        sparse_value_quantised(other, torch.rand(1, ffn, device=GPU).half())
    assert all(torch.equal(y, ys[0]) for y in ys)
    assert error(ys[0], hidden.float() @ dequantise(stored).T) < 1e-3


@torch.inference_mode()
@pytest.mark.parametrize("name", ["fp8", "int8", "int4"])
def test_steps_of_a_row_have_the_same_bits_each_time(name: str) -> None:
    """All layers of 7.2B: a ring slot may be refilled only after its scales were read."""
    stage, vocab = random_stage("7.2b", GPU, StateFormat.FP16, dtype=name), 65536
    stage.allocate_slots(4)
    tokens = torch.randint(vocab, (3, 1), device=GPU)
    slot, ends = torch.tensor([2], device=GPU), torch.tensor([0, 1], device=GPU)

    def steps() -> Tensor:
        out = []
        for i, token in enumerate(tokens):
            inputs = StepInputs(token, ends, slot if i else torch.zeros_like(slot), slot, ends[:-1], 1)
            out.append(stage.forward(stage.embed(token), None, inputs)[0].clone())
        return torch.cat(out)

    first = steps()
    odd = sum(not torch.equal(steps(), first) for _ in range(100))
    assert odd == 0
