"""The formula of each kind of adapter, as in the papers and RWKV-PEFT. fp32 in, fp32 out."""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-6


def lora(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return W + s B A for weight [out, in], a [r, in], b [out, r]."""
    return torch.addmm(weight, b, a, alpha=scale)


def dora(weight: Tensor, a: Tensor, b: Tensor, scale: float, magnitude: Tensor) -> Tensor:
    """Return M W' / |W'| with W' = W + s B A for weight [out, in].

    magnitude [1, in]: norms of columns (RWKV-PEFT); [out, 1]: norms of rows (PEFT).
    """
    moved = lora(weight, a, b, scale)
    norms: Tensor = torch.linalg.vector_norm(moved, dim=0 if magnitude.shape[0] == 1 else 1, keepdim=True)
    return moved * (magnitude / (norms + EPSILON))


def pissa(weight: Tensor, a: Tensor, b: Tensor, scale: float, first_a: Tensor, first_b: Tensor) -> Tensor:
    """Return W + s (B A - B0 A0) for weight [out, in]: the trained pair replaces the initial one."""
    return lora(lora(weight, a, b, scale), first_a, first_b, -scale)


def bone(weight: Tensor, blocks: Tensor, scale: float) -> Tensor:
    """Return W + s (W_blk G + G) for each square block W_blk of weight [out, in].

    blocks G [in / r, r, r]: one per block column.
    """
    rank = blocks.shape[-1]
    split = weight.view(weight.shape[0] // rank, rank, weight.shape[1] // rank, rank).transpose(1, 2)
    change = split @ blocks + blocks
    return weight + scale * change.transpose(1, 2).reshape(weight.shape)


def miss(weight: Tensor, shard: Tensor, scale: float) -> Tensor:
    """Return W + s D^T for every r inputs of weight [out, in]; the last group may be shorter.

    shard D [r, out]
    """
    times = -(-weight.shape[1] // shard.shape[0])
    return weight + scale * shard.T.repeat(1, times)[:, : weight.shape[1]]
