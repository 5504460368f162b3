"""Triton kernels of the WKV-7 recurrence, forward and backward, with the arithmetic around it.

A tile is 16 tokens of a head, [16, 64]. Per tile, with W the running product of decays and ~ for scaled values:

    r~ = r W, a~ = a W/w, k~ = k/W, b~ = b/W, kd = k~ W_end, bd = b~ W_end
    solve = (1 - tril(a~ b~', -1))^-1
    u = solve a~ S + solve tril(a~ k~', -1) v            removed values
    S <- S W_end + kd' v + bd' u                         S is [64 keys, 64 values]
    y = r~ S + tril(r~ b~') u + tril(r~ k~') v

The backward runs the same scan from the end: z = solve' bd G + solve' tril(r~ b~')' dy and
G <- G W_end + r~' dy + a~' z, where G is the gradient of the state after the tile. All tiles between the scans are
independent. Tensors are [tokens, heads * 64]; `first` and its gradient are [heads, 64 values, 64 keys].
"""

from __future__ import annotations

from typing import TypeAlias

import triton
import triton.language as tl

Arg: TypeAlias = tl.tensor
TILE = tl.constexpr(16)
SIZE = tl.constexpr(64)
_DECAY = tl.constexpr(-0.6065306597126334)
_NORM_EPS = tl.constexpr(64e-5)


@triton.jit
def _times(x: Arg, y: Arg) -> Arg:
    """Product of tiles with fp32 accumulation; fp32 operands are rounded to TF32."""
    return tl.dot(x, y, input_precision="tf32")


@triton.jit
def _wkv_inputs(raw: Arg, vectors: Arg, at: Arg, channel: Arg, width: Arg, has_first_v: tl.constexpr) -> Arg:
    """Return log decay, k, v, -kk, kk*a, and what their gradients need: a, the gate, the raw k and v, 1/norm of kk.

    raw: pointers of k, v, w, a, gate and layer 0's v. vectors: [5, width] of w0, a0, v0, k_k and k_a.
    """
    k_raw = tl.load(raw[0] + at).to(tl.float32)
    v_raw = tl.load(raw[1] + at).to(tl.float32)
    w0, a0 = tl.load(vectors + channel)[None, :], tl.load(vectors + width + channel)[None, :]
    k_k, k_a = tl.load(vectors + 3 * width + channel)[None, :], tl.load(vectors + 4 * width + channel)[None, :]
    decay = _DECAY * tl.sigmoid(w0 + tl.load(raw[2] + at).to(tl.float32))
    a = tl.sigmoid(a0 + tl.load(raw[3] + at).to(tl.float32))
    v, gate, first_v = v_raw, v_raw, v_raw
    if has_first_v:
        gate = tl.sigmoid(tl.load(vectors + 2 * width + channel)[None, :] + tl.load(raw[4] + at).to(tl.float32))
        first_v = tl.load(raw[5] + at).to(tl.float32)
        v = v_raw + (first_v - v_raw) * gate
    kk = k_raw * k_k
    inverse = 1 / tl.maximum(tl.sqrt(tl.sum(kk * kk, 1)), 1e-12)[:, None]
    kk = kk * inverse
    k = k_raw * (1 + (a - 1) * k_a)
    return decay, k, v, -kk, kk * a, a, gate, k_raw, v_raw, first_v, inverse


@triton.jit
def _normed(y: Arg) -> Arg:
    """Return normalised heads [16, 64] and 1/deviation [16, 1]."""
    mean = tl.sum(y, 1)[:, None] / SIZE
    y = y - mean
    inverse = 1 / tl.sqrt(tl.sum(y * y, 1)[:, None] / SIZE + _NORM_EPS)
    return y * inverse, inverse


@triton.jit
def _scaled(decay: Arg, r: Arg, k: Arg, a: Arg, b: Arg) -> Arg:
    """Return r~, a~, k~ and b~, and the factors W, W/w, 1/W and W_end/W."""
    running = tl.cumsum(decay, 0)
    kept, kept_before, grown = tl.exp(running), tl.exp(running - decay), tl.exp(-running)
    shrunk = tl.exp(tl.sum(decay, 0)[None, :] - running)
    return r * kept, a * kept_before, k * grown, b * grown, kept, kept_before, grown, shrunk


@triton.jit
def _inverse(x: Arg) -> Arg:
    """Return (1 - x)^-1 of a strictly lower triangle: its sixteenth power is zero."""
    i = tl.arange(0, TILE)
    found = x + tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    power = _times(x, x)
    found += _times(found, power)
    power = _times(power, power)
    found += _times(found, power)
    power = _times(power, power)
    return found + _times(found, power)


