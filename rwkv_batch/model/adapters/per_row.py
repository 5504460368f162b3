"""Adapters that are not merged but applied per row: W x + B (A x)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass

from rwkv_batch.model.adapters.files import Adapter, ExpertParts
from rwkv_batch.model.adapters.merge import kind_of, low_rank_pair
from rwkv_batch.model.low_rank import MAX_RANK, Experts, LayerPairs, Pair, Target
from rwkv_batch.model.state import RWKV7
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
_OF_EXPERTS = (Target.FFN_KEY, Target.FFN_VALUE)
MAX_EXPERTS = 64
USUAL_ACTIVE = 2
"""for files without `moe_info`"""
_NAME = re.compile(r"blocks\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    digest: str
    layers: Mapping[int, LayerPairs]
    """by the layer's number in the model"""
    file: str

    @property
    def rank(self) -> int:
        return max((pair.rank for layer in self.layers.values() for pair in layer.all_pairs), default=0)


def per_row_adapter(weights: Weights, adapter: Adapter) -> ServedAdapter:
    """Convert an adapter file to low-rank pairs for single rows.

    Supports LoRA, PiSSA (its initial pair is subtracted, as additional rank) and two-dimensional MiSS. Raises FileError
    for other kinds, or if it does not fit the model; then nothing has changed.
    """
    if weights.shape.version != RWKV7:
        raise _only_merged(adapter, "only RWKV-7 models support adapters per row")
    layers: dict[int, dict[Target, Pair]] = {}
    experts = {layer: _experts(weights, adapter, layer, parts) for layer, parts in adapter.experts.items()}
    for name, parts in adapter.parts.items():
        layer, target = _place(adapter, name)
        if (kind := kind_of(adapter, name, parts)) in ("DoRA", "whole tensors"):
            raise _only_merged(adapter, f"{name!r} is {kind}")
        pair = low_rank_pair(weights, adapter, name, parts)
        if pair is None:
            raise _only_merged(adapter, f"{name!r} is a block-wise Bone")
        if layer in experts and target in _OF_EXPERTS:
            raise FileError(f"adapter file {adapter.path}: layer {layer} has both experts and {name!r}")
        layers.setdefault(layer, {})[target] = _checked(adapter, name, Pair(*pair))
    numbers = sorted({*layers, *experts})
    found = {i: LayerPairs(layers.get(i, {}), experts.get(i)) for i in numbers}
    if not any(layer.all_pairs for layer in found.values()):
        raise FileError(f"adapter file {adapter.path} has a router but no low-rank pairs, so it changes nothing")
    return ServedAdapter(adapter.digest, found, str(adapter.path))


def _checked(adapter: Adapter, name: str, pair: Pair) -> Pair:
    if pair.rank > MAX_RANK:
        raise FileError(
            f"adapter file {adapter.path}: {name!r} has rank {pair.rank}; adapters per row have at most {MAX_RANK}; "
            "merge it into the model with --adapter"
        )
    return pair


def _experts(weights: Weights, adapter: Adapter, layer: int, found: ExpertParts) -> Experts:
    """Return a layer's mixture of experts. Raises FileError for missing tensors or wrong shapes."""
    at = f"blocks.{layer}.ffn"
    router, width = found.router, weights.shape.width
    if layer >= weights.shape.layers:
        raise FileError(f"adapter file {adapter.path} is for another model: this one has no weight {at!r}")
    if router is None or router.dim() != 2 or router.shape[1] != width or not 1 <= len(router) <= MAX_EXPERTS - 1:
        raise FileError(
            f"adapter file {adapter.path}: {at}.router.linear.weight is "
            f"{'missing' if router is None else tuple(router.shape)}; it must be [experts - 1, {width}] with at "
            f"most {MAX_EXPERTS} experts"
        )
    count, active = len(router) + 1, adapter.active or USUAL_ACTIVE
    if not 1 <= active <= count or any(not 0 <= number < count for number, _ in found.parts):
        raise FileError(f"adapter file {adapter.path}: {at} the router has {count} experts, the tensors have others")
    pairs: tuple[dict[Target, Pair], ...] = tuple({} for _ in range(count))
    for (number, name), parts in found.parts.items():
        if "bone" in parts:
            raise FileError(
                f"adapter file {adapter.path}: {at}.{name} has Bone experts; only LoRA experts are supported"
            )
        expert_adapter = dataclasses.replace(adapter, parts={f"{at}.{name}": parts})
        pair = low_rank_pair(weights, expert_adapter, f"{at}.{name}", parts)
        assert pair is not None, "parts without Bone are a LoRA"
        pairs[number][_TARGETS[f"ffn.{name}"]] = _checked(adapter, f"{at}.{name}", Pair(*pair))
    return Experts(router.float(), pairs, active)


def _place(adapter: Adapter, name: str) -> tuple[int, Target]:
    found = _NAME.fullmatch(name)
    target = None if found is None else _TARGETS.get(found[2])
    if found is None or target is None:
        raise _only_merged(adapter, f"it changes {name!r}; per-row adapters may only change {', '.join(_TARGETS)}")
    return int(found[1]), target


def _only_merged(adapter: Adapter, why: str) -> FileError:
    return FileError(f"adapter file {adapter.path}: {why}; merge it into the model with --adapter")
