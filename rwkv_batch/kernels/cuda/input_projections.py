"""The entrance of a layer's time mix on a CUDA device: r, k, v and the low ranks of the six mixed inputs.

Up to 256 rows: two launches of our own, the second for the low ranks' exits, or one of halves (fused_input_projections.py);
of up to 4 decoding rows of small weights the exits are in the launch of the WKV (csrc/wkv_few.cu). More: r, k, v by a
product of many rows, the low ranks behind it by two launches of our own, or beside it by cuBLAS on streams of their
own. Where fp8 is multiplied by fp8, shift_mix has made codes of the inputs of r, k, v.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rwkv_batch.kernels.activation import Activation
from rwkv_batch.kernels.cuda.fused_input_projections import fits_fused_projections, launch_fused_projections
from rwkv_batch.kernels.cuda.hopper_gemm import (
    MAX_MULTI_TILE_ROWS,
    Fp16Gemm,
    GemmShape,
    has_hopper_gemm,
    launch_hopper_gemm,
    prepare_hopper_gemm,
)
from rwkv_batch.kernels.cuda.hopper_gemm_fp8 import fits_hopper_fp8
from rwkv_batch.kernels.cuda.hopper_gemm_weight_only import fp16_gemm, launch_weight_only
from rwkv_batch.kernels.cuda.hopper_quantised_launch import fits_fp16_gemms
from rwkv_batch.kernels.cuda.layer import CudaLayer
from rwkv_batch.kernels.cuda.library import LowExits, cuda_pointer, library
from rwkv_batch.kernels.cuda.linear import Gemm, is_grouped, multiply
from rwkv_batch.kernels.cuda.quant_linear import CudaQuantLinear
from rwkv_batch.kernels.cuda.quantised_gemm import W8A8Gemm, multiply_into, multiply_quantised_rows
from rwkv_batch.kernels.cuda.quantised_rows import (
    SCALE_ALIGNMENT,
    DeferredMix,
    QuantisedMix,
    QuantisedRows,
    quantise_rows,
)
from rwkv_batch.kernels.cuda.skinny_quant import MAX_MIXED_GEMM_ROWS, QuantGemm, multiply_few
from rwkv_batch.model.layer import Projections

MAX_FUSED_WKV_ROWS = 4
"""Of one token each, whose low ranks' exits are in the launch of the WKV. 8 rows of fp8 were 1.6 % slower with it."""
MAX_UP_TILES = 64
"""Of 16 outputs and EXIT_PIECE_INPUTS inputs of a head: as many as that launch has room for."""
UP_TILE_INPUTS = 64
SideStreams = tuple[torch.cuda.Stream, torch.cuda.Stream]


def project(
    layer: CudaLayer, mixed: Tensor | QuantisedMix | DeferredMix, side_streams: Callable[[], SideStreams]
) -> Projections:
    """Of mixed [6, T, C] in the order r, k, v, w, a, g. `side_streams`: makes or finds two streams beside the current one."""
    if isinstance(mixed, DeferredMix):
        return _project_deferred_mix(layer, mixed)
    tokens = len(_low_rank_inputs(mixed)[0])
    if _uses_grouped_projections(layer, tokens):
        return _project_grouped(layer, mixed)
    if _uses_multi_tile_projections(layer, tokens):
        return _project_multi_tile(layer, mixed)
    return _project_batched(layer, mixed, side_streams())


def _low_rank_inputs(mixed: Tensor | QuantisedMix) -> Tensor:
    """[4, T, C] fp16: the low ranks' inputs v, w, a, g."""
    return mixed.halves if isinstance(mixed, QuantisedMix) else mixed[2:]


def _uses_grouped_projections(layer: CudaLayer, tokens: int) -> bool:
    """Whether kernels of our own take all maps of the entrance, few launches in all."""
    if layer.rkv is not None:
        return is_grouped(tokens, layer.rkv[0])
    linear = layer.receptance
    assert isinstance(linear, CudaQuantLinear), "maps without a stack are in small codes"
    if linear.takes_fp16_rows(tokens):
        return is_grouped(tokens, layer.low_in[0])
    if _fits_one_quantised_launch(layer, tokens):
        return True
    return _multiplies_codes(linear, tokens) and is_grouped(tokens, layer.low_in[0])