@triton.jit
def tile_kernel(
    r_in: Arg, k_in: Arg, v_in: Arg, w_in: Arg, a_in: Arg, gate_in: Arg, first_v_in: Arg, vectors: Arg,
    p_out: Arg, o_out: Arg, kd_out: Arg, bd_out: Arg, v_out: Arg, end_out: Arg,
    rt_out: Arg, rb_out: Arg, y0_out: Arg,
    y_in: Arg, g_in: Arg, grad_in: Arg, output_vectors: Arg, at_out: Arg, p2_out: Arg, o2_out: Arg, dy_out: Arg,
    dg_out: Arg, heads: Arg,
    has_first_v: tl.constexpr, is_backward: tl.constexpr,
) -> None:  # fmt: skip
    """Prepare the tiles for the scan.

    Outputs: solve a~, solve ak v, kd, bd, v and W_end. Forward: r~, tril(r~ b~') and tril(r~ k~') v. Backward: r~, a~,
    solve' bd and solve' rb' dy, where dy and the gate's gradient come from `grad_in`, that of the layer's output.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    width = heads * SIZE
    i, j = tl.arange(0, TILE), tl.arange(0, SIZE)
    channel = head * SIZE + j
    at = (chunk * TILE + i).to(tl.int64)[:, None] * width + channel[None, :]
    raw = (k_in, v_in, w_in, a_in, gate_in, first_v_in)
    decay, k, v, a, b, _, _, _, _, _, _ = _wkv_inputs(raw, vectors, at, channel, width, has_first_v)
    r = tl.load(r_in + at).to(tl.float32)
    rt, at_, kt, bt, _, _, _, shrunk = _scaled(decay, r, k, a, b)
    kt, bt = tl.trans(kt), tl.trans(bt)
    is_before, is_not_after = i[:, None] > i[None, :], i[:, None] >= i[None, :]
    ab = tl.where(is_before, _times(at_, bt), 0.0)
    ak = tl.where(is_before, _times(at_, kt), 0.0)
    rb = tl.where(is_not_after, _times(rt, bt), 0.0)
    solve = _inverse(ab)
    kind = p_out.dtype.element_ty
    bd = b * shrunk
    tl.store(p_out + at, _times(solve, at_).to(kind))
    tl.store(o_out + at, _times(solve, _times(ak, v)).to(kind))
    tl.store(kd_out + at, (k * shrunk).to(kind))
    tl.store(bd_out + at, bd.to(kind))
    tl.store(v_out + at, v.to(kind))
    tl.store(end_out + chunk * width + channel, tl.exp(tl.sum(decay, 0)))
    tl.store(rt_out + at, rt.to(kind))
    if is_backward:
        y_hat, inverse = _normed(tl.load(y_in + at).to(tl.float32))
        grad = tl.load(grad_in + at).to(tl.float32)
        weight = tl.load(output_vectors + channel)[None, :]
        bias = tl.load(output_vectors + width + channel)[None, :]
        bonus = tl.sum(r * k * tl.load(output_vectors + 2 * width + channel)[None, :], 1)[:, None]
        tl.store(dg_out + at, (grad * (y_hat * weight + bias + bonus * v)).to(kind))
        gx = grad * tl.load(g_in + at).to(tl.float32) * weight
        dy = (gx - tl.sum(gx, 1)[:, None] / SIZE - y_hat * (tl.sum(gx * y_hat, 1)[:, None] / SIZE)) * inverse
        turned = tl.trans(solve)
        tl.store(at_out + at, at_.to(kind))
        tl.store(p2_out + at, _times(turned, bd).to(kind))
        tl.store(o2_out + at, _times(turned, _times(tl.trans(rb), dy)).to(kind))
        tl.store(dy_out + at, dy.to(kind))
    else:
        rk = tl.where(is_not_after, _times(rt, kt), 0.0)
        square = (chunk * heads + head) * TILE * TILE + i[:, None] * TILE + i[None, :]
        tl.store(rb_out + square, rb.to(kind))
        tl.store(y0_out + at, _times(rk, v).to(kind))


@triton.jit
def scan_kernel(
    p_in: Arg, o_in: Arg, k_in: Arg, v_in: Arg, b_in: Arg, end_in: Arg, keep_in: Arg, first: Arg,
    u_out: Arg, states_out: Arg, rt_in: Arg, rb_in: Arg, y0_in: Arg, y_out: Arg, chunks: Arg, heads: Arg,
    has_first: tl.constexpr, is_backward: tl.constexpr, has_y: tl.constexpr, has_states: tl.constexpr,
    part: tl.constexpr,
) -> None:  # fmt: skip
    """Run X <- X W_end + k' v + b' u, u = p X + o over a row's tiles, for `part` values of a head.

    Writes u, and X before each tile if `has_states`, [tiles, heads, 64 keys, 64 values]. The backward begins at the
    last tile and adds X to the gradient of `first`, [rows, heads, 64 values, 64 keys], where a document begins.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    i, j = tl.arange(0, TILE), tl.arange(0, SIZE)
    value = tl.program_id(2) * part + tl.arange(0, part)
    width = heads * SIZE
    states = tl.zeros((SIZE, part), tl.float32)
    begun = tl.zeros((SIZE, part), tl.float32)
    first_at = head * SIZE * SIZE + value[None, :] * SIZE + j[:, None]
    if has_first and not is_backward:
        begun += tl.load(first + first_at)
    kind = p_in.dtype.element_ty
    for step in range(chunks):
        chunk = row * chunks + step
        if is_backward:
            chunk = row * chunks + chunks - 1 - step
        kept = tl.load(keep_in + chunk).to(tl.float32)
        if not is_backward:
            states = states * kept + begun * (1 - kept)
        token = (chunk * TILE + i).to(tl.int64) * width + head * SIZE
        keys, values = token[:, None] + j[None, :], token[:, None] + value[None, :]
        keys_first = token[None, :] + j[:, None]
        narrow = states.to(kind)
        if has_states:
            square = (chunk * heads + head).to(tl.int64) * SIZE * SIZE
            tl.store(states_out + square + j[:, None] * SIZE + value[None, :], narrow)
        u = tl.load(o_in + values).to(tl.float32) + _times(tl.load(p_in + keys), narrow)
        u_narrow = u.to(kind)
        if has_y:
            rb = tl.load(rb_in + (chunk * heads + head) * TILE * TILE + i[:, None] * TILE + i[None, :])
            y = tl.load(y0_in + values).to(tl.float32) + _times(tl.load(rt_in + keys), narrow) + _times(rb, u_narrow)
            tl.store(y_out + values, y.to(y_out.dtype.element_ty))
        else:
            tl.store(u_out + values, u_narrow)
        end = tl.load(end_in + chunk * width + head * SIZE + j)
        states = states * end[:, None] + _times(tl.load(k_in + keys_first), tl.load(v_in + values))
        states += _times(tl.load(b_in + keys_first), u_narrow)
        if is_backward:
            begun += states * (1 - kept)
            states = states * kept
    if has_first and is_backward:
        tl.store(first + row * heads * SIZE * SIZE + first_at, begun)


