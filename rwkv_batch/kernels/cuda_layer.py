"""One layer's tensors as the CUDA kernels want them: maps of one shape stacked, ranks padded, mixes in fp16."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from rwkv_batch.layer import Layer
from rwkv_batch.linear import Linear

RANK_STEP = 64
MIX_ORDER = (0, 2, 3, 1, 4, 5)
"""r, k, v, w, a, g out of r, w, k, v, a, g: neighbours are multiplied by one batched product."""


@dataclass(slots=True)
class CudaLayer(Layer):
    """A layer whose maps are views of a few stacked tensors. D: the ranks of v, w, a padded to a common one."""

    rkv: Tensor
    """[3, C, C]"""
    low_in: Tensor
    """[3, D, C] of v, w, a; [2, D, C] of w, a in layer 0"""
    low_out: Tensor
    """[3, C, D] likewise"""
    gate_in: Tensor
    """[Dg, C]"""
    gate_out: Tensor
    """[C, Dg]"""
    value_rows: Tensor
    """[4C, C]: ffn.value transposed, so that rows whose input is zero need not be read"""


def prepare_layer(layer: Layer) -> CudaLayer:
    """Restack a loaded layer; its Linears become views, so no weight is held twice."""
    if layer.receptance.weight.dtype != torch.float16:
        raise ValueError(
            f"the cuda kernels want fp16 weights, not {layer.receptance.weight.dtype}; use --kernels naive"
        )
    low = [(layer.w1, layer.w2), (layer.a1, layer.a2)]
    if layer.v_residual is not None:
        low.insert(0, (layer.v_residual.v1, layer.v_residual.v2))
    rank = _round_up(max(entrance.weight.shape[0] for entrance, _ in low))
    gate_rank = _round_up(layer.g1.weight.shape[0])
    rkv = _restack([layer.receptance, layer.key, layer.value])
    value_rows = layer.ffn_value.weight.T.contiguous()
    layer.ffn_value.weight = value_rows.T
    values = {field.name: getattr(layer, field.name) for field in fields(layer)}
    values["att_mix"] = layer.att_mix[list(MIX_ORDER)].half().contiguous()
    values["ffn_mix"] = layer.ffn_mix.half().contiguous()
    return CudaLayer(
        **values,
        rkv=rkv,
        low_in=torch.stack([_pad(entrance.weight, rank, 0) for entrance, _ in low]),
        low_out=torch.stack([_pad(exit_.weight, rank, 1) for _, exit_ in low]),
        gate_in=_pad(layer.g1.weight, gate_rank, 0),
        gate_out=_pad(layer.g2.weight, gate_rank, 1),
        value_rows=value_rows,
    )


def _restack(linears: list[Linear]) -> Tensor:
    stacked = torch.stack([linear.weight for linear in linears])
    for linear, weight in zip(linears, stacked, strict=True):
        linear.weight = weight
    return stacked


def _round_up(rank: int) -> int:
    return (rank + RANK_STEP - 1) // RANK_STEP * RANK_STEP


def _pad(weight: Tensor, size: int, axis: int) -> Tensor:
    """Zeros up to `size` along an axis."""
    missing = size - weight.shape[axis]
    padding = (0, missing) if axis == 1 else (0, 0, 0, missing)
    return torch.nn.functional.pad(weight, padding).contiguous()
