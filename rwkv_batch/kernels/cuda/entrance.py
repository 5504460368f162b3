"""The entrance of a layer's time mix on a CUDA device: r, k, v and the low ranks of the six mixed inputs.

Up to 256 rows: two launches of our own, the second for the low ranks' exits, or one of halves (wide_entrance.py);
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
from rwkv_batch.kernels.cuda.coded_launch import fits_halves_beside
from rwkv_batch.kernels.cuda.few_rows import MAX_MIXED_ROWS, QuantMap, multiply_few
from rwkv_batch.kernels.cuda.layer import CudaLayer
from rwkv_batch.kernels.cuda.library import LowExits, cuda_pointer, library
from rwkv_batch.kernels.cuda.linear import Map, is_grouped, multiply
from rwkv_batch.kernels.cuda.products import CodeMap, multiply_codes, multiply_into
from rwkv_batch.kernels.cuda.quant_linear import CudaQuantLinear
from rwkv_batch.kernels.cuda.row_codes import SCALE_STEP, CodedMix, RowCodes, UnmixedRow, quantise_rows
from rwkv_batch.kernels.cuda.wide import (
    MAX_TALL_ROWS,
    HalfMap,
    WideShape,
    has_wide,
    launch_wide,
    prepare_wide,
)
from rwkv_batch.kernels.cuda.wide_codes import launch_codes, map_of_halves
from rwkv_batch.kernels.cuda.wide_entrance import fits_entrance, launch_entrance
from rwkv_batch.kernels.cuda.wide_fp8 import fits_wide_fp8
from rwkv_batch.model.layer import Projections

MAX_FEW_ROWS = 4
"""Of one token each, whose low ranks' exits are in the launch of the WKV. 8 rows of fp8 were 1.6 % slower with it."""
EXIT_PIECES = 64
"""Of 16 outputs and EXIT_PIECE_INPUTS inputs of a head: as many as that launch has room for."""
EXIT_PIECE_INPUTS = 64
Sides = tuple[torch.cuda.Stream, torch.cuda.Stream]


def project(layer: CudaLayer, mixed: Tensor | CodedMix | UnmixedRow, sides: Callable[[], Sides]) -> Projections:
    """Of mixed [6, T, C] in the order r, k, v, w, a, g. `sides`: makes or finds two streams beside the current one."""
    if isinstance(mixed, UnmixedRow):
        return _project_unmixed(layer, mixed)
    tokens = len(_low_inputs(mixed)[0])
    if _is_grouped_entrance(layer, tokens):
        return _project_grouped(layer, mixed)
    if _is_tall_entrance(layer, tokens):
        return _project_tall(layer, mixed)
    return _project_batched(layer, mixed, sides())


def _low_inputs(mixed: Tensor | CodedMix) -> Tensor:
    """[4, T, C] fp16: the low ranks' inputs v, w, a, g."""
    return mixed.halves if isinstance(mixed, CodedMix) else mixed[2:]


def _is_grouped_entrance(layer: CudaLayer, tokens: int) -> bool:
    """Whether kernels of our own take all maps of the entrance, few launches in all."""
    if layer.rkv is not None:
        return is_grouped(tokens, layer.rkv[0])
    linear = layer.receptance
    assert isinstance(linear, CudaQuantLinear), "maps without a stack are in small codes"
    if linear.takes_halves(tokens):
        return is_grouped(tokens, layer.low_in[0])
    if _enters_at_once(layer, tokens):
        return True
    return _multiplies_codes(linear, tokens) and is_grouped(tokens, layer.low_in[0])


def _multiplies_codes(linear: CudaQuantLinear, tokens: int) -> bool:
    """Whether our own kernel multiplies so many rows of fp8 codes by it."""
    packed = linear.packed
    return linear.takes_codes(tokens) and fits_wide_fp8(tokens, packed.rows, packed.columns, packed.codes.device)


