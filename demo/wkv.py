"""The WKV-7 recurrence in plain PyTorch: token by token, and in chunks for training on whole sequences."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 16


def wkv_loop(
    r: Tensor, decay: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence as it is written: S <- S*w + (S a) b^T + v k^T, y = S r.

    Inputs are [batch, time, heads, 64], `decay` is log w; `state` is [batch, heads, 64 values, 64 keys].
    Returns y and the last state.
    """
    ys = []
    for t in range(r.shape[1]):
        removed = (state @ a[:, t, :, :, None]) * b[:, t, :, None, :]
        state = state * decay[:, t, :, None, :].exp() + removed + v[:, t, :, :, None] * k[:, t, :, None, :]
        ys.append((state @ r[:, t, :, :, None]).squeeze(-1))
    return torch.stack(ys, 1), state


def wkv_chunked(
    r: Tensor, decay: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, keep: Tensor, first: Tensor | None = None
) -> Tensor:
    """The same y, sixteen tokens at once; `keep` [batch, chunks] is 0 where a document begins.

    A document begins with the state `first` [heads, 64 values, 64 keys], zero without one.

    Within a chunk the state is written as S diag(W), W the running product of decays, so that one unit triangular
    system gives what every token removes; between chunks the state moves by one affine map each. The decay is at
    least exp(-0.6065) a token, so 1/W stays below 1.7e4 in a chunk: safe in fp32.
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
    for c in range(chunks):
        state = state * kept[c] + begun * (1 - kept[c])
        starts.append(state)
        state = torch.baddbmm(add[c], state, move[c])
    start = torch.stack(starts).view(-1, size, size)
    y = torch.bmm(r + torch.bmm(rb, from_state), start.transpose(1, 2)) + torch.bmm(rb, own) + torch.bmm(rk, v)
    return y.view(chunks, batch, heads, CHUNK, size).permute(1, 0, 3, 2, 4).reshape(batch, time, heads, size)