def _multiplies_codes(linear: CudaQuantLinear, tokens: int) -> bool:
    """Whether our own kernel multiplies so many rows of fp8 codes by it."""
    packed = linear.packed
    return linear.takes_fp8_rows(tokens) and fits_hopper_fp8(tokens, packed.rows, packed.columns, packed.codes.device)


def _fits_one_quantised_launch(layer: CudaLayer, tokens: int) -> bool:
    """Whether the low ranks go on the processors that r, k, v leave idle, multiplied as codes by our own kernel.

    Of rows as codes or in two parts.
    """
    linears = _quantised_rkv(layer)
    if not linears or not (linears[0].takes_two_part_rows(tokens) or _multiplies_codes(linears[0], tokens)):
        return False
    quantised = [GemmShape(m.packed.rows, m.packed.columns) for m in linears]
    low = [GemmShape(*matrix.shape) for matrix in (*layer.low_in, layer.gate_in)]
    return fits_fp16_gemms(tokens, quantised, low, len(prepare_hopper_gemm(layer.low_in.device).partial))


def _uses_multi_tile_projections(layer: CudaLayer, tokens: int) -> bool:
    """Whether the low ranks are launches of our own behind r, k, v instead of cuBLAS's beside them.

    Not where our own kernel multiplies fp8 codes: its tiles leave processors idle, on which those run, if not in its
    launch.
    """
    if tokens > MAX_MULTI_TILE_ROWS or not has_hopper_gemm(layer.low_in.device):
        return False
    if layer.rkv is not None:
        return True
    linear = layer.receptance
    assert isinstance(linear, CudaQuantLinear), "maps without a stack are in small codes"
    return not _multiplies_codes(linear, tokens)


def _quantised_rkv(layer: CudaLayer) -> list[CudaQuantLinear]:
    """r, k, v of a layer in small codes; none of another."""
    return [m for m in (layer.receptance, layer.key, layer.value) if isinstance(m, CudaQuantLinear)]


def _rkv_quantised(layer: CudaLayer, mixed: Tensor | QuantisedMix, rkv: Tensor, low: LowRanks | None = None) -> None:
    """r, k, v of mixed [6, T, C] -> rkv [3, T, C], of matrices in small codes; `low`: where it `_fits_one_quantised_launch`."""
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
    maps = [W8A8Gemm(linear, *rows[i], rkv[i]) for i, linear in enumerate(linears)]
    if low is None:
        multiply_quantised_rows(maps)
    else:
        multiply_quantised_rows(maps, _fp16_gemms(low.down_gemms), _fp16_gemms(low.up_gemms))


def _quantise_rkv_rows(mixed: Tensor) -> list[QuantisedRows]:
    """r's, k's and v's of mixed [6, T, C], which were wanted as halves too."""
    _, tokens, width = mixed.shape
    if tokens % SCALE_ALIGNMENT:
        return [quantise_rows(mixed[i]) for i in range(3)]
    codes, scales = quantise_rows(mixed[:3].view(-1, width))
    assert scales is not None, "codes, not parts"
    return [QuantisedRows(*part) for part in zip(codes.split(tokens), scales.split(tokens), strict=True)]


