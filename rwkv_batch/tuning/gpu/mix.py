"""Triton kernels for the residual stream: layer norm with token shift, and the squared ReLU."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

Arg: TypeAlias = tl.tensor
_ROWS = 8
"""Tokens of a program. It reads one more, whose norm the first token mixes in."""
_EPS = tl.constexpr(1e-5)
_BLOCK = 4096


@triton.jit
def _mix_kernel(
    x_in: Arg, y_in: Arg, begins: Arg, norm: Arg, mixes: Arg, x_out: Arg, outputs: Arg, stats: Arg, tokens: Arg,
    width: Arg, rows: tl.constexpr, block: tl.constexpr, count: tl.constexpr,
) -> None:  # fmt: skip
    """Write x + y, and mixes of its norm with the token before, [count, tokens, width]. stats: mean, 1/deviation."""
    start = tl.program_id(0) * rows
    channel = tl.arange(0, block)
    mask = channel < width
    weight = tl.load(norm + channel, mask, 0.0)
    bias = tl.load(norm + width + channel, mask, 0.0)
    before = tl.zeros((block,), tl.float32)
    for step in range(rows + 1):
        token = start + step - 1
        if token >= 0 and token < tokens:
            at = token.to(tl.int64) * width + channel
            x = tl.load(x_in + at, mask, 0.0) + tl.load(y_in + at, mask, 0.0).to(tl.float32)
            mean = tl.sum(x, 0) / width
            centred = tl.where(mask, x - mean, 0.0)
            inverse = 1 / tl.sqrt(tl.sum(centred * centred, 0) / width + _EPS)
            h = centred * inverse * weight + bias
            if step > 0:
                tl.store(x_out + at, x, mask)
                tl.store(stats + token * 2, mean)
                tl.store(stats + token * 2 + 1, inverse)
                d = before * (1 - tl.load(begins + token).to(tl.float32)) - h
                for n in tl.static_range(count):
                    mixed = h + d * tl.load(mixes + n * width + channel, mask, 0.0)
                    out = outputs + n * tokens.to(tl.int64) * width + at
                    tl.store(out, mixed.to(outputs.dtype.element_ty), mask)
            before = h


@triton.jit
def _mix_gradient_kernel(
    x_in: Arg, begins: Arg, norm: Arg, mixes: Arg, stats: Arg, grad_in: Arg, d0: Arg, d1: Arg, d2: Arg, d3: Arg,
    d4: Arg, d5: Arg, dx_out: Arg, dy_out: Arg, tokens: Arg, width: Arg, rows: tl.constexpr, block: tl.constexpr,
    count: tl.constexpr,
) -> None:  # fmt: skip
    """Write the gradient of x + y in fp32 and bf16, from that of the sum itself and those of the mixes, d0 to d5."""
    start = tl.program_id(0) * rows
    channel = tl.arange(0, block)
    mask = channel < width
    weight = tl.load(norm + channel, mask, 0.0)
    grads = (d0, d1, d2, d3, d4, d5)
    after = tl.zeros((block,), tl.float32)
    for step in range(rows + 1):
        token = start + rows - step
        if token < tokens:
            at = token.to(tl.int64) * width + channel
            own = tl.zeros((block,), tl.float32)
            shifted = tl.zeros((block,), tl.float32)
            for n in tl.static_range(count):
                d = tl.load(grads[n] + at, mask, 0.0).to(tl.float32)
                part = d * tl.load(mixes + n * width + channel, mask, 0.0)
                own += d - part
                shifted += part
            if step > 0:
                inverse = tl.load(stats + token * 2 + 1)
                x = tl.load(x_in + at, mask, 0.0)
                hat = tl.where(mask, (x - tl.load(stats + token * 2)) * inverse, 0.0)
                g = (own + after) * weight
                dx = (g - tl.sum(g, 0) / width - hat * (tl.sum(g * hat, 0) / width)) * inverse
                dx += tl.load(grad_in + at, mask, 0.0)
                tl.store(dx_out + at, dx, mask)
                tl.store(dy_out + at, dx.to(dy_out.dtype.element_ty), mask)
            after = shifted * (1 - tl.load(begins + token).to(tl.float32))


@triton.jit
def _square_kernel(
    x_in: Arg,
    grad_in: Arg,
    output: Arg,
    size: Arg,
    block: tl.constexpr,
    is_backward: tl.constexpr,
) -> None:
    """Write relu(x)^2, or its gradient."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    x = tl.maximum(tl.load(x_in + at, at < size, 0.0).to(tl.float32), 0.0)
    y = x * x
    if is_backward:
        y = 2 * x * tl.load(grad_in + at, at < size, 0.0).to(tl.float32)
    tl.store(output + at, y.to(output.dtype.element_ty), at < size)


def _grid(tokens: int, width: int) -> tuple[tuple[int], dict[str, int]]:
    block = triton.next_power_of_2(width)
    return (triton.cdiv(tokens, _ROWS),), {"rows": _ROWS, "block": block, "num_warps": min(16, max(1, block // 256))}


class ShiftedNorm(torch.autograd.Function):
    """Adds y [tokens, C] to the residual stream x and mixes its norm with the token before.

    Returns x + y in fp32 and one bf16 tensor for each row of `mixes` [1 to 6, C].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, begins: Tensor, norm: Tensor, mixes: Tensor) -> tuple[Tensor, ...]:
        """norm [2, C]: weight and bias. begins [tokens]."""
        tokens, width = x.shape
        count = len(mixes)
        total, stats = torch.empty_like(x), x.new_empty(tokens, 2)
        outputs = [torch.empty_like(y) for _ in range(1)] if count == 1 else list(y.new_empty(count, *y.shape))
        grid, options = _grid(tokens, width)
        _mix_kernel[grid](x, y, begins, norm, mixes, total, outputs[0], stats, tokens, width, count=count, **options)
        ctx.save_for_backward(total, begins, norm, mixes, stats)
        return total, *outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x in fp32 and of y, [tokens, C]."""
        x, begins, norm, mixes, stats = ctx.saved_tensors
        mixed = [one.contiguous() for one in grads[1:]]
        dx, dy = torch.empty_like(x), torch.empty_like(mixed[0])
        grid, options = _grid(*x.shape)
        six = mixed + mixed[:1] * (6 - len(mixed))
        _mix_gradient_kernel[grid](
            x, begins, norm, mixes, stats, grads[0].contiguous(), *six, dx, dy, *x.shape, count=len(mixes), **options
        )
        return dx, dy, None, None, None


class SquaredRelu(torch.autograd.Function):
    """Computes relu(x)^2 of a bf16 tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """x: [tokens, channels]"""
        ctx.save_for_backward(x)
        return _squared(x, x, False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """grads: one, [tokens, channels]"""
        return _squared(ctx.saved_tensors[0], grads[0].contiguous(), True)


def _squared(x: Tensor, grad: Tensor, is_backward: bool) -> Tensor:
    output = torch.empty_like(x)
    _square_kernel[(triton.cdiv(x.numel(), _BLOCK),)](x, grad, output, x.numel(), _BLOCK, is_backward, num_warps=8)
    return output
