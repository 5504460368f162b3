"""The channel mix of a layer on a CUDA device: its two maps, by the number of rows and the storage of the weights.

Up to 8 rows read only those rows of ffn.value whose input is not zero (csrc/sparse_value.cu, sparse_few.cu and others).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rwkv_batch.kernels.activation import Activation
from rwkv_batch.kernels.cuda.adapters import CudaLayerAdapters
from rwkv_batch.kernels.cuda.few_rows import QuantMap, multiply_few
from rwkv_batch.kernels.cuda.layer import CudaLayer
from rwkv_batch.kernels.cuda.library import RowValueArgs, cuda_pointer, library
from rwkv_batch.kernels.cuda.linear import Map, is_grouped, multiply, multiply_transposed
from rwkv_batch.kernels.cuda.packed_codes import NUMBERS
from rwkv_batch.kernels.cuda.products import CodeMap, multiply_codes, multiply_into, multiply_to_shares
from rwkv_batch.kernels.cuda.quant_linear import CudaQuantLinear, CudaQuantValue
from rwkv_batch.kernels.cuda.row_codes import (
    LoneRow,
    RowCodes,
    RowSums,
    Shares,
    UnmixedRow,
    added_up,
    quantise_rows,
)
from rwkv_batch.kernels.cuda.wide import MAX_WIDE_ROWS
from rwkv_batch.kernels.cuda.workspace import MAX_SPARSE_ROWS, Workspace
from rwkv_batch.model.adapter_table import Beside, LayerAdapters
from rwkv_batch.model.layer import Layer
from rwkv_batch.model.low_rank import Target
from rwkv_batch.model.quant.formats import Format

SPARSE_FEW_COLUMNS = 128
"""Of a block, of 8-bit codes and more rows than one (csrc/sparse_few.cu)."""
SPARSE_FEW_SHARES = 4
"""Blocks there that share a column's inputs, however few these are."""


def channel_mix(
    layer: CudaLayer,
    x: Tensor | RowCodes | UnmixedRow | LoneRow,
    adapters: LayerAdapters | None,
    workspaces: Mapping[torch.device, Workspace],
) -> Tensor | Shares | RowSums:
    """See `CudaOps.channel_mix`."""
    if isinstance(x, RowCodes):
        assert adapters is None, "what adapters read is not made codes"
        return _mix_codes(layer, x)
    if isinstance(x, UnmixedRow):
        assert adapters is None, "what adapters read is made before"
        return _mix_unmixed_row(layer, x)
    if isinstance(x, LoneRow):
        assert adapters is None, "what adapters read is no LoneRow"
        return _mix_to_sums(layer, x)
    if isinstance(layer.ffn_value, CudaQuantValue):
        hidden, is_squared = hidden_quantised(layer, layer.ffn_value, x, adapters)
        of_experts = mix_experts(layer, x, hidden, adapters, is_squared)
        y = _value_quantised(layer.ffn_value, hidden, is_squared)
        if adapters is not None and not is_squared:
            library().call("rwkv_relu_square", cuda_pointer(hidden), hidden.numel())
    else:
        hidden = _hidden(layer, x, adapters)
        of_experts = mix_experts(layer, x, hidden, adapters)
        y = _value(layer, hidden, workspaces)
    if adapters is None:
        return y
    y = added_up(y)
    adapters.add(Beside(Target.FFN_VALUE, hidden, y))
    return y if of_experts is None else y + of_experts


def _mix_unmixed_row(layer: CudaLayer, row: UnmixedRow) -> Tensor | Shares:
    key, value = layer.ffn_key, layer.ffn_value
    assert isinstance(key, CudaQuantLinear) and isinstance(value, CudaQuantValue), "the layer is in codes"
    hidden = row.mix.new_empty(1, key.packed.rows)
    multiply_few([QuantMap(key, row.mix[0], hidden, Activation.RELU_SQUARED)], norm=row.args)
    return _value_quantised(value, hidden, is_squared=True)