def _enters_at_once(layer: CudaLayer, tokens: int) -> bool:
    """Whether the low ranks go on the processors that r, k, v leave idle, multiplied as codes by our own kernel.

    Of rows as codes or in two parts.
    """
    linears = _quantised_rkv(layer)
    if not linears or not (linears[0].takes_parts(tokens) or _multiplies_codes(linears[0], tokens)):
        return False
    coded = [WideShape(m.packed.rows, m.packed.columns) for m in linears]
    low = [WideShape(*matrix.shape) for matrix in (*layer.low_in, layer.gate_in)]
    return fits_halves_beside(tokens, coded, low, len(prepare_wide(layer.low_in.device).partial))


def _is_tall_entrance(layer: CudaLayer, tokens: int) -> bool:
    """Whether the low ranks are launches of our own behind r, k, v instead of cuBLAS's beside them.

    Not where our own kernel multiplies fp8 codes: its tiles leave processors idle, on which those run, if not in its
    launch.
    """
    if tokens > MAX_TALL_ROWS or not has_wide(layer.low_in.device):
        return False
    if layer.rkv is not None:
        return True
    linear = layer.receptance
    assert isinstance(linear, CudaQuantLinear), "maps without a stack are in small codes"
    return not _multiplies_codes(linear, tokens)


def _quantised_rkv(layer: CudaLayer) -> list[CudaQuantLinear]:
    """r, k, v of a layer in small codes; none of another."""
    return [m for m in (layer.receptance, layer.key, layer.value) if isinstance(m, CudaQuantLinear)]


def _rkv_in_codes(layer: CudaLayer, mixed: Tensor | CodedMix, rkv: Tensor, low: LowRanks | None = None) -> None:
    """r, k, v of mixed [6, T, C] -> rkv [3, T, C], of matrices in small codes; `low`: where it `_enters_at_once`."""
    linears = _quantised_rkv(layer)
    tokens = rkv.shape[1]
    if isinstance(mixed, Tensor) and not (linears[0].takes_codes(tokens) or linears[0].takes_parts(tokens)):
        multiply_into([QuantMap(linear, mixed[i], rkv[i]) for i, linear in enumerate(linears)])
        return
    if isinstance(mixed, CodedMix):
        rows = [mixed[i] for i in range(3)]
    else:
        in_parts = linears[0].takes_parts(tokens)
        rows = [linears[0].row_parts(mixed[i]) for i in range(3)] if in_parts else _row_codes(mixed)
    maps = [CodeMap(linear, *rows[i], rkv[i]) for i, linear in enumerate(linears)]
    if low is None:
        multiply_codes(maps)
    else:
        multiply_codes(maps, _half_maps(low.entrances), _half_maps(low.exits))


def _row_codes(mixed: Tensor) -> list[RowCodes]:
    """r's, k's and v's of mixed [6, T, C], which were wanted as halves too."""
    _, tokens, width = mixed.shape
    if tokens % SCALE_STEP:
        return [quantise_rows(mixed[i]) for i in range(3)]
    codes, scales = quantise_rows(mixed[:3].view(-1, width))
    assert scales is not None, "codes, not parts"
    return [RowCodes(*part) for part in zip(codes.split(tokens), scales.split(tokens), strict=True)]


def _project_grouped(layer: CudaLayer, mixed: Tensor | CodedMix) -> Projections:
    """Every map of the entrance in one launch or two, the low ranks' exits in another or, beside codes, in the same."""
    inputs = _low_inputs(mixed)
    rkv = torch.empty_like(inputs[:3])
    low = LowRanks.of(layer, inputs)
    if _enters_at_once(layer, len(inputs[0])):
        _rkv_in_codes(layer, mixed, rkv, low)
        return low.projections(*rkv.unbind())
    if _is_one_launch(layer, mixed, low):
        assert layer.rkv is not None and isinstance(mixed, Tensor), "maps of halves"
        whole = [(layer.rkv[i], mixed[i], rkv[i], Activation.NONE) for i in range(3)]
        launch_entrance(whole, _half_maps(low.entrances), _half_maps(low.exits))
        return low.projections(*rkv.unbind())
    _enter(layer, mixed, rkv, low.entrances)
    if layer.rkv is None and len(inputs[0]) <= MAX_FEW_ROWS:
        return low.projections(*rkv.unbind(), pending=True)
    multiply(low.exits)
    return low.projections(*rkv.unbind())