def _project_grouped(layer: CudaLayer, mixed: Tensor | QuantisedMix) -> Projections:
    """Every map of the entrance in one launch or two, the low ranks' exits in another or, beside codes, in the same."""
    inputs = _low_rank_inputs(mixed)
    rkv = torch.empty_like(inputs[:3])
    low = LowRanks.build(layer, inputs)
    if _fits_one_quantised_launch(layer, len(inputs[0])):
        _rkv_quantised(layer, mixed, rkv, low)
        return low.projections(*rkv.unbind())
    if _fits_one_fp16_launch(layer, mixed, low):
        assert layer.rkv is not None and isinstance(mixed, Tensor), "maps of halves"
        whole = [(layer.rkv[i], mixed[i], rkv[i], Activation.NONE) for i in range(3)]
        launch_fused_projections(whole, _fp16_gemms(low.down_gemms), _fp16_gemms(low.up_gemms))
        return low.projections(*rkv.unbind())
    _launch_input_projections(layer, mixed, rkv, low.down_gemms)
    if layer.rkv is None and len(inputs[0]) <= MAX_FUSED_WKV_ROWS:
        return low.projections(*rkv.unbind(), pending=True)
    multiply(low.up_gemms)
    return low.projections(*rkv.unbind())


def _fits_one_fp16_launch(layer: CudaLayer, mixed: Tensor | QuantisedMix, low: LowRanks) -> bool:
    """Whether r, k, v and the low ranks with their exits, all of halves, are one launch."""
    if layer.rkv is None or not isinstance(mixed, Tensor):
        return False
    weights = ([m.weight for m in maps] for maps in (low.down_gemms, low.up_gemms))
    return fits_fused_projections(mixed.shape[1], layer.rkv.unbind(), *weights)


def _project_deferred_mix(layer: CudaLayer, row: DeferredMix) -> Projections:
    """As `_project_grouped` has few rows of small codes."""
    rkv = torch.empty_like(row.mix[:3])
    low = LowRanks.build(layer, row.mix[2:])
    maps = [QuantGemm(linear, row.mix[i], rkv[i]) for i, linear in enumerate(_quantised_rkv(layer))]
    multiply_few(maps, low.down_gemms, row.args)
    return low.projections(*rkv.unbind(), pending=True)


def _project_multi_tile(layer: CudaLayer, mixed: Tensor | QuantisedMix) -> Projections:
    """r, k, v as `_project_batched` has them; the low ranks as `_project_grouped` has them, behind."""
    inputs = _low_rank_inputs(mixed)
    rkv = torch.empty_like(inputs[:3])
    _rkv_batched(layer, mixed, rkv)
    low = LowRanks.build(layer, inputs)
    for maps in (low.down_gemms, low.up_gemms):
        launch_hopper_gemm(_fp16_gemms(maps), transposed=False)
    return low.projections(rkv[0], rkv[1], _own_copy(layer, rkv[2]))


def _fp16_gemms(maps: list[Gemm]) -> list[Fp16Gemm]:
    return [(m.weight, m.x, m.y, m.activation) for m in maps]


@dataclass(slots=True)
class LowRanks:
    """The low ranks and the gate of a layer as maps of two launches, and where their results go."""

    down_gemms: list[Gemm]
    up_gemms: list[Gemm]
    low: Tensor
    """[2 or 3, T, D]: what (v,) w, a are made of"""
    gate: Tensor
    """[T, Dg]: likewise"""
    out: Tensor
    """[3 or 4, T, C]: (v,) w, a, gate"""

    @classmethod
    def build(cls, layer: CudaLayer, inputs: Tensor) -> LowRanks:
        """Over inputs [4, T, C]: v, w, a, g."""
        _, tokens, width = inputs.shape
        groups, rank, _ = layer.low_in.shape
        low = inputs.new_empty(groups, tokens, rank)
        gate = inputs.new_empty(tokens, len(layer.gate_in))
        out = inputs.new_empty(groups + 1, tokens, width)
        first = 3 - groups
        acts = [Activation.TANH if i == groups - 2 else Activation.NONE for i in range(groups)]
        down_gemms = [Gemm(layer.low_in[i], inputs[first + i], low[i], acts[i]) for i in range(groups)]
        up_gemms = [Gemm(layer.low_out[i], low[i], out[i]) for i in range(groups)]
        return cls(
            [*down_gemms, Gemm(layer.gate_in, inputs[3], gate, Activation.SIGMOID)],
            [*up_gemms, Gemm(layer.gate_out, gate, out[groups])],
            low,
            gate,
            out,
        )

    def projections(self, r: Tensor, k: Tensor, v: Tensor, *, pending: bool = False) -> CudaProjections:
        """With r, k, v [T, C] of the same layer. pending: the exits are still to be multiplied."""
        *v_gate, w, a, g = self.out.unbind()
        low = self if pending else None
        return CudaProjections(r=r, k=k, v=v, w=w, a=a, g=g, v_gate=v_gate[0] if v_gate else None, low=low)

    def up_args_for_wkv(self, layer: CudaLayer) -> LowExits | None:
        """The exits as the WKV of few rows takes them; None where it does not."""
        (groups, tokens, rank), gate_rank = self.low.shape, self.gate.shape[1]
        if tokens > MAX_FUSED_WKV_ROWS or 4 * (groups * rank + gate_rank) > MAX_UP_TILES * UP_TILE_INPUTS:
            return None
        return LowExits(
            low=cuda_pointer(self.low),
            gate=cuda_pointer(self.gate),
            low_out=cuda_pointer(layer.low_out),
            gate_out=cuda_pointer(layer.gate_out),
            groups=groups,
            rank=rank,
            gate_rank=gate_rank,
        )