def _mix_to_sums(layer: CudaLayer, row: LoneRow) -> RowSums:
    key, value = layer.ffn_key, layer.ffn_value
    assert isinstance(key, CudaQuantLinear) and isinstance(value, CudaQuantValue), "the layer is in codes"
    packed = value.packed
    sums = cuda_pointer(row.added, torch.int64)
    args = RowValueArgs(packed.codes.data_ptr(), packed.scales.data_ptr(), sums, packed.columns)
    hidden = row.x.new_empty(1, key.packed.rows)
    multiply_few([QuantMap(key, row.x, hidden, Activation.RELU_SQUARED)], value=args)
    return RowSums(row.added)


def _mix_codes(layer: CudaLayer, x: RowCodes) -> Tensor | Shares:
    key, value = layer.ffn_key, layer.ffn_value
    assert isinstance(key, CudaQuantLinear) and isinstance(value, CudaQuantValue), "the layer is in codes"
    rows = len(x.codes)
    if x.in_parts and rows > MAX_SPARSE_ROWS:
        parts = value.of_codes.empty_parts(rows, key.packed.rows)
        multiply_codes([CodeMap(key, *x, parts.codes, Activation.RELU_SQUARED, parts.scales)])
        return multiply_to_shares(value.of_codes, parts)
    is_squared = rows <= MAX_WIDE_ROWS or not value.of_codes.takes_codes(rows)
    activation = Activation.RELU_SQUARED if is_squared else Activation.NONE
    hidden = torch.empty(rows, key.packed.rows, dtype=torch.float16, device=x.codes.device)
    multiply_codes([CodeMap(key, *x, hidden, activation)])
    return _value_quantised(value, hidden, is_squared)


def _hidden(layer: CudaLayer, x: Tensor, adapters: LayerAdapters | None) -> Tensor:
    rows, ffn = len(x), layer.ffn_key.weight.shape[0]
    if is_grouped(rows, layer.ffn_key.weight):
        hidden = torch.empty(rows, ffn, dtype=x.dtype, device=x.device)
        multiply([Map(layer.ffn_key.weight, x, hidden, _activation(adapters))])
        _finish(adapters, x, hidden)
        return hidden
    hidden = layer.ffn_key(x)
    if adapters is not None:
        adapters.add(Beside(Target.FFN_KEY, x, hidden))
    library().call("rwkv_relu_square", cuda_pointer(hidden), hidden.numel())
    return hidden


def _value(layer: CudaLayer, hidden: Tensor, workspaces: Mapping[torch.device, Workspace]) -> Tensor:
    assert layer.value_rows is not None, "a map in fp16 has been transposed"
    if len(hidden) <= MAX_SPARSE_ROWS:
        return sparse_value(layer, hidden, workspaces[hidden.device])
    return multiply_transposed(hidden, layer.value_rows)


def hidden_quantised(
    layer: CudaLayer, value: CudaQuantValue, x: Tensor, adapters: LayerAdapters | None
) -> tuple[Tensor, bool]:
    """Hidden values [T, 4C] of x [T, C], fp16 both, and whether they are squared: of many rows the next kernel does."""
    key = layer.ffn_key
    assert isinstance(key, CudaQuantLinear), "the matrices of a layer are in one format"
    rows = len(x)
    hidden = torch.empty(rows, key.packed.rows, dtype=x.dtype, device=x.device)
    many = rows > MAX_WIDE_ROWS and value.of_codes.takes_codes(rows)
    multiply_into([QuantMap(key, x, hidden, Activation.NONE if many else _activation(adapters))])
    if not many:
        _finish(adapters, x, hidden)
    elif adapters is not None:
        adapters.add(Beside(Target.FFN_KEY, x, hidden))
    return hidden, not many