@triton.jit
def output_kernel(
    y_in: Arg, r_in: Arg, k_in: Arg, v_in: Arg, a_in: Arg, g_in: Arg, vectors: Arg, output_vectors: Arg, output: Arg,
    heads: Arg,
) -> None:  # fmt: skip
    """Write (norm(y) + (r . k . r_k) v) g. k and a are raw, v is final. output_vectors: [3, width], ln_x and r_k."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    width = heads * SIZE
    i, j = tl.arange(0, TILE), tl.arange(0, SIZE)
    channel = head * SIZE + j
    at = (chunk * TILE + i).to(tl.int64)[:, None] * width + channel[None, :]
    y_hat, _ = _normed(tl.load(y_in + at).to(tl.float32))
    y = y_hat * tl.load(output_vectors + channel)[None, :] + tl.load(output_vectors + width + channel)[None, :]
    a = tl.sigmoid(tl.load(vectors + width + channel)[None, :] + tl.load(a_in + at).to(tl.float32))
    k = tl.load(k_in + at).to(tl.float32) * (1 + (a - 1) * tl.load(vectors + 4 * width + channel)[None, :])
    r = tl.load(r_in + at).to(tl.float32)
    bonus = tl.sum(r * k * tl.load(output_vectors + 2 * width + channel)[None, :], 1)[:, None]
    y = (y + bonus * tl.load(v_in + at).to(tl.float32)) * tl.load(g_in + at).to(tl.float32)
    tl.store(output + at, y.to(output.dtype.element_ty))


@triton.jit
def _raw_gradients(
    dk: Arg, da: Arg, db: Arg, a: Arg, rate: Arg, k_raw: Arg, kk_inverse: Arg, vectors: Arg, width: Arg
) -> Arg:
    """Return the gradients of the raw k and a, from those of k, -kk and kk*a; a is -kk, rate is a."""
    k_k, k_a = tl.load(vectors + 3 * width)[None, :], tl.load(vectors + 4 * width)[None, :]
    drate = dk * k_raw * k_a - db * a
    dkk = db * rate - da
    dkk = (dkk - a * tl.sum(dkk * a, 1)[:, None]) * kk_inverse
    return dk * (1 + (rate - 1) * k_a) + dkk * k_k, drate * rate * (1 - rate)


@triton.jit
def gradient_kernel(  # noqa: PLR0915
    r_in: Arg, k_in: Arg, v_in: Arg, w_in: Arg, a_in: Arg, gate_in: Arg, first_v_in: Arg, vectors: Arg,
    g_in: Arg, grad_in: Arg, output_vectors: Arg, dy_in: Arg, u_in: Arg, z_in: Arg, states_in: Arg, grads_in: Arg,
    dr_out: Arg, dk_out: Arg, dv_out: Arg, dw_out: Arg, da_out: Arg, dgate_out: Arg, dfirst_v_out: Arg, heads: Arg,
    has_first_v: tl.constexpr,
) -> None:  # fmt: skip
    """Write the gradients of a tile's raw inputs from dy, u, z, the state before and the gradient of that after."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    width = heads * SIZE
    i, j = tl.arange(0, TILE), tl.arange(0, SIZE)
    channel = head * SIZE + j
    at = (chunk * TILE + i).to(tl.int64)[:, None] * width + channel[None, :]
    square = (chunk * heads + head).to(tl.int64) * SIZE * SIZE + j[:, None] * SIZE + j[None, :]
    raw = (k_in, v_in, w_in, a_in, gate_in, first_v_in)
    decay, k, v, a, b, rate, gate, k_raw, v_raw, first_v, kk_inverse = _wkv_inputs(
        raw, vectors, at, channel, width, has_first_v
    )
    r = tl.load(r_in + at).to(tl.float32)
    rt, at_, kt, bt, kept, kept_before, grown, shrunk = _scaled(decay, r, k, a, b)
    is_before, is_not_after = i[:, None] > i[None, :], i[:, None] >= i[None, :]
    dy, z, u = tl.load(dy_in + at), tl.load(z_in + at), tl.load(u_in + at)
    kind = dy.dtype
    v_narrow = v.to(kind)
    u_turned, v_turned = tl.trans(u), tl.trans(v_narrow)
    drb = tl.where(is_not_after, _times(dy, u_turned), 0.0)
    drk = tl.where(is_not_after, _times(dy, v_turned), 0.0)
    dab = tl.where(is_before, _times(z, u_turned), 0.0)
    dak = tl.where(is_before, _times(z, v_turned), 0.0)
    grads, states = tl.load(grads_in + square), tl.load(states_in + square)
    dend = tl.sum(grads.to(tl.float32) * states.to(tl.float32), 1)[None, :] * tl.exp(tl.sum(decay, 0))[None, :]
    states = tl.trans(states)
    dr = (_times(dy, states) + _times(drb, bt) + _times(drk, kt)) * kept
    da = (_times(z, states) + _times(dab, bt) + _times(dak, kt)) * kept_before
    ak = tl.where(is_before, _times(at_, tl.trans(kt)), 0.0)
    rk = tl.where(is_not_after, _times(rt, tl.trans(kt)), 0.0)
    dv = _times(tl.trans(rk).to(kind), dy) + _times(tl.trans(ak).to(kind), z)
    dv += _times((k * shrunk).to(kind), grads)
    grads = tl.trans(grads)
    db = _times(u, grads) * shrunk
    dk = _times(v_narrow, grads) * shrunk
    dend += tl.sum(b * db + k * dk, 0)[None, :]
    db += (_times(tl.trans(drb), rt) + _times(tl.trans(dab), at_)) * grown
    dk += (_times(tl.trans(drk), rt) + _times(tl.trans(dak), at_)) * grown
    # a decay counts in the running products of its own and of later tokens, but for a's of later ones only
    from_a = a * da
    change = r * dr - k * dk - b * db + from_a
    ddecay = tl.cumsum(change, 0, reverse=True) - from_a + dend
    # the bonus term
    grad = tl.load(grad_in + at).to(tl.float32) * tl.load(g_in + at).to(tl.float32)
    r_k = tl.load(output_vectors + 2 * width + channel)[None, :]
    dbonus = tl.sum(grad * v, 1)[:, None]
    dv += tl.sum(r * k * r_k, 1)[:, None] * grad
    dk += dbonus * r * r_k
    out = dr_out.dtype.element_ty
    tl.store(dr_out + at, (dr + dbonus * k * r_k).to(out))
    tl.store(dw_out + at, (ddecay * decay * (1 - decay / _DECAY)).to(out))
    dk, drate = _raw_gradients(dk, da, db, a, rate, k_raw, kk_inverse, vectors + channel, width)
    tl.store(dk_out + at, dk.to(out))
    tl.store(da_out + at, drate.to(out))
    if has_first_v:
        tl.store(dgate_out + at, (dv * (first_v - v_raw) * gate * (1 - gate)).to(out))
        tl.store(dfirst_v_out + at, dv * gate)
        dv = dv * (1 - gate)
    tl.store(dv_out + at, dv.to(out))
