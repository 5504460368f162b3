"""The RWKV-7 forward over layers, for every device and backend."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rwkv_batch.model.adapter_table import AdaptedLinear, StepAdapters
from rwkv_batch.model.layer import WHOLE, Cuts, Layer
from rwkv_batch.model.low_rank import Target
from rwkv_batch.model.ops import Delta, Ops
from rwkv_batch.model.state import StateArena
from rwkv_batch.model.step_inputs import StepInputs


def forward_layers(
    layers: Sequence[Layer],
    x: Tensor,
    v_first: Tensor | None,
    state: StateArena,
    inputs: StepInputs,
    ops: Ops,
    adapters: StepAdapters | None = None,
    first: int = 0,
    cuts: Cuts = WHOLE,
) -> tuple[Tensor, Tensor | None]:
    """Run layers of one stage over one ragged step. Returns x and v_first for the next stage.

    x [T, C]: the residual stream; v_first [T, C]: the values of layer 0 (None before it)
    state: updated in place.
    adapters: of the step's rows; None if no row has one.
    first: number of the first of `layers` in the stage.
    cuts: at the first and last of `layers`.
    """
    delta: Delta | None = None
    last = first + len(layers) - 1
    for i, layer in enumerate(layers, first):
        added = None if adapters is None else adapters.for_layer(i)
        if i > first or not cuts.begins_within:
            x, mixed = ops.shift_mix(x, delta, layer.time_mix_prologue, state.att_shift(i), inputs)
            # Pass the projections without a name, so that their memory is free while the rest of the layer runs.
            y, v_first = ops.time_mix(layer, ops.project(layer, mixed, added), v_first, state.layer_wkv(i), inputs)
            delta = ops.output(layer, y)
            if added is not None:
                added.add(AdaptedLinear(Target.OUTPUT, y, delta))
        if i == last and cuts.ends_within:
            break
        x, mixed = ops.shift_mix(x, delta, layer.channel_mix_prologue, state.ffn_shift(i), inputs)
        delta = ops.channel_mix(layer, mixed[0], added)
    return (x if delta is None else ops.add(x, delta)), v_first
