"""A layer's operations in plain torch: the definition that tests compare every backend with.

Formulas: RWKV-7 "x070" as in the reference implementation (`rwkv` package), over ragged rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rwkv_batch.model.adapter_table import AdaptedLinear, LayerAdapters
from rwkv_batch.model.layer import Layer, Projections, Prologue, layer_norm
from rwkv_batch.model.low_rank import Target
from rwkv_batch.model.state import HEAD_SIZE, pack_int8, unpack_int8
from rwkv_batch.model.step_inputs import StepInputs, longest_first, token_shift

DECAY_SCALE = -0.6065306597126334
"""-exp(-0.5): log of the smallest decay."""
GROUP_NORM_EPS = 64e-5


class NaiveOps:
    """Backend of plain torch operations; runs on any device."""

    name = "naive"

    @staticmethod
    def unavailable_reason(device: torch.device) -> str | None:
        """Return None: it runs everywhere."""
        return None

    def shift_mix(
        self, x: Tensor, delta: Tensor | None, prologue: Prologue, shift: Tensor, inputs: StepInputs
    ) -> tuple[Tensor, Tensor]:
        """Residual add, LayerNorm, token shift and mix of a half layer.

        x [T, C]: residual stream; delta [T, C]: output of the previous half layer; mix [M, C]; shift [num_slots, C]
        (updated).
        Returns (x + delta [T, C], mixed [M, T, C]).
        """
        if delta is not None:
            x = x + delta
        h = layer_norm(x, prologue.norm)
        mixed = h + (token_shift(h, shift, inputs) - h) * prologue.mix.unsqueeze(1)
        return x, mixed.to(x.dtype)

    def project(self, layer: Layer, mixed: Tensor, adapters: LayerAdapters | None = None) -> Projections:
        """The time mix's input projections; mixed [6, T, C] in the order r, w, k, v, a, g."""
        xr, xw, xk, xv, xa, xg = mixed
        p = Projections(
            r=layer.receptance(xr),
            w=layer.w2(torch.tanh(layer.w1(xw))),
            k=layer.key(xk),
            v=layer.value(xv),
            a=layer.a2(layer.a1(xa)),
            g=layer.g2(torch.sigmoid(layer.g1(xg))),
            v_gate=None if layer.v_residual is None else layer.v_residual.v2(layer.v_residual.v1(xv)),
        )
        if adapters is not None:
            values = AdaptedLinear(Target.VALUE, xv, p.v)
            adapters.add(AdaptedLinear(Target.RECEPTANCE, xr, p.r), AdaptedLinear(Target.KEY, xk, p.k), values)
        return p

    def time_mix(
        self, layer: Layer, p: Projections, v_first: Tensor | None, wkv: Tensor, inputs: StepInputs
    ) -> tuple[Tensor, Tensor]:
        """The WKV recurrence with prologue and epilogue.

        wkv [num_slots, H, 64, 64], or [num_slots, H, 4224] uint8 of int8 states (updated).
        Returns (y [T, C] before the output layer, v_first [T, C]).
        """
        tokens, width = p.r.shape
        heads = width // HEAD_SIZE
        per_head = (tokens, heads, HEAD_SIZE)
        decay = torch.exp(DECAY_SCALE * torch.sigmoid(layer.w0 + p.w.float()))
        a = torch.sigmoid(layer.a0 + p.a.float())
        k_raw, v = p.k.float(), p.v.float()
        kk = torch.nn.functional.normalize((k_raw * layer.k_k).view(per_head), dim=-1, eps=1e-12)
        k = k_raw * (1 + (a - 1) * layer.k_a)
        if layer.v_residual is None or v_first is None or p.v_gate is None:
            v_first = p.v
        else:
            v = v + (v_first.float() - v) * torch.sigmoid(layer.v_residual.v0 + p.v_gate.float())
        r = p.r.float().view(per_head)
        k, v, decay = k.view(per_head), v.view(per_head), decay.view(per_head)
        y = wkv_loop(r, decay, k, v, -kk, kk * a.view(per_head), wkv, inputs)
        y = torch.nn.functional.group_norm(
            y.reshape(tokens, width), heads, layer.ln_x.weight, layer.ln_x.bias, GROUP_NORM_EPS
        )
        bonus = (r * k * layer.r_k).sum(-1, keepdim=True) * v
        y = (y + bonus.view(tokens, width)) * p.g.float()
        return y.to(p.r.dtype), v_first

    def output(self, layer: Layer, y: Tensor) -> Tensor:
        """Output layer: y [T, C] -> [T, C]."""
        return layer.output(y)

    def add(self, x: Tensor, delta: Tensor) -> Tensor:
        """x + delta [T, C]."""
        return x + delta

    def channel_mix(self, layer: Layer, x: Tensor, adapters: LayerAdapters | None = None) -> Tensor:
        """F_v relu(F_k x)^2 for x [T, C] -> [T, C]."""
        hidden = layer.ffn_key(x)
        if adapters is not None:
            adapters.add(AdaptedLinear(Target.FFN_KEY, x, hidden))
        key, hidden = hidden, torch.relu(hidden).square()
        if adapters is None:
            return layer.ffn_value(hidden)
        of_experts = torch.zeros_like(x)
        adapters.mix_experts(x, key, hidden, of_experts)
        y = layer.ffn_value(hidden)
        adapters.add(AdaptedLinear(Target.FFN_VALUE, hidden, y))
        return y + of_experts


def wkv_loop(
    r: Tensor, decay: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, wkv: Tensor, inputs: StepInputs
) -> Tensor:
    """The recurrence, token by token, over all rows and heads.

    S <- S diag(decay) + (S a) b^T + v k^T;  y = S r.  All [T, H, 64] fp32, a = -kk, b = kk * a;
    wkv [num_slots, H, 64 (value), 64 (key)], or [num_slots, H, 4224] uint8 of int8 states, is read and updated. A state
    is rounded to its format after each token, so a prompt's pieces do not change it. Returns y [T, H, 64].
    """
    y = torch.empty_like(r)
    for reads, writes, positions in longest_first(inputs):
        is_int8 = wkv.dtype is torch.uint8
        state = wkv[reads]
        for tokens in positions:
            before = state[: len(tokens)]
            s = unpack_int8(before) if is_int8 else before.float()
            sa = s @ a[tokens].unsqueeze(-1)
            s = (
                s * decay[tokens].unsqueeze(-2)
                + sa * b[tokens].unsqueeze(-2)
                + v[tokens].unsqueeze(-1) * k[tokens].unsqueeze(-2)
            )
            y[tokens] = (s @ r[tokens].unsqueeze(-1)).squeeze(-1)
            state[: len(tokens)] = pack_int8(s, before) if is_int8 else s
        wkv[writes] = state
    return y
