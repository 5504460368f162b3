"""The channel mix on a CUDA device: its two GEMMs, by row count and weight format.

Up to 8 rows read only the rows of ffn.value whose input is non-zero (csrc/sparse/).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rwkv_batch.kernels.activation import Activation
from rwkv_batch.kernels.cuda.adapters import CudaLayerAdapters
from rwkv_batch.kernels.cuda.hopper_gemm import MAX_HOPPER_ROWS
from rwkv_batch.kernels.cuda.layer import CudaLayer
from rwkv_batch.kernels.cuda.library import RowValueArgs, cuda_pointer, library
from rwkv_batch.kernels.cuda.linear import Gemm, is_grouped, multiply, multiply_in_order, multiply_transposed
from rwkv_batch.kernels.cuda.packed_weights import NUMBERS
from rwkv_batch.kernels.cuda.quant_linear import CudaQuantLinear, CudaQuantValue
from rwkv_batch.kernels.cuda.quantised_gemm import (
    RowsGemm,
    multiply_into,
    multiply_quantised_rows,
    multiply_to_partials,
)
from rwkv_batch.kernels.cuda.quantised_rows import (
    DeferredMix,
    PartialSums,
    QuantisedRows,
    RowSums,
    SingleRowInput,
    quantise_rows,
    sum_partials,
)
from rwkv_batch.kernels.cuda.skinny_quant import QuantGemm, multiply_few
from rwkv_batch.kernels.cuda.w8a8.linear import CudaInt8Linear, CudaW8A8Linear
from rwkv_batch.kernels.cuda.w8a8.products import ExactSums, prepare_w8a8
from rwkv_batch.kernels.cuda.workspace import MAX_SPARSE_ROWS, Workspace
from rwkv_batch.model.adapter_table import AdaptedLinear, LayerAdapters
from rwkv_batch.model.layer import Layer
from rwkv_batch.model.low_rank import Target
from rwkv_batch.model.quant.formats import Format
from rwkv_batch.model.quant.w8a8 import Codes

SPARSE_FEW_COLUMNS = 128
"""Columns per CTA of csrc/sparse/sparse_few_quant.cu."""
SPARSE_FEW_SPLITS = 4
"""Split-K there."""


def channel_mix(
    layer: CudaLayer,
    x: Tensor | QuantisedRows | Codes | DeferredMix | SingleRowInput,
    adapters: LayerAdapters | None,
    workspaces: Mapping[torch.device, Workspace],
) -> Tensor | PartialSums | RowSums | ExactSums:
    """See `CudaOps.channel_mix`."""
    if isinstance(x, QuantisedRows):
        assert adapters is None, "adapters read fp16 inputs, so these are not quantised"
        return _mix_quantised(layer, x)
    key, value = layer.ffn_key, layer.ffn_value
    if isinstance(key, CudaInt8Linear) and isinstance(value, CudaInt8Linear) and adapters is None:
        assert isinstance(x, Tensor | Codes), "inputs of int8 weights"
        if isinstance(x, Codes) and isinstance(value, CudaW8A8Linear):
            cleared = prepare_w8a8(value.weight.device).cleared_of(len(x.codes), len(value.weight))
            if cleared is not None:
                return value.multiply_fed(key, x, cleared)
        return value.multiply_stored(key.to_stored(x))
    assert not isinstance(x, Codes), "adapters read fp16 inputs"
    if isinstance(x, DeferredMix):
        assert adapters is None, "what adapters read is made before"
        return _mix_deferred(layer, x)
    if isinstance(x, SingleRowInput):
        assert adapters is None, "what adapters read is no LoneRow"
        return _mix_to_row_sums(layer, x)
    if isinstance(layer.ffn_value, CudaQuantValue):
        hidden, is_squared = hidden_quantised(layer, layer.ffn_value, x, adapters)
        of_experts = mix_experts(layer, x, hidden, adapters, is_squared)
        y = _value_quantised(layer.ffn_value, hidden, is_squared)
    elif isinstance(layer.ffn_value, CudaInt8Linear):
        hidden, is_squared = layer.ffn_key(x), False
        if adapters is not None:
            adapters.add(AdaptedLinear(Target.FFN_KEY, x, hidden))
        of_experts = mix_experts(layer, x, hidden, adapters, is_squared)
        y = layer.ffn_value(hidden)
    else:
        is_squared = True
        hidden = _hidden(layer, x, adapters)
        of_experts = mix_experts(layer, x, hidden, adapters)
        y = _value(layer, hidden, workspaces)
    if adapters is None:
        return y
    if not is_squared:
        library().call("rwkv_relu_square", cuda_pointer(hidden), hidden.numel())
    y = sum_partials(y)
    adapters.add(AdaptedLinear(Target.FFN_VALUE, hidden, y))
    return y if of_experts is None else y + of_experts


def _mix_deferred(layer: CudaLayer, row: DeferredMix) -> Tensor | PartialSums:
    key, value = layer.ffn_key, layer.ffn_value
    assert isinstance(key, CudaQuantLinear) and isinstance(value, CudaQuantValue), "the layer is in codes"
    hidden = row.mix.new_empty(1, key.packed.rows)
    multiply_few([QuantGemm(key, row.mix[0], hidden, Activation.RELU_SQUARED)], norm=row.args)
    return _value_quantised(value, hidden, is_squared=True)


def _mix_to_row_sums(layer: CudaLayer, row: SingleRowInput) -> RowSums:
    key, value = layer.ffn_key, layer.ffn_value
    assert isinstance(key, CudaQuantLinear) and isinstance(value, CudaQuantValue), "the layer is in codes"
    packed = value.packed
    sums = cuda_pointer(row.added, torch.int64)
    args = RowValueArgs(packed.qweight.data_ptr(), packed.scales.data_ptr(), sums, packed.columns)
    hidden = row.x.new_empty(1, key.packed.rows)
    multiply_few([QuantGemm(key, row.x, hidden, Activation.RELU_SQUARED)], value=args)
    return RowSums(row.added)


def _mix_quantised(layer: CudaLayer, x: QuantisedRows) -> Tensor | PartialSums:
    key, value = layer.ffn_key, layer.ffn_value
    assert isinstance(key, CudaQuantLinear) and isinstance(value, CudaQuantValue), "the layer is in codes"
    rows = len(x.codes)
    if x.is_two_part and rows > MAX_SPARSE_ROWS:
        parts = value.for_quantised_rows.empty_two_part_rows(rows, key.packed.rows)
        multiply_quantised_rows([RowsGemm(key, *x, parts.codes, Activation.RELU_SQUARED)])
        return multiply_to_partials(value.for_quantised_rows, parts)
    is_squared = rows <= MAX_HOPPER_ROWS or not value.for_quantised_rows.takes_fp8_rows(rows)
    activation = Activation.RELU_SQUARED if is_squared else Activation.NONE
    hidden = torch.empty(rows, key.packed.rows, dtype=torch.float16, device=x.codes.device)
    multiply_quantised_rows([RowsGemm(key, *x, hidden, activation)])
    return _value_quantised(value, hidden, is_squared)


def _hidden(layer: CudaLayer, x: Tensor, adapters: LayerAdapters | None) -> Tensor:
    rows, ffn = len(x), layer.ffn_key.weight.shape[0]
    if layer.is_deterministic:
        hidden = multiply_in_order(x, layer.ffn_key.weight, _activation(adapters))
        _finish(adapters, x, hidden)
        return hidden
    if is_grouped(rows, layer.ffn_key.weight):
        hidden = torch.empty(rows, ffn, dtype=x.dtype, device=x.device)
        multiply([Gemm(layer.ffn_key.weight, x, hidden, _activation(adapters))])
        _finish(adapters, x, hidden)
        return hidden
    hidden = layer.ffn_key(x)
    if adapters is not None:
        adapters.add(AdaptedLinear(Target.FFN_KEY, x, hidden))
    library().call("rwkv_relu_square", cuda_pointer(hidden), hidden.numel())
    return hidden


def _value(layer: CudaLayer, hidden: Tensor, workspaces: Mapping[torch.device, Workspace]) -> Tensor:
    assert layer.value_rows is not None, "a map in fp16 has been transposed"
    if layer.is_deterministic:
        return multiply_in_order(hidden, layer.value_rows, transposed=True)
    if len(hidden) <= MAX_SPARSE_ROWS:
        return sparse_value(layer, hidden, workspaces[hidden.device])
    return multiply_transposed(hidden, layer.value_rows)


def hidden_quantised(
    layer: CudaLayer, value: CudaQuantValue, x: Tensor, adapters: LayerAdapters | None
) -> tuple[Tensor, bool]:
    """Hidden values of x, and whether they are squared.

    x [T, C] and the hidden values [T, 4C] are fp16. With many rows the next kernel squares.
    """
    key = layer.ffn_key
    assert isinstance(key, CudaQuantLinear), "the matrices of a layer are in one format"
    rows = len(x)
    hidden = torch.empty(rows, key.packed.rows, dtype=x.dtype, device=x.device)
    many = rows > MAX_HOPPER_ROWS and value.for_quantised_rows.takes_fp8_rows(rows)
    multiply_into([QuantGemm(key, x, hidden, Activation.NONE if many else _activation(adapters))])
    if not many:
        _finish(adapters, x, hidden)
    elif adapters is not None:
        adapters.add(AdaptedLinear(Target.FFN_KEY, x, hidden))
    return hidden, not many


def _value_quantised(value: CudaQuantValue, hidden: Tensor, is_squared: bool) -> Tensor | PartialSums:
    rows = len(hidden)
    if rows <= MAX_SPARSE_ROWS:
        return sparse_value_quantised(value, hidden)
    linear = value.for_quantised_rows
    if not linear.takes_fp8_rows(rows):
        return value(hidden)
    y = torch.empty(rows, linear.packed.outputs, dtype=hidden.dtype, device=hidden.device)
    multiply_quantised_rows([RowsGemm(linear, *quantise_rows(hidden, relu_square=not is_squared), y)])
    return y


def sparse_value_quantised(value: CudaQuantValue, hidden: Tensor) -> Tensor | PartialSums:
    """As sparse_value, for quantised weights: hidden [B <= 8, 4C] fp16 -> [B, C] fp16, or its partial sums."""
    rows, packed = len(hidden), value.packed
    weights, sizes = (packed.qweight.data_ptr(), packed.scales.data_ptr()), (packed.columns, packed.rows)
    number = NUMBERS[packed.format]
    if rows > 1 and packed.format is Format.FP8 and packed.columns % SPARSE_FEW_COLUMNS == 0:
        partials = torch.empty(SPARSE_FEW_SPLITS, rows, packed.columns, dtype=torch.float32, device=hidden.device)
        places = cuda_pointer(hidden), *weights, cuda_pointer(partials, torch.float32)
        library().call("rwkv_sparse_few_quant", *places, number, rows, *sizes)
        return PartialSums(partials)
    y = hidden.new_empty(rows, packed.columns)
    places = cuda_pointer(hidden), *weights, cuda_pointer(y)
    if rows == 1:
        library().call("rwkv_sparse_row_quant", *places, number, *sizes)
    else:
        library().call("rwkv_sparse_value_quant", *places, number, rows, *sizes)
    return y


def sparse_value(layer: CudaLayer, hidden: Tensor, work: Workspace) -> Tensor:
    """ffn.value of hidden [B <= 8, 4C] -> [B, C]. Reads only the rows of the matrix whose input is non-zero."""
    assert layer.value_rows is not None, "a map in fp16 has been transposed"
    rows, ffn = hidden.shape
    width = layer.value_rows.shape[1]
    y = hidden.new_empty(rows, width)
    library().call(
        "rwkv_sparse_value",
        cuda_pointer(hidden),
        cuda_pointer(layer.value_rows),
        cuda_pointer(y),
        cuda_pointer(work.partials, torch.float32),
        cuda_pointer(work.counters, torch.int32),
        rows,
        width,
        ffn,
    )
    return y


def _activation(adapters: LayerAdapters | None) -> Activation:
    """Activation of ffn.key: adapters add to its output before the final activation."""
    return Activation.RELU_SQUARED if adapters is None else Activation.SIGNED_SQUARE


def _finish(adapters: LayerAdapters | None, x: Tensor, hidden: Tensor) -> None:
    """Adds the adapters' part and finishes the activation; x [T, C], hidden [T, 4C]."""
    if adapters is not None:
        assert isinstance(adapters, CudaLayerAdapters), "made by this backend's table"
        adapters.finish_squares(AdaptedLinear(Target.FFN_KEY, x, hidden))


def mix_experts(
    layer: Layer, x: Tensor, hidden: Tensor, adapters: LayerAdapters | None, is_squared: bool = True
) -> Tensor | None:
    """Mixes the experts of tokens whose adapter has any.

    Changes hidden [T, 4C] in place, from x [T, C]. Other tokens stay bit-identical. is_squared: otherwise ffn.value
    squares its input. Returns the experts' part of the output [T, C], zero for other tokens; None: no token has
    experts.
    """
    if adapters is None:
        return None
    assert isinstance(adapters, CudaLayerAdapters), "made by this backend's table"
    if not adapters.has_experts:
        return None
    added = torch.zeros_like(x)
    adapters.mix_experts(x, layer.ffn_key(x), hidden, added)
    if not is_squared:
        adapters.sqrt_hidden(hidden)
    return added
