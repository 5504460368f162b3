"""The forward of RWKV-4, 5 and 6, for every device."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from rwkv_batch.model.older.layer import OlderLayer
from rwkv_batch.model.state_arena import StateArena
from rwkv_batch.model.step_inputs import StepInputs
from rwkv_batch.model.torch_ops import layer_norm, token_shift


def forward_layers(layers: Iterable[OlderLayer], x: Tensor, state: StateArena, inputs: StepInputs) -> Tensor:
    """Run the layers of one stage over one step: x [T, C] fp32 -> [T, C]. Updates `state`."""
    for i, layer in enumerate(layers):
        h = layer_norm(x, layer.ln1)
        previous = token_shift(h, state.att_shift(i), inputs)
        x = x + layer.time_mix.run(h, previous, state.layer_wkv(i), inputs)
        h = layer_norm(x, layer.ln2)
        x = x + layer.channel_mix.run(h, token_shift(h, state.ffn_shift(i), inputs))
    return x
