"""Convert states between splits of the same layers into pipeline stages.

A stage has two parts: "stage0.wkv" [layers, ...] with recurrent states, and "stage0.shift" [layers, 2, C] with the
token shifts of time mix and channel mix. A layer may be split between two stages. The first then has its recurrent
state and time mix, the second its channel mix; the other token shift in each stage is unused.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import NamedTuple

from state_pool.codec import ITEM_BYTES, Layout

SAME_LAYOUT_HINT = "start with the same state dtype (--wkv-state) and devices"
"""Remedy for a state with other layers or dtypes."""


class _Piece(NamedTuple):
    """One of several equal pieces of a part."""

    part: str
    position: int
    spec: tuple[str, tuple[int, ...]]
    """(dtype, shape)"""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.spec[1]) * ITEM_BYTES[self.spec[0]]

    def read_from(self, parts: Mapping[str, bytes | memoryview]) -> memoryview:
        """Return the piece's bytes."""
        begin = self.position * self.num_bytes
        return memoryview(parts[self.part]).cast("B")[begin : begin + self.num_bytes]


class _LayerState(NamedTuple):
    """The pieces of one layer's state."""

    wkv: _Piece
    time_shift: _Piece
    channel_shift: _Piece


class _StageParts(NamedTuple):
    """A stage's parts and layers. The first layer may have only its channel mix here."""

    wkv: str
    shift: str
    first: int
    last: int
    """exclusive"""
    starts_mid_layer: bool


def has_same_layers(stored: Layout, own: Layout) -> bool:
    """Whether both layouts have the same layers in the same dtypes, in any split into stages."""
    if stored == own:
        return True
    own_layers = _layer_states(own)
    if not own_layers or any(shape and shape[0] > len(own_layers) for _, shape in stored.values()):
        return False
    return _layer_specs(_layer_states(stored)) == _layer_specs(own_layers)


def reshard_state(
    parts: Mapping[str, bytes | memoryview], stored: Layout, own: Layout
) -> Mapping[str, bytes | memoryview]:
    """Return a state's parts in layout `own`, from parts in layout `stored`. Requires `has_same_layers`."""
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
    """Return the stages of a layout, or None if its parts are not stages."""
    stages: list[_StageParts] = []
    for i in range(len(layout) // 2):
        wkv, shift = f"stage{i}.wkv", f"stage{i}.shift"
        if wkv not in layout or shift not in layout:
            return None
        states, shifts = layout[wkv][1], layout[shift][1]
        if not states or len(shifts) < 2 or shifts[1] != 2:
            return None
        num_split, end = shifts[0] - states[0], stages[-1].last if stages else 0
        if num_split not in {0, 1} or num_split > end:
            return None
        first = end - num_split
        stages.append(_StageParts(wkv, shift, first, first + shifts[0], bool(num_split)))
    return stages if 2 * len(stages) == len(layout) else None


def _layer_states(layout: Layout) -> list[_LayerState]:
    """Return the pieces per layer; empty if the parts are not stages."""
    layers: list[_LayerState] = []
    for stage in _stages(layout) or []:
        (wkv_type, wkv), (shift_type, shift) = layout[stage.wkv], layout[stage.shift]
        for i in range(stage.last - stage.first):
            time_shift, channel_shift = (
                _Piece(stage.shift, 2 * i + column, (shift_type, shift[2:])) for column in range(2)
            )
            if i == 0 and stage.starts_mid_layer:
                layers[-1] = layers[-1]._replace(channel_shift=channel_shift)
            else:
                state = _Piece(stage.wkv, i - stage.starts_mid_layer, (wkv_type, wkv[1:]))
                layers.append(_LayerState(state, time_shift, channel_shift))
    return layers


def _layer_specs(layers: list[_LayerState]) -> list[list[tuple[str, tuple[int, ...]]]]:
    return [[piece.spec for piece in layer] for layer in layers]