@dataclass(slots=True)
class CudaProjections(Projections):
    """A layer's projections, the low ranks' exits perhaps still to be multiplied."""

    low: LowRanks | None = None
    """Until w, a, g and v_gate have been written"""

    def finish(self) -> None:
        """Multiply the exits if that has not been done."""
        if self.low is not None:
            multiply(self.low.up_gemms)
            self.low = None


def finish_projections(p: Projections) -> Projections:
    """The same with all parts written: the exits of the low ranks multiplied, if they have not been."""
    if isinstance(p, CudaProjections):
        p.finish()
    return p


def _launch_input_projections(layer: CudaLayer, mixed: Tensor | QuantisedMix, rkv: Tensor, low: list[Gemm]) -> None:
    """r, k, v and the maps `low` of halves: in one launch where one kernel takes both."""
    if layer.rkv is not None and isinstance(mixed, Tensor):
        multiply([*(Gemm(layer.rkv[i], mixed[i], rkv[i]) for i in range(3)), *low])
        return
    linears, rows = _quantised_rkv(layer), rkv.shape[1]
    if isinstance(mixed, QuantisedMix) or linears[0].takes_two_part_rows(rows) or not linears[0].takes_fp16_rows(rows):
        _rkv_quantised(layer, mixed, rkv)
        multiply(low)
    elif not linears[0].uses_skinny_kernel(rows):
        maps = [m.packed.weight_only_gemm(mixed[i], rkv[i]) for i, m in enumerate(linears)]
        launch_weight_only([*(fp16_gemm(m.weight, m.x, m.y, m.activation) for m in low), *maps])
    elif rows <= MAX_MIXED_GEMM_ROWS:
        multiply_few([QuantGemm(linear, mixed[i], rkv[i]) for i, linear in enumerate(linears)], low)
    else:
        _rkv_quantised(layer, mixed, rkv)
        multiply(low)


def _project_batched(layer: CudaLayer, mixed: Tensor | QuantisedMix, side_streams: SideStreams) -> Projections:
    """Batched products (cuBLAS) over the stacked maps; low ranks and gate on streams of their own beside.

    All memory is taken on the main stream, which waits for the others before any is given back: what is taken on a
    side stream serves no other stream any more.
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


def _rkv_batched(layer: CudaLayer, mixed: Tensor | QuantisedMix, rkv: Tensor) -> None:
    """r, k, v of mixed [6, T, C] -> rkv [3, T, C], of many rows."""
    if layer.rkv is not None and isinstance(mixed, Tensor):
        torch.bmm(mixed[:3], layer.rkv.transpose(1, 2), out=rkv)
    else:
        _rkv_quantised(layer, mixed, rkv)


def _own_copy(layer: CudaLayer, v: Tensor) -> Tensor:
    """v of a view; the first layer's, which is kept to the end of the step, by itself: not r, k with it."""
    return v if layer.v_residual is not None else v.clone()
