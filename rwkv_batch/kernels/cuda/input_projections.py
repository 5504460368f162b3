"""The time mix's input projections on a CUDA device: r, k, v and the low ranks of the six mixed inputs.

* up to 256 rows: two own launches, the second for the low ranks up; fp16: one (fused_input_projections.py)
* up to 4 decode rows, quantised: the launch of the WKV computes the low ranks up (csrc/wkv/wkv_few.cu)
* more rows: a large GEMM for r, k, v; then the low ranks by two own launches, or by cuBLAS on side streams

If fp8 rows are multiplied, shift_mix has quantised the inputs of r, k, v.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rwkv_batch.kernels.activation import Activation
from rwkv_batch.kernels.cuda.fused_input_projections import fits_fused_projections, launch_fused_projections
from rwkv_batch.kernels.cuda.hopper_gemm import (
    MAX_MULTI_TILE_ROWS,
    GemmShape,
    fixed_splits,
    has_hopper_gemm,
    launch_hopper_gemm,
    launch_in_order,
    prepare_hopper_gemm,
)
from rwkv_batch.kernels.cuda.hopper_gemm_fp8 import fits_hopper_fp8
from rwkv_batch.kernels.cuda.hopper_gemm_weight_only import fp16_gemm, launch_weight_only
from rwkv_batch.kernels.cuda.hopper_quantised_launch import fits_fp16_gemms
from rwkv_batch.kernels.cuda.layer import CudaLayer
from rwkv_batch.kernels.cuda.library import cuda_pointer, library
from rwkv_batch.kernels.cuda.linear import Gemm, is_grouped, multiply
from rwkv_batch.kernels.cuda.low_ranks import MAX_FUSED_WKV_ROWS, LowRanks, fp16_gemms
from rwkv_batch.kernels.cuda.quant_linear import CudaQuantLinear
from rwkv_batch.kernels.cuda.quantised_gemm import RowsGemm, multiply_into, multiply_quantised_rows
from rwkv_batch.kernels.cuda.quantised_rows import (
    SCALE_ALIGNMENT,
    DeferredMix,
    MixedInputs,
    QuantisedMix,
    QuantisedRows,
    quantise_rows,
)
from rwkv_batch.kernels.cuda.skinny_quant import MAX_MIXED_GEMM_ROWS, QuantGemm, multiply_few
from rwkv_batch.kernels.cuda.w8a8.linear import CudaInt8Linear, CudaW8A8Linear, mixed_gemms, multiply_mixed
from rwkv_batch.kernels.cuda.w8a8.mixed_launch import fits_mixed_launch, launch_mixed
from rwkv_batch.kernels.cuda.w8a8.products import W8A8Mix
from rwkv_batch.kernels.cuda.w8a8.row import RowGemm, multiply_row
from rwkv_batch.model.layer import Projections

SideStreams = tuple[torch.cuda.Stream, torch.cuda.Stream]


def project(layer: CudaLayer, mixed: MixedInputs | DeferredMix, side_streams: Callable[[], SideStreams]) -> Projections:
    """Projects mixed [6, T, C].

    Its order is r, k, v, w, a, g. side_streams returns two streams next to the current one.
    """
    if isinstance(mixed, DeferredMix):
        return _project_deferred_mix(layer, mixed)
    tokens = len(_low_rank_inputs(mixed)[0])
    if layer.is_deterministic and not _fits_one_w8a8_launch(layer, tokens):
        return _project_in_order(layer, mixed)
    if _uses_grouped_projections(layer, tokens):
        return _project_grouped(layer, mixed)
    if _uses_multi_tile_projections(layer, tokens):
        return _project_multi_tile(layer, mixed)
    return _project_batched(layer, mixed, side_streams())


def _low_rank_inputs(mixed: MixedInputs) -> Tensor:
    """Returns [4, T, C] fp16: the low ranks' inputs v, w, a, g."""
    return mixed[2:] if isinstance(mixed, Tensor) else mixed.fp16


def _uses_grouped_projections(layer: CudaLayer, tokens: int) -> bool:
    """Whether own kernels compute all projections in few launches."""
    if layer.rkv is not None:
        return is_grouped(tokens, layer.rkv[0])
    linear = layer.receptance
    if isinstance(linear, CudaInt8Linear):
        return is_grouped(tokens, layer.low_in[0]) or _fits_one_w8a8_launch(layer, tokens)
    assert isinstance(linear, CudaQuantLinear), "gemms without a stack are in small codes"
    if linear.takes_fp16_rows(tokens):
        return is_grouped(tokens, layer.low_in[0])
    if _fits_one_quantised_launch(layer, tokens):
        return True
    return _multiplies_codes(linear, tokens) and is_grouped(tokens, layer.low_in[0])


