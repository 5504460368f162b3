"""Operations that the forwards of all versions share, in plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rwkv_batch.model.layer import Norm
from rwkv_batch.model.step_inputs import StepInputs


def layer_norm(x: Tensor, norm: Norm) -> Tensor:
    """LayerNorm over the last axis, eps 1e-5: [..., C] of any float dtype -> [..., C] fp32."""
    return torch.nn.functional.layer_norm(x.float(), x.shape[-1:], norm.weight, norm.bias, 1e-5)


def token_shift(h: Tensor, shift: Tensor, inputs: StepInputs) -> Tensor:
    """Return the token before each of h [T, C] fp32: [T, C].

    shift [num_slots, C] has the one before each row's first token; updated.
    """
    previous = torch.empty_like(h)
    previous[1:] = h[:-1]
    previous[inputs.cu_seqlens[:-1]] = shift[inputs.read_slots].float()
    shift[inputs.write_slots] = h[inputs.cu_seqlens[1:] - 1].to(shift.dtype)
    return previous


def longest_first(inputs: StepInputs) -> tuple[Tensor, Iterator[Tensor]]:
    """Return the rows [B] int64 from longest to shortest, and per position the tokens [n] there.

    The n tokens belong to the first n rows in that order.
    """
    starts = inputs.cu_seqlens[:-1]
    lengths = inputs.cu_seqlens[1:] - starts
    order = torch.argsort(lengths, descending=True, stable=True)
    return order, _positions(starts[order], lengths[order].tolist())


def _positions(starts: Tensor, lengths: list[int]) -> Iterator[Tensor]:
    alive = len(lengths)
    for position in range(lengths[0]):
        while lengths[alive - 1] <= position:
            alive -= 1
        yield starts[:alive] + position