def _value_quantised(value: CudaQuantValue, hidden: Tensor, is_squared: bool) -> Tensor | Shares:
    rows = len(hidden)
    if rows <= MAX_SPARSE_ROWS:
        return sparse_value_quantised(value, hidden)
    linear = value.of_codes
    if not linear.takes_codes(rows):
        return value(hidden)
    y = torch.empty(rows, linear.packed.outputs, dtype=hidden.dtype, device=hidden.device)
    multiply_codes([CodeMap(linear, *quantise_rows(hidden, relu_square=not is_squared), y)])
    return y


def sparse_value_quantised(value: CudaQuantValue, hidden: Tensor) -> Tensor | Shares:
    """As sparse_value, of small codes: hidden [B <= 8, 4C] fp16 -> [B, C] fp16, or shares of it."""
    rows, packed = len(hidden), value.packed
    weights, sizes = (packed.codes.data_ptr(), packed.scales.data_ptr()), (packed.columns, packed.rows)
    number = NUMBERS[packed.format]
    if rows > 1 and packed.format is not Format.INT4 and packed.columns % SPARSE_FEW_COLUMNS == 0:
        shares = torch.empty(SPARSE_FEW_SHARES, rows, packed.columns, dtype=torch.float32, device=hidden.device)
        places = cuda_pointer(hidden), *weights, cuda_pointer(shares, torch.float32)
        library().call("rwkv_sparse_few", *places, number, rows, *sizes)
        return Shares(shares)
    y = hidden.new_empty(rows, packed.columns)
    places = cuda_pointer(hidden), *weights, cuda_pointer(y)
    if rows == 1:
        library().call("rwkv_sparse_row_quant", *places, number, *sizes)
    else:
        library().call("rwkv_sparse_value_quant", *places, number, rows, *sizes)
    return y


def sparse_value(layer: CudaLayer, hidden: Tensor, work: Workspace) -> Tensor:
    """ffn.value of hidden [B <= 8, 4C], reading only the rows whose input is not zero: -> [B, C]."""
    assert layer.value_rows is not None, "a map in fp16 has been transposed"
    rows, ffn = hidden.shape
    width = layer.value_rows.shape[1]
    y = hidden.new_empty(rows, width)
    library().call(
        "rwkv_sparse_value",
        cuda_pointer(hidden),
        cuda_pointer(layer.value_rows),
        cuda_pointer(y),
        cuda_pointer(work.partial, torch.float32),
        cuda_pointer(work.counters, torch.int32),
        rows,
        width,
        ffn,
    )
    return y


def _activation(adapters: LayerAdapters | None) -> Activation:
    """Behind the channel mix's key map: adapters add before it is final."""
    return Activation.RELU_SQUARED if adapters is None else Activation.SIGNED_SQUARE


def _finish(adapters: LayerAdapters | None, x: Tensor, hidden: Tensor) -> None:
    """What `_activation` has left to be done, x [T, C], hidden [T, 4C]."""
    if adapters is not None:
        assert isinstance(adapters, CudaLayerAdapters), "made by this backend's table"
        adapters.finish_squares(Beside(Target.FFN_KEY, x, hidden))


def mix_experts(
    layer: Layer, x: Tensor, hidden: Tensor, adapters: LayerAdapters | None, is_squared: bool = True
) -> Tensor | None:
    """Of tokens whose adapter has experts, hidden [T, 4C] becomes what these make of x [T, C], for the value map.

    Others' stays, bit for bit. `is_squared`: else that map squares what it is given. Returns what is added to its
    result [T, C], zero for the others; None: no token has experts.
    """
    if adapters is None:
        return None
    assert isinstance(adapters, CudaLayerAdapters), "made by this backend's table"
    if not adapters.has_experts:
        return None
    added = torch.zeros_like(x)
    adapters.mix_experts(x, layer.ffn_key(x), hidden, added)
    if not is_squared:
        adapters.take_roots(hidden)
    return added