def _multiplies_codes(linear: CudaQuantLinear, tokens: int) -> bool:
    """Whether the own fp8 kernel takes so many rows."""
    packed = linear.packed
    return linear.takes_fp8_rows(tokens) and fits_hopper_fp8(tokens, packed.rows, packed.columns, packed.qweight.device)


def _fits_one_quantised_launch(layer: CudaLayer, tokens: int) -> bool:
    """Whether the low ranks run in the launch of r, k, v.

    They then run on SMs that r, k, v leave idle. Only with fp8 or two-part rows.
    """
    linears = _quantised_rkv(layer)
    if not linears or not (linears[0].takes_two_part_rows(tokens) or _multiplies_codes(linears[0], tokens)):
        return False
    quantised = [GemmShape(m.packed.rows, m.packed.columns) for m in linears]
    low = [GemmShape(*matrix.shape) for matrix in (*layer.low_in, layer.gate_in)]
    return fits_fp16_gemms(tokens, quantised, low, prepare_hopper_gemm(layer.low_in.device).num_sms)


def _fits_one_w8a8_launch(layer: CudaLayer, tokens: int) -> bool:
    """Whether the low ranks run in the launch of r, k, v with inputs in 8 bits."""
    linears = [m for m in _int8_rkv(layer) if isinstance(m, CudaW8A8Linear)]
    full = [GemmShape(*m.weights.shape) for m in linears]
    low = [GemmShape(*matrix.shape) for matrix in (*layer.low_in, layer.gate_in)]
    return bool(linears) and fits_mixed_launch(tokens, full, low, layer.low_in.device)


def _uses_multi_tile_projections(layer: CudaLayer, tokens: int) -> bool:
    """Whether the low ranks run in own launches after r, k, v.

    The alternative is cuBLAS's launches in parallel. Not with the own fp8 kernel: the low ranks then run on SMs that
    its tiles leave idle.
    """
    if tokens > MAX_MULTI_TILE_ROWS or not has_hopper_gemm(layer.low_in.device):
        return False
    if layer.rkv is not None:
        return True
    linear = layer.receptance
    return not (isinstance(linear, CudaQuantLinear) and _multiplies_codes(linear, tokens))


def _quantised_rkv(layer: CudaLayer) -> list[CudaQuantLinear]:
    """r, k, v of a quantised layer; empty for others."""
    return [m for m in (layer.receptance, layer.key, layer.value) if isinstance(m, CudaQuantLinear)]


def _int8_rkv(layer: CudaLayer) -> list[CudaInt8Linear]:
    """r, k, v of a layer in int8; empty for others."""
    return [m for m in (layer.receptance, layer.key, layer.value) if isinstance(m, CudaInt8Linear)]


def _rkv_quantised(layer: CudaLayer, mixed: MixedInputs, rkv: Tensor, low: LowRanks | None = None) -> None:
    """Quantised r, k, v: mixed [6, T, C] -> rkv [3, T, C]. low: the low ranks, if they are in the same launch."""
    in_int8 = _int8_rkv(layer)
    if in_int8 or isinstance(mixed, W8A8Mix):
        assert not isinstance(mixed, QuantisedMix), "int8 has codes of its own"
        multiply_mixed(in_int8, mixed, rkv)
        return
    linears = _quantised_rkv(layer)
    tokens = rkv.shape[1]
    if isinstance(mixed, Tensor) and not (linears[0].takes_fp8_rows(tokens) or linears[0].takes_two_part_rows(tokens)):
        multiply_into([QuantGemm(linear, mixed[i], rkv[i]) for i, linear in enumerate(linears)])
        return
    if isinstance(mixed, QuantisedMix):
        rows = [mixed[i] for i in range(3)]
    else:
        is_two_part = linears[0].takes_two_part_rows(tokens)
        rows = [linears[0].to_two_part_rows(mixed[i]) for i in range(3)] if is_two_part else _quantise_rkv_rows(mixed)
    gemms = [RowsGemm(linear, *rows[i], rkv[i]) for i, linear in enumerate(linears)]
    if low is None:
        multiply_quantised_rows(gemms)
    else:
        multiply_quantised_rows(gemms, fp16_gemms(low.down_gemms), fp16_gemms(low.up_gemms))


