"""Autograd of a time mix between its matrix products: WKV inputs, the recurrence, head norm, bonus and gate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rwkv_batch.model.state import HEAD_SIZE
from rwkv_batch.tuning.gpu.wkv_kernels import gradient_kernel, output_kernel, scan_kernel, tile_kernel
from rwkv_batch.tuning.pacing import Pacer
from rwkv_batch.tuning.wkv import CHUNK

_PART = 32
"""Values of a head that one program of the scan has."""
_TILE_WARPS, _GRADIENT_WARPS = 2, 4
_SCAN_WARPS = 4


class TimeCore(torch.autograd.Function):
    """Computes a time mix's gated output [tokens, C] in bf16.

    Keeps its inputs and the recurrence's outputs; the backward computes the rest again.
    """

    @staticmethod
    def forward(
        ctx: Any, r: Tensor, k: Tensor, v: Tensor, w: Tensor, a: Tensor, g: Tensor, gate: Tensor | None,
        first_v: Tensor | None, first: Tensor | None, vectors: Tensor, output_vectors: Tensor, keep: Tensor,
        pacer: Pacer | None = None,
    ) -> Tensor:  # fmt: skip
        """r, k, v, w, a, g, gate: products [tokens, C]; first_v: layer 0's v, fp32.

        first [heads, 64, 64] or None. vectors [5, C]: w0, a0, v0, k_k, k_a. output_vectors [3, C]: ln_x's and r_k.
        keep [rows, tiles] is False where a document begins.
        """
        raw = (k, v, w, a, gate, first_v)
        tiles, heads = len(r) // CHUNK, r.shape[1] // HEAD_SIZE
        p, o, kd, bd, v_final, end, rt, y0 = _buffers(r, tiles)
        rb = r.new_empty(tiles, heads, CHUNK, CHUNK)
        none = (None,) * 9
        tile_kernel[(tiles, heads)](
            r, *raw, vectors, p, o, kd, bd, v_final, end, rt, rb, y0, *none, heads, first_v is not None, False,
            num_warps=_TILE_WARPS,
        )  # fmt: skip
        _end_piece(pacer, "core's tiles", len(r))
        y = torch.empty_like(r)
        scan_kernel[(len(keep), heads, HEAD_SIZE // _PART)](
            p, o, kd, v_final, bd, end, keep, first, None, None, rt, rb, y0, y, keep.shape[1], heads,
            first is not None, False, True, False, _PART, num_warps=_SCAN_WARPS,
        )  # fmt: skip
        output = p  # the scan has read it
        output_kernel[(tiles, heads)](
            y, r, k, v_final, a, g, vectors, output_vectors, output, heads, num_warps=_TILE_WARPS
        )
        ctx.save_for_backward(r, *raw, g, first, y, vectors, output_vectors, keep)
        ctx.pacer = pacer
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the products [tokens, C], of layer 0's v in fp32, and of `first`."""
        r, k, v, w, a, gate, first_v, g, first, y, vectors, output_vectors, keep = ctx.saved_tensors
        grad = grads[0].contiguous()
        raw = (k, v, w, a, gate, first_v)
        tiles, heads = len(r) // CHUNK, r.shape[1] // HEAD_SIZE
        has_first, has_first_v = first is not None, first_v is not None
        p, o, kd, bd, v_final, end, rt, at = _buffers(r, tiles)
        p2, o2, dy, dg = (torch.empty_like(r) for _ in range(4))
        tile_kernel[(tiles, heads)](
            r, *raw, vectors, p, o, kd, bd, v_final, end, rt, None, None, y, g, grad, output_vectors, at, p2, o2, dy,
            dg, heads, has_first_v, True, num_warps=_TILE_WARPS,
        )  # fmt: skip
        _end_piece(ctx.pacer, "core's tiles, backward", len(r))
        grid = (len(keep), heads, HEAD_SIZE // _PART)
        states, after = (r.new_empty(tiles, heads, HEAD_SIZE, HEAD_SIZE) for _ in range(2))
        u, z = torch.empty_like(r), torch.empty_like(r)
        scan_kernel[grid](
            p, o, kd, v_final, bd, end, keep, first, u, states, None, None, None, None, keep.shape[1], heads,
            has_first, False, False, True, _PART, num_warps=_SCAN_WARPS,
        )  # fmt: skip
        _end_piece(ctx.pacer, "core's states, backward", len(r))
        dfirst = first.new_empty(len(keep), *first.shape) if has_first else None
        scan_kernel[grid](
            p2, o2, rt, dy, at, end, keep, dfirst, z, after, None, None, None, None, keep.shape[1], heads,
            has_first, True, False, True, _PART, num_warps=_SCAN_WARPS,
        )  # fmt: skip
        _end_piece(ctx.pacer, "core's scan, backward", len(r))
        found: list[Tensor | None] = [None] * 8
        if ctx.needs_input_grad[0]:
            dr, dk, dv, dw, da, dgate = p, o, kd, bd, p2, o2  # of no more use
            dfirst_v = torch.empty_like(first_v) if has_first_v else None
            gradient_kernel[(tiles, heads)](
                r, *raw, vectors, g, grad, output_vectors, dy, u, z, states, after, dr, dk, dv, dw, da, dgate,
                dfirst_v, heads, has_first_v, num_warps=_GRADIENT_WARPS,
            )  # fmt: skip
            found = [dr, dk, dv, dw, da, dg, dgate if has_first_v else None, dfirst_v]
        return *found, None if dfirst is None else dfirst.sum(0), None, None, None, None


def _end_piece(pacer: Pacer | None, name: str, tokens: int) -> None:
    if pacer is not None:
        pacer.wait(name, tokens)


def _buffers(like: Tensor, tiles: int) -> list[Tensor]:
    """Return five tensors [tokens, C], the tiles' decays [tiles, C] in fp32, and two more."""
    found = [torch.empty_like(like) for _ in range(7)]
    found.insert(5, torch.empty(tiles, like.shape[1], dtype=torch.float32, device=like.device))
    return found
