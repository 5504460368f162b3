"""The recurrence of RWKV-5 and 6: one matrix per head, decay per key channel, bonus for the current token."""

from __future__ import annotations

import torch
from torch import Tensor

from rwkv_batch.model.layer import Norm
from rwkv_batch.model.step_inputs import StepInputs
from rwkv_batch.model.torch_ops import longest_first

GROUP_NORM_EPS = 64e-5


def wkv_heads(r: Tensor, k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor, wkv: Tensor, inputs: StepInputs) -> Tensor:
    """y_i = sum_j r_j (bonus_j k_j v_i + S_ij);  S_ij <- decay_j S_ij + k_j v_i.  i: value, j: key.

    r, k, v [T, H, N] fp32; decay [T, H, N], or [1, H, N] if constant; bonus [H, N];
    wkv [num_slots, H, N (value), N (key)] is updated. Returns y [T, H, N] fp32.
    """
    y = torch.empty_like(v)
    order, positions = longest_first(inputs)
    state = wkv[inputs.read_slots[order]].float()
    for at in positions:
        s = state[: len(at)]
        kv = v[at].unsqueeze(-1) * k[at].unsqueeze(-2)
        # Not a matrix product, whose bits would depend on the number of rows.
        y[at] = ((bonus.unsqueeze(-2) * kv + s) * r[at].unsqueeze(-2)).sum(-1)
        step_decay = decay if len(decay) == 1 else decay[at]
        state[: len(at)] = step_decay.unsqueeze(-2) * s + kv
    wkv[inputs.write_slots[order]] = state.to(wkv.dtype)
    return y


def head_norm(y: Tensor, norm: Norm) -> Tensor:
    """Normalise each head of y [T, H, N], then scale and shift by `norm` [C]: [T, C] fp32."""
    tokens, heads, _ = y.shape
    return torch.nn.functional.group_norm(y.reshape(tokens, -1), heads, norm.weight, norm.bias, GROUP_NORM_EPS)
