"""The entrance of a layer's time mix on a CUDA device: r, k, v and the low ranks of the six mixed inputs.

Up to 256 rows: two launches of our own, the second for the low ranks' exits. More: r, k, v by a product of many rows,
the low ranks behind it by two launches of our own, or beside it by cuBLAS on streams of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rwkv_batch.kernels.activation import Activation
from rwkv_batch.kernels.cuda_codes import launch_codes, map_of_halves
from rwkv_batch.kernels.cuda_layer import CudaLayer
from rwkv_batch.kernels.cuda_library import cuda_pointer, library
from rwkv_batch.kernels.cuda_linear import Map, is_grouped, multiply
from rwkv_batch.kernels.cuda_quant import (
    MAX_MIXED_ROWS,
    CodeMap,
    CudaQuantLinear,
    QuantMap,
    multiply_codes,
    multiply_few,
    multiply_into,
    quantise_rows,
)
from rwkv_batch.kernels.cuda_wide import MAX_TALL_ROWS, fits_wide_fp8, has_wide, launch_wide
from rwkv_batch.model.layer import Projections

SCALE_STEP = 4
"""Scales of rows begin at 16 bytes in a product."""
Sides = tuple[torch.cuda.Stream, torch.cuda.Stream]


def project(layer: CudaLayer, mixed: Tensor, sides: Callable[[], Sides]) -> Projections:
    """Of mixed [6, T, C] in the order r, k, v, w, a, g. `sides`: makes or finds two streams beside the current one."""
    if _is_grouped_entrance(layer, mixed.shape[1]):
        return _project_grouped(layer, mixed)
    if _is_tall_entrance(layer, mixed):
        return _project_tall(layer, mixed)
    return _project_batched(layer, mixed, sides())


def _is_grouped_entrance(layer: CudaLayer, tokens: int) -> bool:
    """Whether kernels of our own take all maps of the entrance, few launches in all."""
    if layer.rkv is not None:
        return is_grouped(tokens, layer.rkv[0])
    linear = layer.receptance
    assert isinstance(linear, CudaQuantLinear), "maps without a stack are in small codes"
    packed = linear.packed
    as_codes = linear.takes_codes(packed.codes.device) and fits_wide_fp8(
        tokens, packed.rows, packed.columns, packed.codes.device
    )
    return (linear.takes_halves(tokens) or as_codes) and is_grouped(tokens, layer.low_in[0])


def _is_tall_entrance(layer: CudaLayer, mixed: Tensor) -> bool:
    """Whether the low ranks are launches of our own behind r, k, v instead of cuBLAS's beside them.

    Not where our own kernel multiplies fp8 codes: its tiles leave processors idle, on which those run.
    """
    tokens, device = mixed.shape[1], mixed.device
    if tokens > MAX_TALL_ROWS or not has_wide(device):
        return False
    if layer.rkv is not None:
        return True
    linear = layer.receptance
    assert isinstance(linear, CudaQuantLinear), "maps without a stack are in small codes"
    packed = linear.packed
    return not (linear.takes_codes(device) and fits_wide_fp8(tokens, packed.rows, packed.columns, device))


def _quantised_rkv(layer: CudaLayer) -> list[CudaQuantLinear]:
    """r, k, v of a layer in small codes; none of another."""
    return [m for m in (layer.receptance, layer.key, layer.value) if isinstance(m, CudaQuantLinear)]


def _rkv_in_codes(layer: CudaLayer, mixed: Tensor, rkv: Tensor) -> None:
    """r, k, v of mixed [3, T, C] -> rkv [3, T, C], of matrices in small codes."""
    _, tokens, width = rkv.shape
    linears = _quantised_rkv(layer)
    first = linears[0]
    if first.takes_halves(tokens) or not first.takes_codes(rkv.device) or tokens % SCALE_STEP:
        multiply_into([QuantMap(linear, mixed[i], rkv[i]) for i, linear in enumerate(linears)])
        return
    codes, scales = quantise_rows(mixed.view(-1, width))
    rows = [slice(i * tokens, (i + 1) * tokens) for i in range(3)]
    multiply_codes([CodeMap(linear, codes[rows[i]], scales[rows[i]], rkv[i]) for i, linear in enumerate(linears)])


def _project_grouped(layer: CudaLayer, mixed: Tensor) -> Projections:
    """Every map of the entrance in one launch or two, the low ranks' exits in another."""
    _, tokens, width = mixed.shape
    rkv = mixed.new_empty(3, tokens, width)
    low = LowRanks.of(layer, mixed)
    _enter(layer, mixed, rkv, low.entrances)
    multiply(low.exits)
    return low.projections(*rkv.unbind())


def _project_tall(layer: CudaLayer, mixed: Tensor) -> Projections:
    """r, k, v as `_project_batched` has them; the low ranks as `_project_grouped` has them, behind."""
    _, tokens, width = mixed.shape
    rkv = mixed.new_empty(3, tokens, width)
    _rkv_batched(layer, mixed, rkv)
    low = LowRanks.of(layer, mixed)
    for maps in (low.entrances, low.exits):
        launch_wide([(m.weight, m.x, m.y, m.activation) for m in maps], transposed=False)
    return low.projections(rkv[0], rkv[1], _kept(layer, rkv[2]))