def _quantise_rkv_rows(mixed: Tensor) -> list[QuantisedRows]:
    """Quantises the inputs of r, k, v in mixed [6, T, C]. They are needed as fp16, too."""
    _, tokens, width = mixed.shape
    if tokens % SCALE_ALIGNMENT:
        return [quantise_rows(mixed[i]) for i in range(3)]
    codes, scales = quantise_rows(mixed[:3].view(-1, width))
    assert scales is not None, "codes, not parts"
    return [QuantisedRows(*part) for part in zip(codes.split(tokens), scales.split(tokens), strict=True)]


def _project_grouped(layer: CudaLayer, mixed: MixedInputs) -> Projections:
    """All projections in one or two launches. The low ranks up run in another launch or in the same."""
    inputs = _low_rank_inputs(mixed)
    rkv = torch.empty_like(inputs[:3])
    low = LowRanks.build(layer, inputs)
    if _fits_one_quantised_launch(layer, len(inputs[0])):
        _rkv_quantised(layer, mixed, rkv, low)
        return low.projections(*rkv.unbind())
    if _fits_one_w8a8_launch(layer, len(inputs[0])):
        assert not isinstance(mixed, QuantisedMix), "w8a8 has codes of its own"
        gemms, is_pending = mixed_gemms(_int8_rkv(layer), mixed, rkv), len(inputs[0]) <= MAX_FUSED_WKV_ROWS
        launch_mixed(gemms, fp16_gemms(low.down_gemms), [] if is_pending else fp16_gemms(low.up_gemms))
        return low.projections(*rkv.unbind(), pending=is_pending)
    if _fits_one_fp16_launch(layer, mixed, low):
        assert layer.rkv is not None and isinstance(mixed, Tensor), "gemms of halves"
        whole = [(layer.rkv[i], mixed[i], rkv[i], Activation.NONE) for i in range(3)]
        launch_fused_projections(whole, fp16_gemms(low.down_gemms), fp16_gemms(low.up_gemms))
        return low.projections(*rkv.unbind())
    _launch_input_projections(layer, mixed, rkv, low.down_gemms)
    if layer.rkv is None and len(inputs[0]) <= MAX_FUSED_WKV_ROWS:
        return low.projections(*rkv.unbind(), pending=True)
    low.multiply_up()
    return low.projections(*rkv.unbind())


def _fits_one_fp16_launch(layer: CudaLayer, mixed: MixedInputs, low: LowRanks) -> bool:
    """Whether fp16 r, k, v and all low ranks are one launch."""
    if layer.rkv is None or not isinstance(mixed, Tensor):
        return False
    return fits_fused_projections(mixed.shape[1], layer.rkv.unbind(), *low.weights)


def _project_deferred_mix(layer: CudaLayer, row: DeferredMix) -> Projections:
    """As `_project_grouped`, for one quantised row whose mix the launch computes."""
    rkv = torch.empty_like(row.mix[:3])
    low = LowRanks.build(layer, row.mix[2:])
    in_int8 = _int8_rkv(layer)
    if in_int8:
        row_gemms = [RowGemm(linear.weights, row.mix[i], rkv[i]) for i, linear in enumerate(in_int8)]
        multiply_row(row_gemms, low.down_gemms, row.args)
    else:
        gemms = [QuantGemm(linear, row.mix[i], rkv[i]) for i, linear in enumerate(_quantised_rkv(layer))]
        multiply_few(gemms, low.down_gemms, row.args)
    return low.projections(*rkv.unbind(), pending=True)


def _project_in_order(layer: CudaLayer, mixed: MixedInputs) -> Projections:
    """As `_project_multi_tile`, for any number of rows: the order of sums depends on the weights only."""
    inputs = _low_rank_inputs(mixed)
    rkv = torch.empty_like(inputs[:3])
    low = LowRanks.build(layer, inputs)
    if layer.rkv is None or not isinstance(mixed, Tensor):
        _rkv_quantised(layer, mixed, rkv)
    else:
        gemms = [(layer.rkv[i], mixed[i], rkv[i], Activation.NONE) for i in range(3)]
        if fits_fused_projections(mixed.shape[1], layer.rkv.unbind(), *low.weights, min_rows=1):
            launch_fused_projections(gemms, fp16_gemms(low.down_gemms), fp16_gemms(low.up_gemms))
            return low.projections(rkv[0], rkv[1], _own_copy(layer, rkv[2]))
        launch_in_order(gemms, fixed_splits([GemmShape(*m.shape) for m in layer.rkv], rkv.device))
    low.multiply_down()
    low.multiply_up()
    return low.projections(rkv[0], rkv[1], _own_copy(layer, rkv[2]))