def _is_one_launch(layer: CudaLayer, mixed: Tensor | CodedMix, low: LowRanks) -> bool:
    """Whether r, k, v and the low ranks with their exits, all of halves, are one launch."""
    if layer.rkv is None or not isinstance(mixed, Tensor):
        return False
    weights = ([m.weight for m in maps] for maps in (low.entrances, low.exits))
    return fits_entrance(mixed.shape[1], layer.rkv.unbind(), *weights)


def _project_unmixed(layer: CudaLayer, row: UnmixedRow) -> Projections:
    """As `_project_grouped` has few rows of small codes."""
    rkv = torch.empty_like(row.mix[:3])
    low = LowRanks.of(layer, row.mix[2:])
    maps = [QuantMap(linear, row.mix[i], rkv[i]) for i, linear in enumerate(_quantised_rkv(layer))]
    multiply_few(maps, low.entrances, row.args)
    return low.projections(*rkv.unbind(), pending=True)


def _project_tall(layer: CudaLayer, mixed: Tensor | CodedMix) -> Projections:
    """r, k, v as `_project_batched` has them; the low ranks as `_project_grouped` has them, behind."""
    inputs = _low_inputs(mixed)
    rkv = torch.empty_like(inputs[:3])
    _rkv_batched(layer, mixed, rkv)
    low = LowRanks.of(layer, inputs)
    for maps in (low.entrances, low.exits):
        launch_wide(_half_maps(maps), transposed=False)
    return low.projections(rkv[0], rkv[1], _kept(layer, rkv[2]))


def _half_maps(maps: list[Map]) -> list[HalfMap]:
    return [(m.weight, m.x, m.y, m.activation) for m in maps]


@dataclass(slots=True)
class LowRanks:
    """The low ranks and the gate of a layer as maps of two launches, and where their results go."""

    entrances: list[Map]
    exits: list[Map]
    low: Tensor
    """[2 or 3, T, D]: what (v,) w, a are made of"""
    gate: Tensor
    """[T, Dg]: likewise"""
    out: Tensor
    """[3 or 4, T, C]: (v,) w, a, gate"""

    @classmethod
    def of(cls, layer: CudaLayer, inputs: Tensor) -> LowRanks:
        """Over inputs [4, T, C]: v, w, a, g."""
        _, tokens, width = inputs.shape
        groups, rank, _ = layer.low_in.shape
        low = inputs.new_empty(groups, tokens, rank)
        gate = inputs.new_empty(tokens, len(layer.gate_in))
        out = inputs.new_empty(groups + 1, tokens, width)
        first = 3 - groups
        acts = [Activation.TANH if i == groups - 2 else Activation.NONE for i in range(groups)]
        entrances = [Map(layer.low_in[i], inputs[first + i], low[i], acts[i]) for i in range(groups)]
        exits = [Map(layer.low_out[i], low[i], out[i]) for i in range(groups)]
        return cls(
            [*entrances, Map(layer.gate_in, inputs[3], gate, Activation.SIGMOID)],
            [*exits, Map(layer.gate_out, gate, out[groups])],
            low,
            gate,
            out,
        )

    def projections(self, r: Tensor, k: Tensor, v: Tensor, *, pending: bool = False) -> CudaProjections:
        """With r, k, v [T, C] of the same layer. pending: the exits are still to be multiplied."""
        *v_gate, w, a, g = self.out.unbind()
        low = self if pending else None
        return CudaProjections(r=r, k=k, v=v, w=w, a=a, g=g, v_gate=v_gate[0] if v_gate else None, low=low)

    def exits_in_wkv(self, layer: CudaLayer) -> LowExits | None:
        """The exits as the WKV of few rows takes them; None where it does not."""
        (groups, tokens, rank), gate_rank = self.low.shape, self.gate.shape[1]
        if tokens > MAX_FEW_ROWS or 4 * (groups * rank + gate_rank) > EXIT_PIECES * EXIT_PIECE_INPUTS:
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
            multiply(self.low.exits)
            self.low = None


