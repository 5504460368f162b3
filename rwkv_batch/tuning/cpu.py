"""The training layer on CPUs: C++ functions between the matrix products. `tuning.fused` has the layer."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from native import build
from rwkv_batch.kernels.cpu import training
from rwkv_batch.model.state import HEAD_SIZE
from rwkv_batch.tuning.fused import FusedTrainingModel, Kernels

_RAW = ("r", "k", "v", "w", "a", "g", "gate", "first_v")
_SINGLE = ("first", "vectors", "output_vectors", "keep", "y")


@functools.cache
def unavailable_reason() -> str | None:
    """Return why the library cannot be built or loaded; None if it can."""
    try:
        training.library()
    except (build.BuildError, OSError) as error:
        return str(error)
    return None


def _pointers(tensors: dict[str, Tensor | None]) -> dict[str, int]:
    """Return the addresses of contiguous tensors [...]; those that are None are left out."""
    return {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None}


class TimeCore(torch.autograd.Function):
    """Computes a time mix's gated output [tokens, C] in fp32, as `tuning.gpu.wkv.TimeCore` does.

    Keeps its inputs, the recurrence's outputs, and the states before each chunk.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        """given: as of `tuning.gpu.wkv.TimeCore`, all in fp32: tensors [tokens, C] of _RAW, then the single ones."""
        raw = [None if one is None else one.contiguous() for one in given[: len(_RAW)]]
        first, vectors, output_vectors, keep = given[len(_RAW) : len(_RAW) + 4]  # a CPU needs no pacer
        r = given[0]
        heads, (rows, chunks) = r.shape[1] // HEAD_SIZE, keep.shape
        y, out = torch.empty_like(r), torch.empty_like(r)
        states = r.new_empty(rows, heads, chunks, HEAD_SIZE, HEAD_SIZE)
        single = (first, vectors, output_vectors, keep, y)
        pointers = _pointers(dict(zip((*_RAW, *_SINGLE), (*raw, *single), strict=True)))
        sizes = {"rows": rows, "chunks": chunks, "heads": heads, "threads": torch.get_num_threads()}
        training.library().training_core_forward(
            training.CoreArgs(**pointers, states=states.data_ptr(), out=out.data_ptr(), **sizes)
        )
        ctx.save_for_backward(*raw, *single, states)
        ctx.sizes = sizes
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the products [tokens, C], of layer 0's v, and of `first`."""
        *saved, states = ctx.saved_tensors
        named = dict(zip((*_RAW, *_SINGLE), saved, strict=True))
        grad, first = grads[0].contiguous(), named["first"]
        found: dict[str, Tensor | None] = {}
        if ctx.needs_input_grad[0]:
            found = {f"d{name}": None if named[name] is None else torch.empty_like(grad) for name in _RAW}
        dfirst = None if first is None else first.new_empty(ctx.sizes["rows"], *first.shape)
        made = _pointers({**named, **found, "states": states, "grad": grad, "dfirst": dfirst})
        training.library().training_core_backward(training.CoreArgs(**made, **ctx.sizes))
        of_raw = [found.get(f"d{name}") for name in _RAW]
        return *of_raw, None if dfirst is None else dfirst.sum(0), None, None, None, None


class ShiftedNorm(torch.autograd.Function):
    """Adds y [tokens, C] to the residual stream x and mixes its norm with the token before.

    Returns x + y and a tensor for each row of `mixes` [1 to 6, C].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, begins: Tensor, norm: Tensor, mixes: Tensor) -> tuple[Tensor, ...]:
        """norm [2, C]: weight and bias. begins [tokens]."""
        x, y, (tokens, width), count = x.contiguous(), y.contiguous(), x.shape, len(mixes)
        total, stats, outputs = torch.empty_like(x), x.new_empty(tokens, 2), x.new_empty(count, tokens, width)
        given = {"begins": begins, "norm": norm, "mixes": mixes, "total": total, "stats": stats}
        sizes = {"tokens": tokens, "width": width, "count": count, "threads": torch.get_num_threads()}
        training.library().training_norm_forward(
            training.NormArgs(**_pointers({**given, "x": x, "y": y, "outputs": outputs}), **sizes)
        )
        ctx.save_for_backward(*given.values())
        ctx.names, ctx.sizes = tuple(given), sizes
        return total, *outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of x + y, [tokens, C], twice."""
        given = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        grad, *mixed = (one.contiguous() for one in grads)
        dx = torch.empty_like(grad)
        args = training.NormArgs(**_pointers({**given, "grad": grad, "dx": dx}), **ctx.sizes)
        for i, one in enumerate(mixed):
            args.grads[i] = one.data_ptr()
        training.library().training_norm_backward(args)
        return dx, dx, None, None, None


class SquaredRelu(torch.autograd.Function):
    """Computes relu(x)^2."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """x: [tokens, channels]"""
        positive = torch.relu(x)
        ctx.save_for_backward(positive)
        return positive.square()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """grads: one, [tokens, channels]"""
        gradient: Tensor = grads[0] * ctx.saved_tensors[0]
        return gradient.mul_(2)


class CpuTrainingModel(FusedTrainingModel):
    """Trains states and LoRAs in fp32."""

    kernels = Kernels(ShiftedNorm, SquaredRelu, TimeCore)
