"""The RWKV-7 forward: the one place where layers follow each other, for every device and backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from rwkv_batch.model.adapter_table import AdaptedLinear, StepAdapters
from rwkv_batch.model.layer import Layer
from rwkv_batch.model.low_rank import Target
from rwkv_batch.model.ops import Delta, Ops
from rwkv_batch.model.state_arena import StateArena
from rwkv_batch.model.step_inputs import StepInputs


class Cuts(NamedTuple):
    """Where a run of layers begins and ends: between two, or between a layer's time mix and its channel mix."""

    begins_within: bool = False
    """of the first layer there is only the channel mix"""
    ends_within: bool = False
    """of the last layer there is only the time mix"""


WHOLE = Cuts()


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
    """Run layers of one stage over one ragged step: those from its layer `first` on.

    x [T, C] the residual stream, v_first [T, C] the first layer's values (None before layer 0);
    `state` is read and updated in place; `adapters`: of the step's rows, None: none has one; `cuts` of the first and
    the last of these layers. Returns both for the next stage.
    """
    delta: Delta | None = None
    last = first + len(layers) - 1
    for i, layer in enumerate(layers, first):
        added = None if adapters is None else adapters.for_layer(i)
        if i > first or not cuts.begins_within:
            x, mixed = ops.shift_mix(x, delta, layer.time_mix_prologue, state.att_shift(i), inputs)
            # The projections have no name here: while the rest of the layer runs, nothing holds their memory.
            y, v_first = ops.time_mix(layer, ops.project(layer, mixed, added), v_first, state.layer_wkv(i), inputs)
            delta = ops.output(layer, y)
            if added is not None:
                added.add(AdaptedLinear(Target.OUTPUT, y, delta))
        if i == last and cuts.ends_within:
            break
        x, mixed = ops.shift_mix(x, delta, layer.channel_mix_prologue, state.ffn_shift(i), inputs)
        delta = ops.channel_mix(layer, mixed[0], added)
    return (x if delta is None else ops.add(x, delta)), v_first
