"""Quantised weights: precision, meaning, and the layout that the GPU's kernels read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from demo.random_weights import write_random_model
from rwkv_batch.kernels.cuda.packed_weights import pack, pack_nibbles
from rwkv_batch.kernels.cuda.quant_linear import CudaQuantLinear
from rwkv_batch.model.quant.formats import (
    WEIGHT_ONLY,
    Format,
    codes_int4,
    dequantise,
    format_for,
    is_quantised,
    quantise,
)
from rwkv_batch.model.quant_linear import QuantLinear
from rwkv_batch.model.step_inputs import step_inputs
from rwkv_batch.model.weights import open_weights
from rwkv_batch.runner.pipeline import Pipeline

ERRORS = {Format.FP8: 0.028, Format.INT4: 0.12}
"""For normally distributed weights."""


def make(out: int, inner: int, seed: int = 0) -> Tensor:
    return torch.randn(out, inner, generator=torch.Generator().manual_seed(seed)) * 0.02


def error(y: Tensor, reference: Tensor) -> float:
    return float((y - reference).norm() / reference.norm())


@pytest.mark.parametrize("format_", WEIGHT_ONLY)
@pytest.mark.parametrize(("out", "inner"), [(96, 768), (5, 130), (1, 1), (3000, 64)])
def test_quantised_weights_are_close(format_: Format, out: int, inner: int) -> None:
    weight = make(out, inner)
    stored = quantise(weight, format_)
    assert (stored.out_features, stored.in_features) == (out, inner)
    assert dequantise(stored).shape == weight.shape
    assert error(dequantise(stored), weight) < ERRORS[format_]


def test_outliers_of_int4_affect_only_their_group() -> None:
    weight = make(8, 512)
    weight[3, 10] = 5.0
    meaning = dequantise(quantise(weight, Format.INT4))
    assert error(meaning[3, 128:], weight[3, 128:]) < ERRORS[Format.INT4] * 1.3


def test_int4_fits_groups_that_are_not_centred() -> None:
    weight = make(4, 256).abs() + 0.01
    assert error(dequantise(quantise(weight, Format.INT4)), weight) < 0.06


@pytest.mark.parametrize("format_", WEIGHT_ONLY)
def test_extreme_weights_stay_finite(format_: Format) -> None:
    weight = torch.zeros(3, 256)
    weight[1] = 6000.0
    weight[2] = 1e-7  # zero in int4
    meaning = dequantise(quantise(weight, format_))
    assert meaning.isfinite().all() and not meaning[0].any()
    assert error(meaning[1], weight[1]) < 0.01
    with pytest.raises(ValueError, match="use --dtype fp16"):
        quantise(torch.full((1, 128), torch.inf if format_ is Format.FP8 else 1e6), format_)


@pytest.mark.parametrize("format_", WEIGHT_ONLY)
def test_plain_map(format_: Format) -> None:
    stored = quantise(make(70, 200), format_)
    x = torch.randn(9, 200, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(QuantLinear(stored)(x), x @ dequantise(stored).T, atol=1e-5)


def test_which_matrices_are_quantised() -> None:
    small = ["head.weight", "blocks.3.att.receptance.weight", "blocks.0.ffn.key.weight", "blocks.11.att.output.weight"]
    whole = ["emb.weight", "blocks.3.att.w1", "blocks.0.ln1.weight", "blocks.2.att.ln_x.weight", "blocks.1.ffn.x_k"]
    assert format_for("head.weight", Format.INT4) is Format.W8A8
    assert all(is_quantised(name) for name in small) and not any(is_quantised(name) for name in whole)


@pytest.mark.parametrize("format_", WEIGHT_ONLY)
def test_the_kernels_read_every_weight_in_its_place(format_: Format) -> None:
    """The steps of csrc/quant.cuh: bytes and nibbles to fp16, scales by output and group."""
    for transposed in (False, True):
        stored = quantise(make(64, 256), format_)
        packed = pack(stored, transposed)
        assert packed.qweight.is_contiguous() and packed.scales.is_contiguous()
        meaning = _as_the_kernels_read(packed.qweight, packed.scales, format_, transposed)
        assert torch.allclose(meaning.T if transposed else meaning, dequantise(stored), rtol=1e-3, atol=1e-6)


def _as_the_kernels_read(codes: Tensor, scales: Tensor, format_: Format, transposed: bool) -> Tensor:
    if format_ is Format.FP8:
        bits = codes.view(torch.uint8).to(torch.int32) << 8
        halves = (bits & 0x8000) | ((bits >> 1) & 0x3F80)
        values = halves.to(torch.uint16).view(torch.float16).float() * 256
        return values * (scales if transposed else scales.unsqueeze(1))
    words = codes.contiguous().view(torch.int32)
    columns = [((words >> (4 * i + 16 * odd)) & 15) for i in range(4) for odd in (0, 1)]
    values = torch.stack(columns, dim=-1).reshape(len(codes), -1).float()
    pairs = scales.float().repeat_interleave(128, dim=0)
    if not transposed:
        pairs = pairs.transpose(0, 1)
    return (values - (pairs[..., 1] - 1024)) * pairs[..., 0] / 64


def test_nibbles_keep_all_int4_values() -> None:
    codes = codes_int4(quantise(make(8, 64), Format.INT4))
    assert sorted(
        (pack_nibbles(codes) & 15).flatten().tolist() + (pack_nibbles(codes) >> 4).flatten().tolist()
    ) == sorted(codes.flatten().tolist())


def test_unsupported_gpu_sizes_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"int4 matrices of a multiple of 32 outputs and 256 inputs.*64 x 128"):
        CudaQuantLinear(quantise(make(64, 128), Format.INT4))
    with pytest.raises(ValueError, match=r"fp8.*20 x 128"):
        CudaQuantLinear(quantise(make(20, 128), Format.FP8))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose inputs are measured once."""
    return write_random_model(tmp_path_factory.mktemp("tiny") / "tiny.pth", layers=2, width=128)


@pytest.mark.parametrize("kernels", ["naive", "cpu"])
@pytest.mark.parametrize("format_", Format)
def test_a_quantised_model_is_close_to_fp32(tiny: Path, format_: Format, kernels: str) -> None:
    weights = open_weights(tiny)
    logits = []
    for dtype in ("fp32", format_.value):
        pipeline = Pipeline(weights, ("cpu",), dtype, kernels)
        pipeline.allocate_slots(4)
        logits.append(pipeline.forward(step_inputs([[5, 7, 11], [9]], [0, 0], [2, 3], [0, 1])))
    found = error(logits[1], logits[0])
    assert 0 < found < {Format.FP8: 0.08, Format.W8A8: 0.03, Format.INT4: 0.3}[format_]
