"""States of a model whose layers are dealt to stages in one way, cut anew for another.

A layer's state is its own, so what stages keep of it is a matter of cutting: a part "stage0.wkv" [layers, …] has the
recurrent states of a stage's layers, "stage0.shift" [layers, 2, C] the token shifts of their time mixes and channel
mixes. A layer that is cut in half is in two stages: its recurrent state and time mix in the first, its channel mix in
the second, and the other token shift of each means nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import NamedTuple

from state_pool.codec import ITEM_BYTES, Layout

SAME_LAYOUT_HINT = "start with the same state dtype (--wkv-state) and devices"
"""What to do where a state is of other layers, or of layers in other forms."""


class _Piece(NamedTuple):
    """One of equal pieces of a part."""

    part: str
    at: int
    spec: tuple[str, tuple[int, ...]]
    """type and shape"""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.spec[1]) * ITEM_BYTES[self.spec[0]]

    def read_from(self, parts: Mapping[str, bytes | memoryview]) -> memoryview:
        """Its bytes."""
        return memoryview(parts[self.part]).cast("B")[self.at * self.num_bytes : (self.at + 1) * self.num_bytes]


class _LayerState(NamedTuple):
    """Where the state of a layer is."""

    wkv: _Piece
    time_shift: _Piece
    channel_shift: _Piece


class _StageParts(NamedTuple):
    """A stage's parts, by the layers that it has; the first of them perhaps by its channel mix only."""

    wkv: str
    shift: str
    first: int
    last: int
    """one past"""
    starts_mid_layer: bool


def has_same_layers(stored: Layout, own: Layout) -> bool:
    """Whether both are of the same layers in the same forms, however these are dealt to stages."""
    if stored == own:
        return True
    wanted = _layer_states(own)
    if not wanted or any(shape and shape[0] > len(wanted) for _, shape in stored.values()):
        return False
    return _layer_specs(_layer_states(stored)) == _layer_specs(wanted)


def reshard_state(
    parts: Mapping[str, bytes | memoryview], stored: Layout, own: Layout
) -> Mapping[str, bytes | memoryview]:
    """A state's parts as `own` has them, from parts as `stored` has them, where `has_same_layers` says so."""
    if stored == own:
        return parts
    layers = _layer_states(stored)
    found: dict[str, bytes | memoryview] = {}
    for stage in _stages(own) or []:
        stage_layers = layers[stage.first : stage.last]
        found[stage.wkv] = b"".join(layer.wkv.read_from(parts) for layer in stage_layers[stage.starts_mid_layer :])
        shifts = itertools.chain.from_iterable((layer.time_shift, layer.channel_shift) for layer in stage_layers)
        found[stage.shift] = b"".join(shift.read_from(parts) for shift in shifts)
    return found


def _stages(layout: Layout) -> list[_StageParts] | None:
    """None where the parts are not those of stages."""
    stages: list[_StageParts] = []
    for i in range(len(layout) // 2):
        wkv, shift = f"stage{i}.wkv", f"stage{i}.shift"
        if wkv not in layout or shift not in layout:
            return None
        states, shifts = layout[wkv][1], layout[shift][1]
        if not states or len(shifts) < 2 or shifts[1] != 2:
            return None
        within, before = shifts[0] - states[0], stages[-1].last if stages else 0
        if within not in {0, 1} or within > before:
            return None
        stages.append(_StageParts(wkv, shift, before - within, before - within + shifts[0], bool(within)))
    return stages if 2 * len(stages) == len(layout) else None


def _layer_states(layout: Layout) -> list[_LayerState]:
    """Of every layer; none where the parts are not those of stages."""
    layers: list[_LayerState] = []
    for stage in _stages(layout) or []:
        (wkv_type, wkv), (shift_type, shift) = layout[stage.wkv], layout[stage.shift]
        for i in range(stage.last - stage.first):
            time_shift, channel_shift = (
                _Piece(stage.shift, 2 * i + which, (shift_type, shift[2:])) for which in range(2)
            )
            if i == 0 and stage.starts_mid_layer:
                layers[-1] = layers[-1]._replace(channel_shift=channel_shift)
            else:
                state = _Piece(stage.wkv, i - stage.starts_mid_layer, (wkv_type, wkv[1:]))
                layers.append(_LayerState(state, time_shift, channel_shift))
    return layers


def _layer_specs(layers: list[_LayerState]) -> list[list[tuple[str, tuple[int, ...]]]]:
    return [[piece.spec for piece in layer] for layer in layers]
