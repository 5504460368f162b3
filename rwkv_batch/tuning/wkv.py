"""The WKV-7 recurrence in plain PyTorch, 16 tokens at a time."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 16
"""Tokens of a chunk. Documents begin at multiples of it."""


def wkv_chunked(
    r: Tensor, decay: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, keep: Tensor, first: Tensor | None = None
) -> Tensor:
    """Return the outputs y [batch, time, heads, 64] of the WKV recurrence.

        S <- S*w + (S a) b^T + v k^T, y = S r

    Inputs are [batch, time, heads, 64]; `decay` is log w. `keep` [batch, chunks] is False where a document begins:
    there the state is `first` [heads, 64 values, 64 keys], or zero.

    Within a chunk the state is S diag(W), where W is the running product of decays. One unit triangular system then
    yields the removed values of every token. Between chunks the state changes by one affine map. A decay is at least
    exp(-0.6065), so 1/W stays below 1.7e4 in a chunk, which is safe in fp32.
    """
    batch, time, heads, size = r.shape
    chunks = time // CHUNK

    def split(x: Tensor) -> Tensor:
        return (
            x.view(batch, chunks, CHUNK, heads, size)
            .permute(1, 0, 3, 2, 4)
            .reshape(chunks * batch * heads, CHUNK, size)
        )

    r, decay, k, v, a, b = (split(x) for x in (r, decay, k, v, a, b))
    running = decay.cumsum(1)
    inverse = (-running).exp()
    r, a = r * running.exp(), a * (running - decay).exp()
    k, b = k * inverse, b * inverse
    kt, bt = k.transpose(1, 2), b.transpose(1, 2)
    ab = torch.bmm(a, bt).tril(-1)
    ak = torch.bmm(a, kt).tril(-1)
    rb = torch.bmm(r, bt).tril()
    rk = torch.bmm(r, kt).tril()
    # (1 - ab)^-1 of a strictly lower triangle, by squaring: its sixteenth power is zero
    eye = torch.eye(CHUNK, device=r.device, dtype=r.dtype)
    solve, power = eye + ab, torch.bmm(ab, ab)
    for _ in range(2):
        solve, power = solve + torch.bmm(solve, power), torch.bmm(power, power)
    solve = solve + torch.bmm(solve, power)
    from_state, own = torch.bmm(solve, a), torch.bmm(solve, torch.bmm(ak, v))
    last = running[:, -1:, :].exp()
    wide = torch.eye(size, device=r.device, dtype=r.dtype)
    move = (wide + torch.bmm(from_state.transpose(1, 2), b)) * last
    add = (torch.bmm(own.transpose(1, 2), b) + torch.bmm(v.transpose(1, 2), k)) * last
    move = move.view(chunks, batch * heads, size, size)
    add = add.view(chunks, batch * heads, size, size)
    kept = keep.t().repeat_interleave(heads, 1)[:, :, None, None].to(r.dtype)
    state = torch.zeros_like(add[0])
    begun = state if first is None else first.repeat(batch, 1, 1)
    starts = []
    for one_kept, one_add, one_move in zip(kept, add.unbind(), move.unbind(), strict=True):  # one gradient
        state = state * one_kept + begun * (1 - one_kept)
        starts.append(state)
        state = torch.baddbmm(one_add, state, one_move)
    start = torch.stack(starts).view(-1, size, size)
    y = torch.bmm(r + torch.bmm(rb, from_state), start.transpose(1, 2)) + torch.bmm(rb, own) + torch.bmm(rk, v)
    return y.view(chunks, batch, heads, CHUNK, size).permute(1, 0, 3, 2, 4).reshape(batch, time, heads, size)