def finished(p: Projections) -> Projections:
    """The same with all parts written: the exits of the low ranks multiplied, if they have not been."""
    if isinstance(p, CudaProjections):
        p.finish()
    return p


def _enter(layer: CudaLayer, mixed: Tensor | CodedMix, rkv: Tensor, low: list[Map]) -> None:
    """r, k, v and the maps `low` of halves: in one launch where one kernel takes both."""
    if layer.rkv is not None and isinstance(mixed, Tensor):
        multiply([*(Map(layer.rkv[i], mixed[i], rkv[i]) for i in range(3)), *low])
        return
    linears, rows = _quantised_rkv(layer), rkv.shape[1]
    if isinstance(mixed, CodedMix) or linears[0].takes_parts(rows) or not linears[0].takes_halves(rows):
        _rkv_in_codes(layer, mixed, rkv)
        multiply(low)
    elif not linears[0].is_few(rows):
        maps = [m.packed.codes_map(mixed[i], rkv[i]) for i, m in enumerate(linears)]
        launch_codes([*(map_of_halves(m.weight, m.x, m.y, m.activation) for m in low), *maps])
    elif rows <= MAX_MIXED_ROWS:
        multiply_few([QuantMap(linear, mixed[i], rkv[i]) for i, linear in enumerate(linears)], low)
    else:
        _rkv_in_codes(layer, mixed, rkv)
        multiply(low)


def _project_batched(layer: CudaLayer, mixed: Tensor | CodedMix, sides: Sides) -> Projections:
    """Batched products (cuBLAS) over the stacked maps; low ranks and gate on streams of their own beside.

    All memory is taken on the main stream, which waits for the others before any is given back: what is taken on a
    side stream serves no other stream any more.
    """
    inputs = _low_inputs(mixed)
    _, tokens, width = inputs.shape
    groups, rank, _ = layer.low_in.shape
    low = inputs.new_empty(groups, tokens, rank)
    out = inputs.new_empty(groups, tokens, width)
    gate = inputs.new_empty(tokens, len(layer.gate_in))
    g = inputs.new_empty(tokens, width)
    rkv = inputs.new_empty(3, tokens, width)
    main = torch.cuda.current_stream()
    for side in sides:
        side.wait_stream(main)
    with torch.cuda.stream(sides[0]):
        torch.bmm(inputs[3 - groups : 3], layer.low_in.transpose(1, 2), out=low)
        decay = low[groups - 2]
        library().call("rwkv_low_rank_act", cuda_pointer(decay), decay.numel(), None, 0)
        torch.bmm(low, layer.low_out.transpose(1, 2), out=out)
    with torch.cuda.stream(sides[1]):
        torch.mm(inputs[3], layer.gate_in.T, out=gate)
        library().call("rwkv_low_rank_act", None, 0, cuda_pointer(gate), gate.numel())
        torch.mm(gate, layer.gate_out.T, out=g)
    _rkv_batched(layer, mixed, rkv)
    for side in sides:
        main.wait_stream(side)
    v_gate, v = out[0] if groups == 3 else None, _kept(layer, rkv[2])
    return Projections(r=rkv[0], k=rkv[1], v=v, w=out[groups - 2], a=out[groups - 1], g=g, v_gate=v_gate)


def _rkv_batched(layer: CudaLayer, mixed: Tensor | CodedMix, rkv: Tensor) -> None:
    """r, k, v of mixed [6, T, C] -> rkv [3, T, C], of many rows."""
    if layer.rkv is not None and isinstance(mixed, Tensor):
        torch.bmm(mixed[:3], layer.rkv.transpose(1, 2), out=rkv)
    else:
        _rkv_in_codes(layer, mixed, rkv)


def _kept(layer: CudaLayer, v: Tensor) -> Tensor:
    """v of a view; the first layer's, which is kept to the end of the step, by itself: not r, k with it."""
    return v if layer.v_residual is not None else v.clone()
