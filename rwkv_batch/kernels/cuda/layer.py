"""One layer's tensors for the CUDA kernels: weights of one shape stacked, ranks padded, mixes in fp16."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from rwkv_batch.kernels.cuda.hopper_gemm import FP16_SPLITS, TILE_K
from rwkv_batch.kernels.cuda.quant_linear import CudaQuantLinear
from rwkv_batch.kernels.cuda.w8a8.linear import CudaInt8Linear
from rwkv_batch.model.layer import MIX_ORDER, Layer, Linear
from rwkv_batch.model.mmap_release import release

RANK_STEP = 64
DETERMINISTIC_STEP = TILE_K * FP16_SPLITS
"""Step of the widths whose low ranks have one order of sums."""
TRANSPOSED_ROWS = 512
"""Rows that are on the device twice while a weight is transposed."""
GROUPED_ORDER = "rkvwag"
"""Order of the time mix's inputs: adjacent ones are multiplied by one batched GEMM."""


@dataclass(slots=True)
class CudaLayer(Layer):
    """A layer whose weights are views of a few stacked tensors. D: the padded rank of v, w, a.

    Quantised matrices stay in their Linears.
    """

    rkv: Tensor | None
    """[3, C, C]; None: quantised"""
    low_in: Tensor
    """[3, D, C] of v, w, a; [2, D, C] of w, a in layer 0"""
    low_out: Tensor
    """[3, C, D] likewise"""
    gate_in: Tensor
    """[Dg, C]"""
    gate_out: Tensor
    """[C, Dg]"""
    value_rows: Tensor | None
    """[4C, C]: ffn.value transposed, so that rows with zero input are not read; None: quantised"""
    is_deterministic: bool
    """all steps add a row's products in the same order"""


def prepare_layer(layer: Layer, is_deterministic: bool = False) -> CudaLayer:
    """Moves a loaded layer's weights into stacked tensors.

    The tensors are on the device of the layer's vectors. Its Linears become views of them, so no weight is held
    twice. Raises ValueError for weights of another type, or for a width that a deterministic layer does not take.
    """
    width, device = layer.att_mix.shape[1], layer.att_mix.device
    small = isinstance(layer.receptance, CudaQuantLinear | CudaInt8Linear)
    given = layer.w1.weight.dtype if small else layer.receptance.weight.dtype
    if given != torch.float16:
        raise ValueError(f"the cuda kernels support fp16 weights only, got {given}; use --kernels naive")
    if is_deterministic and width % DETERMINISTIC_STEP:
        raise ValueError(
            f"the model's width is {width}; on a GPU --deterministic takes multiples of {DETERMINISTIC_STEP}; omit it"
        )
    if isinstance(layer.ffn_key, CudaInt8Linear) and isinstance(layer.ffn_value, CudaInt8Linear):
        layer.ffn_key.feed(layer.ffn_value)
    low = [(layer.w1, layer.w2), (layer.a1, layer.a2)]
    if layer.v_residual is not None:
        low.insert(0, (layer.v_residual.v1, layer.v_residual.v2))
    rank = _round_up(max(down.weight.shape[0] for down, _ in low))
    gate_rank = _round_up(layer.g1.weight.shape[0])
    rkv = value_rows = None
    if not small:
        _stack([layer.output], width, width, device)
        _stack([layer.ffn_key], len(layer.ffn_key.weight), width, device)
        rkv = _stack([layer.receptance, layer.key, layer.value], width, width, device)
        value_rows = _transpose(layer.ffn_value, device)
    values = {field.name: getattr(layer, field.name) for field in fields(layer)}
    values["att_mix"] = layer.att_mix[[MIX_ORDER.index(name) for name in GROUPED_ORDER]].half().contiguous()
    values["ffn_mix"] = layer.ffn_mix.half().contiguous()
    return CudaLayer(
        **values,
        rkv=rkv,
        low_in=_stack([down for down, _ in low], rank, width, device),
        low_out=_stack([up for _, up in low], width, rank, device),
        gate_in=_stack([layer.g1], gate_rank, width, device)[0],
        gate_out=_stack([layer.g2], width, gate_rank, device)[0],
        value_rows=value_rows,
        is_deterministic=is_deterministic,
    )


def _stack(linears: list[Linear], outputs: int, inputs: int, device: torch.device) -> Tensor:
    """Stacks weights into [n, outputs, inputs], zero-padded; the Linears become views of it."""
    stack = torch.zeros(len(linears), outputs, inputs, dtype=torch.float16, device=device)
    for linear, place in zip(linears, stack, strict=True):
        weight = linear.weight
        linear.weight = place[: weight.shape[0], : weight.shape[1]]
        linear.weight.copy_(weight)
        release(weight)
    return stack


def _transpose(linear: Linear, device: torch.device) -> Tensor:
    """Returns the weight transposed, [inputs, outputs]; the Linear becomes a view of it."""
    weight = linear.weight
    transposed = torch.empty(weight.shape[1], weight.shape[0], dtype=torch.float16, device=device)
    for start in range(0, len(weight), TRANSPOSED_ROWS):
        transposed[:, start : start + TRANSPOSED_ROWS] = weight[start : start + TRANSPOSED_ROWS].to(device).T
    linear.weight = transposed.T
    release(weight)
    return transposed


def _round_up(rank: int) -> int:
    return (rank + RANK_STEP - 1) // RANK_STEP * RANK_STEP