@dataclass(slots=True)
class LowRanks:
    """The low ranks and the gate of a layer as maps of two launches, and where their results go."""

    entrances: list[Map]
    exits: list[Map]
    out: Tensor
    """[3 or 4, T, C]: (v,) w, a, gate"""

    @classmethod
    def of(cls, layer: CudaLayer, mixed: Tensor) -> LowRanks:
        """Over mixed [6, T, C]."""
        _, tokens, width = mixed.shape
        groups, rank, _ = layer.low_in.shape
        low = mixed.new_empty(groups, tokens, rank)
        gate = mixed.new_empty(tokens, len(layer.gate_in))
        out = mixed.new_empty(groups + 1, tokens, width)
        first = 5 - groups
        acts = [Activation.TANH if i == groups - 2 else Activation.NONE for i in range(groups)]
        entrances = [Map(layer.low_in[i], mixed[first + i], low[i], acts[i]) for i in range(groups)]
        exits = [Map(layer.low_out[i], low[i], out[i]) for i in range(groups)]
        return cls(
            [*entrances, Map(layer.gate_in, mixed[5], gate, Activation.SIGMOID)],
            [*exits, Map(layer.gate_out, gate, out[groups])],
            out,
        )

    def projections(self, r: Tensor, k: Tensor, v: Tensor) -> Projections:
        """With r, k, v [T, C] of the same layer."""
        *v_gate, w, a, g = self.out.unbind()
        return Projections(r=r, k=k, v=v, w=w, a=a, g=g, v_gate=v_gate[0] if v_gate else None)


def _enter(layer: CudaLayer, mixed: Tensor, rkv: Tensor, low: list[Map]) -> None:
    """r, k, v and the maps `low` of halves: in one launch where one kernel takes both."""
    if layer.rkv is not None:
        multiply([*(Map(layer.rkv[i], mixed[i], rkv[i]) for i in range(3)), *low])
        return
    linears = _quantised_rkv(layer)
    if not linears[0].is_few(rkv.shape[1]) and linears[0].packed.fits_codes(rkv.shape[1]):
        maps = [m.packed.codes_map(mixed[i], rkv[i]) for i, m in enumerate(linears)]
        launch_codes([*(map_of_halves(m.weight, m.x, m.y, m.activation) for m in low), *maps])
        return
    if linears[0].is_few(rkv.shape[1]) and rkv.shape[1] <= MAX_MIXED_ROWS:
        multiply_few([QuantMap(linear, mixed[i], rkv[i]) for i, linear in enumerate(linears)], low)
        return
    _rkv_in_codes(layer, mixed[:3], rkv)
    multiply(low)


def _project_batched(layer: CudaLayer, mixed: Tensor, sides: Sides) -> Projections:
    """Batched products (cuBLAS) over the stacked maps; low ranks and gate on streams of their own beside.

    All memory is taken on the main stream, which waits for the others before any is given back: what is taken on a
    side stream serves no other stream any more.
    """
    _, tokens, width = mixed.shape
    groups, rank, _ = layer.low_in.shape
    low = mixed.new_empty(groups, tokens, rank)
    out = mixed.new_empty(groups, tokens, width)
    gate = mixed.new_empty(tokens, len(layer.gate_in))
    g = mixed.new_empty(tokens, width)
    rkv = mixed.new_empty(3, tokens, width)
    main = torch.cuda.current_stream()
    for side in sides:
        side.wait_stream(main)
    with torch.cuda.stream(sides[0]):
        torch.bmm(mixed[5 - groups : 5], layer.low_in.transpose(1, 2), out=low)
        decay = low[groups - 2]
        library().call("rwkv_low_rank_act", cuda_pointer(decay), decay.numel(), None, 0)
        torch.bmm(low, layer.low_out.transpose(1, 2), out=out)
    with torch.cuda.stream(sides[1]):
        torch.mm(mixed[5], layer.gate_in.T, out=gate)
        library().call("rwkv_low_rank_act", None, 0, cuda_pointer(gate), gate.numel())
        torch.mm(gate, layer.gate_out.T, out=g)
    _rkv_batched(layer, mixed, rkv)
    for side in sides:
        main.wait_stream(side)
    v_gate, v = out[0] if groups == 3 else None, _kept(layer, rkv[2])
    return Projections(r=rkv[0], k=rkv[1], v=v, w=out[groups - 2], a=out[groups - 1], g=g, v_gate=v_gate)


def _rkv_batched(layer: CudaLayer, mixed: Tensor, rkv: Tensor) -> None:
    """r, k, v of mixed [6, T, C] -> rkv [3, T, C], of many rows."""
    if layer.rkv is not None:
        torch.bmm(mixed[:3], layer.rkv.transpose(1, 2), out=rkv)
    else:
        _rkv_in_codes(layer, mixed[:3], rkv)


def _kept(layer: CudaLayer, v: Tensor) -> Tensor:
    """v of a view; the first layer's, which is kept to the end of the step, by itself: not r, k with it."""
    return v if layer.v_residual is not None else v.clone()