def _project_multi_tile(layer: CudaLayer, mixed: MixedInputs) -> Projections:
    """Projects r, k, v first, then the low ranks.

    r, k, v run as in `_project_batched`, the low ranks as in `_project_grouped`.
    """
    inputs = _low_rank_inputs(mixed)
    rkv = torch.empty_like(inputs[:3])
    _rkv_batched(layer, mixed, rkv)
    low = LowRanks.build(layer, inputs)
    for gemms in (low.down_gemms, low.up_gemms):
        launch_hopper_gemm(fp16_gemms(gemms), transposed=False)
    return low.projections(rkv[0], rkv[1], _own_copy(layer, rkv[2]))


def _launch_input_projections(layer: CudaLayer, mixed: MixedInputs, rkv: Tensor, low: list[Gemm]) -> None:
    """Runs r, k, v and the fp16 GEMMs `low`. They share one launch if one kernel takes both."""
    if layer.rkv is not None and isinstance(mixed, Tensor):
        multiply([*(Gemm(layer.rkv[i], mixed[i], rkv[i]) for i in range(3)), *low])
        return
    linears, rows = _quantised_rkv(layer), rkv.shape[1]  # w8a8: none
    in_fp16 = bool(linears) and not linears[0].takes_two_part_rows(rows) and linears[0].takes_fp16_rows(rows)
    if not isinstance(mixed, Tensor) or not in_fp16:
        _rkv_quantised(layer, mixed, rkv)
        multiply(low)
    elif not linears[0].uses_skinny_kernel(rows):
        gemms = [m.packed.weight_only_gemm(mixed[i], rkv[i]) for i, m in enumerate(linears)]
        launch_weight_only([*(fp16_gemm(m.weight, m.x, m.y, m.activation) for m in low), *gemms])
    elif rows <= MAX_MIXED_GEMM_ROWS:
        multiply_few([QuantGemm(linear, mixed[i], rkv[i]) for i, linear in enumerate(linears)], low)
    else:
        _rkv_quantised(layer, mixed, rkv)
        multiply(low)


def _project_batched(layer: CudaLayer, mixed: MixedInputs, side_streams: SideStreams) -> Projections:
    """Batched cuBLAS GEMMs; low ranks and gate run on side streams in parallel.

    The main stream allocates all memory, because memory of a side stream would serve that stream only. It waits for
    the side streams before it frees any.
    """
    inputs = _low_rank_inputs(mixed)
    _, tokens, width = inputs.shape
    groups, rank, _ = layer.low_in.shape
    low = inputs.new_empty(groups, tokens, rank)
    out = inputs.new_empty(groups, tokens, width)
    gate = inputs.new_empty(tokens, len(layer.gate_in))
    g = inputs.new_empty(tokens, width)
    rkv = inputs.new_empty(3, tokens, width)
    main = torch.cuda.current_stream()
    for side_stream in side_streams:
        side_stream.wait_stream(main)
    with torch.cuda.stream(side_streams[0]):
        torch.bmm(inputs[3 - groups : 3], layer.low_in.transpose(1, 2), out=low)
        decay = low[groups - 2]
        library().call("rwkv_low_rank_act", cuda_pointer(decay), decay.numel(), None, 0)
        torch.bmm(low, layer.low_out.transpose(1, 2), out=out)
    with torch.cuda.stream(side_streams[1]):
        torch.mm(inputs[3], layer.gate_in.T, out=gate)
        library().call("rwkv_low_rank_act", None, 0, cuda_pointer(gate), gate.numel())
        torch.mm(gate, layer.gate_out.T, out=g)
    _rkv_batched(layer, mixed, rkv)
    for side_stream in side_streams:
        main.wait_stream(side_stream)
    v_gate, v = out[0] if groups == 3 else None, _own_copy(layer, rkv[2])
    return Projections(r=rkv[0], k=rkv[1], v=v, w=out[groups - 2], a=out[groups - 1], g=g, v_gate=v_gate)


def _rkv_batched(layer: CudaLayer, mixed: MixedInputs, rkv: Tensor) -> None:
    """Computes r, k, v of many rows: mixed [6, T, C] -> rkv [3, T, C]."""
    if layer.rkv is not None and isinstance(mixed, Tensor):
        torch.bmm(mixed[:3], layer.rkv.transpose(1, 2), out=rkv)
    else:
        _rkv_quantised(layer, mixed, rkv)


def _own_copy(layer: CudaLayer, v: Tensor) -> Tensor:
    """Returns v, in layer 0 as a copy: it is kept to the end of the step and must not keep r, k alive."""
    return v if layer.v_residual is not None else v.clone()
