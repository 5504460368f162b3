"""Stored states of one split of layers, converted to another."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from rwkv_batch.runner.layer_split import to_layer_ranges
from state_pool.layout import Layout, has_same_layers, part_sizes, reshard_state

WKV, SHIFT = ("uint8", (2, 7)), ("float16", (2, 3))
SHARES = [(8.0,), (3.0, 5.0), (2.5, 3.0, 2.5), (0.5, 7.5), (7.5, 0.5), (1.0, 0.5, 0.5, 6.0), (2.5, 2.5, 2.5, 0.5)]


def layout_of(shares: Sequence[float], wkv: tuple[str, tuple[int, ...]] = WKV) -> Layout:
    layout: Layout = {}
    for i, one in enumerate(to_layer_ranges(shares)):
        count = one.last - one.first
        layout[f"stage{i}.wkv"] = (wkv[0], (count - one.cuts.begins_within, *wkv[1]))
        layout[f"stage{i}.shift"] = (SHIFT[0], (count, *SHIFT[1]))
    return layout


def state_of(shares: Sequence[float]) -> dict[str, bytes]:
    """Build the parts by hand: layer l is l in wkv, 2 l and 2 l + 1 in used shifts; unused shifts are 255."""
    parts: dict[str, bytes] = {}
    for i, one in enumerate(to_layer_ranges(shares)):
        layers = range(one.first, one.last)
        parts[f"stage{i}.wkv"] = b"".join(bytes([n] * 14) for n in layers[one.cuts.begins_within :])
        shifts = [[2 * n, 2 * n + 1] for n in layers]
        if one.cuts.begins_within:
            shifts[0][0] = 255
        if one.cuts.ends_within:
            shifts[-1][1] = 255
        parts[f"stage{i}.shift"] = b"".join(bytes([value] * 6) for pair in shifts for value in pair)
    return parts


@pytest.mark.parametrize("own", SHARES)
@pytest.mark.parametrize("stored", SHARES)
def test_resharded_state_equals_the_other_split(stored: Sequence[float], own: Sequence[float]) -> None:
    before, after = layout_of(stored), layout_of(own)
    assert has_same_layers(before, after)
    found = reshard_state(state_of(stored), before, after)
    assert {name: len(part) for name, part in found.items()} == part_sizes(after)
    for name, expected in state_of(own).items():
        actual = bytes(found[name])
        assert all(one in {a, 255} or a == 255 for one, a in zip(actual, expected, strict=True))
        assert own == stored or 255 not in actual, "a stage's own half is not the one that means nothing"


def test_resharding_back_restores_the_state() -> None:
    rng = random.Random(1)
    whole = layout_of(SHARES[0])
    parts = {name: rng.randbytes(size) for name, size in part_sizes(whole).items()}
    for shares in SHARES[1:]:
        there = reshard_state(parts, whole, layout_of(shares))
        assert {name: bytes(part) for name, part in reshard_state(there, layout_of(shares), whole).items()} == parts


def test_different_layers_are_recognised() -> None:
    own = layout_of((3.0, 5.0))
    assert not has_same_layers(layout_of((3.0, 4.0)), own)
    assert not has_same_layers(layout_of((4.5, 4.5)), own)
    assert not has_same_layers(layout_of((8.0,), wkv=("uint8", (2, 8))), own)
    assert not has_same_layers(layout_of((8.0,), wkv=("int8", (2, 7))), own)
    mixed = layout_of((3.0, 5.0)) | {"stage1.shift": ("float32", (5, 2, 3))}
    assert not has_same_layers(mixed, own) and has_same_layers(mixed, mixed)
    assert has_same_layers(
        layout_of((3.0, 2.5, 2.5)) | {f"stage{i}.shift": ("float32", (3, 2, 3)) for i in (1, 2)}, mixed
    )


@pytest.mark.parametrize(
    "odd",
    [
        {},
        {"a.wkv": WKV, "a.shift": SHIFT},
        {"stage0.wkv": ("uint8", ()), "stage0.shift": ("float16", ())},
        {"stage0.wkv": ("uint8", (8, 2, 7)), "stage0.shift": ("float16", (8, 3, 3))},
        {"stage0.wkv": ("uint8", (7, 2, 7)), "stage0.shift": ("float16", (8, 2, 3))},
        {"stage0.wkv": ("uint8", (8, 2, 7)), "stage0.shift": ("float16", (8, 2, 3)), "stage1.wkv": WKV},
        {"stage0.wkv": ("uint8", (10**12, 2, 0)), "stage0.shift": ("float16", (10**12, 2, 0))},
    ],
)
def test_layouts_without_stages_are_refused(odd: Layout) -> None:
    """A file may have any layout, with any number of layers."""
    assert not has_same_layers(odd, layout_of((8.0,)))
