"""Errors of the kernels and layers of quantised weights, against fp32.

Every kernel gets fresh random inputs and poisoned outputs. Errors are ||y - true|| / ||true||.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from bench.tools.gpu_model import random_file, random_stage
from rwkv_batch.kernels.activation import Activation
from rwkv_batch.kernels.cuda.channel_mix import sparse_value_quantised
from rwkv_batch.kernels.cuda.hopper_gemm import has_hopper_gemm
from rwkv_batch.kernels.cuda.layer import GROUPED_ORDER
from rwkv_batch.kernels.cuda.low_ranks import CudaProjections
from rwkv_batch.kernels.cuda.ops import CudaOps
from rwkv_batch.kernels.cuda.packed_weights import WEIGHT_ONLY_ROWS
from rwkv_batch.kernels.cuda.quant_linear import CudaQuantLinear, CudaQuantValue
from rwkv_batch.kernels.cuda.quantised_rows import SKINNY_ROWS, SKINNY_ROWS_ON_HOPPER, sum_partials
from rwkv_batch.kernels.cuda.skinny_quant import QuantGemm, multiply_few
from rwkv_batch.kernels.naive import NaiveOps
from rwkv_batch.model.loader import LayerLoader, Precision
from rwkv_batch.model.quant.formats import Format, dequantise, format_for, quantise
from rwkv_batch.model.state import StateFormat

GPU = torch.device("cuda", 0)
ROWS = (1, 2, 3, 5, 8, 9, 15, 16, 17, 40, 130, 300, 320, 600)
SHAPES = ((4096, 4096), (16384, 4096), (768, 3072), (2560, 2560), (96, 768))
VALUE_ROWS = (9, 33, 64, 130, 320, 400, 600, 1000, 4100)
"""Row counts of ffn.value without skipped inputs; cuBLAS serves the last ones."""
PIECE_ROWS = (1, 2, 4, 5, 8, 9, 16, 17, 33, 64, 65, 130, 257, 320, 600, 1000)
EXACT = 2e-3
"""fp16 inputs and outputs, fp32 sums."""
IN_PARTS = 8e-3
"""The same with two-part inputs of 3 bits each; also for two products in a row."""
ROUNDED = 5e-2
"""The same with 8-bit inputs; also for two products in a row."""


def kernel_errors(format_: Format) -> dict[str, float]:
    """Return case -> relative error against the dequantised product in fp32; NaN if an output was not written."""
    return dict(_linear_errors(format_)) | dict(_value_errors(format_))


def limit_of(name: str) -> float:
    """Return the largest error that a case may have: rounding alone where inputs are not quantised."""
    rows = int(name.rsplit(maxsplit=1)[-1].removeprefix("B"))
    if not name.startswith("fp8"):
        return EXACT
    if not has_hopper_gemm(GPU):
        return ROUNDED if rows > SKINNY_ROWS[Format.FP8] else EXACT
    return (
        ROUNDED
        if rows > WEIGHT_ONLY_ROWS[Format.FP8]
        else IN_PARTS
        if rows > SKINNY_ROWS_ON_HOPPER[Format.FP8]
        else EXACT
    )


@torch.inference_mode()
def layer_errors(format_: Format, size: str) -> dict[str, float]:
    """Return the error of each piece against fp32, per number of rows.

    A key names a piece of the first two layers, or of the head, and the rows. The weights in fp32 are the dequantised
    codes. Both get the same inputs, so that a piece's error does not count for the next piece.
    """
    weights = random_file(size, GPU)
    stage = random_stage(size, GPU, StateFormat.FP32, dtype=format_)
    meant = {name: _meaning(name, tensor, format_) for name, tensor in weights.tensors.items()}
    whole = dataclasses.replace(weights, tensors=meant)
    loader = LayerLoader(whole, Precision(GPU, torch.float32, torch.float32, StateFormat.FP32))
    head, errors = loader.head().linear, {}
    assert stage.head is not None
    for rows in PIECE_ROWS:
        mixed = torch.randn(6, rows, stage.width, device=GPU).half()
        given = [mixed[GROUPED_ORDER.index(name)].float() for name in "rwkvag"]
        for i in range(2):
            mine, reference = stage.layers[i], loader.layer(i)
            actual, expected = stage.ops.project(mine, mixed), NaiveOps().project(reference, torch.stack(given))
            if isinstance(actual, CudaProjections):
                actual.finish()
            for name in ("r", "w", "k", "v", "a", "g", "v_gate"):
                y, z = getattr(actual, name), getattr(expected, name)
                if y is not None:
                    errors[f"layer {i} {name} B{rows}"] = _error(y.float(), z)
            x = mixed[0]
            errors[f"layer {i} output B{rows}"] = _error(mine.output(x).float(), reference.output(x.float()))
            y = sum_partials(stage.ops.channel_mix(mine, x))
            errors[f"layer {i} ffn B{rows}"] = _error(y.float(), NaiveOps().channel_mix(reference, x.float()))
        if isinstance(stage.head.linear, CudaQuantLinear):  # int8's bits are those of the definition
            errors[f"head B{rows}"] = _error(stage.head.linear.to_fp32(x), head(x.float()))
    return errors


def _meaning(name: str, tensor: Tensor, storage: Format) -> Tensor:
    format_ = format_for(name, storage)
    return tensor if format_ in (None, Format.W8A8) else dequantise(quantise(tensor, format_))


def _linear_errors(format_: Format) -> Iterator[tuple[str, float]]:
    for n, k in SHAPES:
        stored = quantise(torch.randn(n, k, device=GPU) / k**0.5, format_)
        linear, meaning = CudaQuantLinear(stored), dequantise(stored)
        yield f"{format_} dequantise {n}x{k} B1", _error(linear.packed.dequantised().float(), meaning)
        for rows in ROWS:
            x = torch.randn(rows, k, device=GPU, dtype=torch.float16)
            reference = x.float() @ meaning.T
            yield f"{format_} {n}x{k} B{rows}", _error(linear(x).float(), reference)
            out = torch.full_like(reference, torch.nan)
            yield f"{format_} to_fp32 {n}x{k} B{rows}", _error(linear.to_fp32(x, out), reference)
    stored = [quantise(torch.randn(n, 1024, device=GPU) / 32, format_) for n in (1024, 96, 544)]
    linears, x = [CudaQuantLinear(s) for s in stored], torch.randn(3, 5, 1024, device=GPU, dtype=torch.float16)
    ys = [torch.full((5, s.out_features), torch.nan, device=GPU, dtype=torch.float16) for s in stored]
    multiply_few([QuantGemm(linear, x[i], ys[i], Activation.RELU_SQUARED) for i, linear in enumerate(linears)])
    for i, s in enumerate(stored):
        yield f"{format_} grouped {i} B5", _error(ys[i].float(), torch.relu(x[i].float() @ dequantise(s).T).square())


def _value_errors(format_: Format) -> Iterator[tuple[str, float]]:
    for n, k in ((4096, 16384), (768, 3072), (2560, 10240)):
        stored = quantise(torch.randn(n, k, device=GPU) / k**0.5, format_)
        value, meaning, ops = CudaQuantValue(stored), dequantise(stored), CudaOps()
        ops.prepare_device(GPU, n, k)
        for rows in range(1, 9):
            hidden = torch.randn(rows, k, device=GPU, dtype=torch.float16).abs()
            hidden *= torch.rand(rows, k, device=GPU) < 0.12
            reference = hidden.float() @ meaning.T
            yield (
                f"{format_} sparse {n}x{k} B{rows}",
                _error(sum_partials(sparse_value_quantised(value, hidden)).float(), reference),
            )
        for rows in VALUE_ROWS:
            hidden = torch.relu(torch.randn(rows, k, device=GPU, dtype=torch.float16))
            yield f"{format_} value {n}x{k} B{rows}", _error(value(hidden).float(), hidden.float() @ meaning.T)


def _error(y: Tensor, reference: Tensor) -> float:
    return ((y - reference).norm() / reference.norm()).item()
