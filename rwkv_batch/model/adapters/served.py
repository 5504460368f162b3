"""Adapters that are not merged: what of a file is a pair of low-rank matrices beside a weight, W x + B (A x)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from rwkv_batch.model.adapters.files import Adapter
from rwkv_batch.model.adapters.merge import kind_of, low_rank_pair
from rwkv_batch.model.low_rank import MAX_RANK, LayerPairs, Pair, Target
from rwkv_batch.model.shape import X070
from rwkv_batch.model.tensor_files import FileError
from rwkv_batch.model.weights import Weights

_TARGETS = {
    "att.receptance": Target.RECEPTANCE,
    "att.key": Target.KEY,
    "att.value": Target.VALUE,
    "att.output": Target.OUTPUT,
    "ffn.key": Target.FFN_KEY,
    "ffn.value": Target.FFN_VALUE,
}
_NAME = re.compile(r"blocks\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """An adapter as rows take it."""

    digest: str
    layers: Mapping[int, LayerPairs]
    """by the layer's number in the model"""
    file: str

    @property
    def rank(self) -> int:
        """The largest of its pairs."""
        return max(pair.rank for pairs in self.layers.values() for pair in pairs.values())


def served(weights: Weights, adapter: Adapter) -> ServedAdapter:
    """An adapter's file as pairs beside the weights of a model.

    LoRA, PiSSA (the pair it began with is taken off, as more rank) and the two-dimensional MiSS are such. Raises
    FileError for what is not, or does not fit the model, before anything is changed.
    """
    if weights.shape.version != X070:
        raise _only_merged(adapter, "rows of RWKV-7 models only may differ in their adapters")
    layers: dict[int, dict[Target, Pair]] = {}
    for name, parts in adapter.parts.items():
        layer, target = _place(adapter, name)
        if (kind := kind_of(adapter, name, parts)) in ("DoRA", "whole tensors"):
            raise _only_merged(adapter, f"{name!r} is {kind}")
        pair = low_rank_pair(weights, adapter, name, parts)
        if pair is None:
            raise _only_merged(adapter, f"{name!r} is a Bone of blocks")
        if len(pair[0]) > MAX_RANK:
            raise FileError(
                f"adapter file {adapter.path}: {name!r} has rank {len(pair[0])}, {MAX_RANK} is the most that is "
                "served beside others; merge it into the model by --adapter"
            )
        layers.setdefault(layer, {})[target] = Pair(*pair)
    return ServedAdapter(adapter.digest, layers, str(adapter.path))


def _place(adapter: Adapter, name: str) -> tuple[int, Target]:
    found = _NAME.fullmatch(name)
    target = None if found is None else _TARGETS.get(found[2])
    if found is None or target is None:
        raise _only_merged(adapter, f"it changes {name!r}, and rows may differ in {', '.join(_TARGETS)} only")
    return int(found[1]), target


def _only_merged(adapter: Adapter, why: str) -> FileError:
    return FileError(f"adapter file {adapter.path}: {why}; merge it into the model by --adapter")
