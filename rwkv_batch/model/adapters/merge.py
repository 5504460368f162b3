"""Merges adapters into the weights. Each weight is changed when it is loaded and never stored twice.

The formulas are those of the papers and RWKV-PEFT: fp32 in, fp32 out.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from rwkv_batch.model.adapters.files import Adapter
from rwkv_batch.model.tensor_files import FileError
from rwkv_batch.model.weights import Change, Weights

EPSILON = 1e-6


def lora(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return W + s B A. weight W is [out, in], a is [r, in] and b is [out, r]."""
    return torch.addmm(weight, b, a, alpha=scale)


def dora(weight: Tensor, a: Tensor, b: Tensor, scale: float, magnitude: Tensor) -> Tensor:
    """Return M W' / |W'|.

    W' = W + s B A for weight W [out, in].
    magnitude [1, in]: norms of columns (RWKV-PEFT); [out, 1]: norms of rows (PEFT).
    """
    moved = lora(weight, a, b, scale)
    norms: Tensor = torch.linalg.vector_norm(moved, dim=0 if magnitude.shape[0] == 1 else 1, keepdim=True)
    return moved * (magnitude / (norms + EPSILON))


def pissa(weight: Tensor, a: Tensor, b: Tensor, scale: float, first_a: Tensor, first_b: Tensor) -> Tensor:
    """Return W + s (B A - B0 A0). weight W is [out, in]. The trained pair replaces the initial one."""
    return lora(lora(weight, a, b, scale), first_a, first_b, -scale)


def bone(weight: Tensor, blocks: Tensor, scale: float) -> Tensor:
    """Return W + s (W_blk G + G) for each square block.

    W_blk is a square block of weight W [out, in].
    blocks G [in / r, r, r]: one per block column.
    """
    rank = blocks.shape[-1]
    split = weight.view(weight.shape[0] // rank, rank, weight.shape[1] // rank, rank).transpose(1, 2)
    change = split @ blocks + blocks
    return weight + scale * change.transpose(1, 2).reshape(weight.shape)


def miss(weight: Tensor, shard: Tensor, scale: float) -> Tensor:
    """Return W + s D^T for every r inputs. weight W is [out, in]. The last group may be shorter. shard D [r, out]"""
    times = -(-weight.shape[1] // shard.shape[0])
    return weight + scale * shard.T.repeat(1, times)[:, : weight.shape[1]]


logger = logging.getLogger(__name__)

_BLOCKS = ("bone", "disha", "miss")
_SETS: dict[frozenset[str], str] = {
    frozenset({"lora_A", "lora_B"}): "LoRA",
    frozenset({"lora_A", "lora_B", "lora_M"}): "DoRA",
    frozenset({"lora_A", "lora_B", "lora_magnitude_vector"}): "DoRA",
    frozenset({"lora_A", "lora_B", "init_lora_A", "init_lora_B"}): "PiSSA",
    **{frozenset({name}): "Bone / MiSS" for name in _BLOCKS},
    frozenset({""}): "whole tensors",
}


def merge_adapters(weights: Weights, adapters: Sequence[Adapter]) -> Weights:
    """Return the weights with the adapters merged in order.

    They have a new fingerprint. Each weight is computed when `Weights.tensor` reads it. Raises FileError with the
    tensor for an adapter that does not fit.
    """
    changes: dict[str, Change] = dict(weights.changes)
    for adapter in adapters:
        if adapter.experts:
            raise FileError(
                f"adapter file {adapter.path} is a mixture of experts (MoLE), which cannot be merged; "
                "load it with --adapter-serve"
            )
        kinds: Counter[str] = Counter()
        for target, parts in adapter.parts.items():
            name, kind, change = _change(weights, adapter, target, parts)
            changes[name] = change if name not in changes else _after(changes[name], change)
            kinds[kind] += 1
        summary = ", ".join(f"{kind} on {count} weights" for kind, count in kinds.items())
        logger.info("adapter %s: %s, merged", adapter.path, summary)
    digests = (*weights.adapters, *(adapter.digest for adapter in adapters))
    return dataclasses.replace(weights, changes=changes, adapters=digests)


def _after(first: Change, then: Change) -> Change:
    return lambda weight: then(first(weight))


def _change(
    weights: Weights, adapter: Adapter, target: str, parts: Mapping[str, Tensor]
) -> tuple[str, str, Callable[[Tensor], Tensor]]:
    """Return (the model's tensor, kind of change, the change). Raises FileError."""
    kind = kind_of(adapter, target, parts)
    name, shape = _weight(weights, adapter, target)
    stored = weights.tensors[name]
    if kind == "whole tensors":
        _fit(adapter, target, parts[""].numel() == stored.numel(), parts[""], shape)
        return name, kind, lambda _: parts[""].float().reshape(stored.shape)
    if len(shape) != 2:
        raise FileError(f"adapter file {adapter.path}: {target!r} is a vector {shape}, which takes whole tensors only")
    if kind == "Bone / MiSS":
        return name, kind, _block_change(adapter, target, next(iter(parts.values())), shape)
    return name, kind, _low_rank_change(adapter, target, kind, parts, shape)


def kind_of(adapter: Adapter, target: str, parts: Mapping[str, Tensor]) -> str:
    """Return the kind of a target's parts [...]: a value of `_SETS`. Raises FileError."""
    kind = _SETS.get(frozenset(parts))
    if kind is None:
        names = ", ".join(sorted(part or "a whole tensor" for part in parts))
        raise FileError(
            f"adapter file {adapter.path}: {target!r} has {names}, which is not a supported kind of adapter"
        )
    return kind


def low_rank_pair(
    weights: Weights, adapter: Adapter, target: str, parts: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor] | None:
    """Return (a [r, in], b [out, r]) fp32 for a weight.

    The parts add the product b a to the weight. None: there is no such pair. Raises FileError for parts that do not fit
    the model.
    """
    _, kind, _ = _change(weights, adapter, target, parts)
    out, inputs = _weight(weights, adapter, target)[1]
    scale = 1.0 if adapter.scale is None and kind != "LoRA" else adapter.scale_of(target)
    if kind in ("LoRA", "PiSSA"):
        a, b = parts["lora_A"].float(), scale * parts["lora_B"].float()
        if kind == "LoRA":
            return a, b
        first_a, first_b = parts["init_lora_A"].float(), parts["init_lora_B"].float()
        return torch.cat([a, first_a]), torch.cat([b, -scale * first_b], dim=1)
    tensor = next(iter(parts.values()))
    if kind != "Bone / MiSS" or tensor.dim() != 2:
        return None
    rank = len(tensor)
    sums = torch.eye(rank).repeat(1, -(-inputs // rank))[:, :inputs]
    return sums.contiguous(), scale * tensor.float().T.reshape(out, rank)


def _weight(weights: Weights, adapter: Adapter, target: str) -> tuple[str, tuple[int, ...]]:
    """Return (the model's tensor for an adapter's name, its shape). Raises FileError."""
    name = next((name for name in (f"{target}.weight", target) if name in weights.tensors), None)
    if name is None:
        raise FileError(f"adapter file {adapter.path} is for another model: this one has no weight {target!r}")
    stored = weights.tensors[name]
    return name, tuple(stored.shape[2:]) if stored.dim() == 3 else tuple(stored.shape)


def _fit(adapter: Adapter, target: str, fits: bool, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if not fits:
        raise FileError(
            f"adapter file {adapter.path}: its tensor for {target!r} is {tuple(tensor.shape)}, which does not fit the "
            f"model's {shape};  it was trained for another model"
        )


def _low_rank_change(
    adapter: Adapter, target: str, kind: str, parts: Mapping[str, Tensor], shape: tuple[int, ...]
) -> Change:
    out, inputs = shape
    for a_name, b_name in (("lora_A", "lora_B"), ("init_lora_A", "init_lora_B")):
        if a_name in parts:
            a, b = parts[a_name], parts[b_name]
            _fit(adapter, f"{target}.{a_name}", a.dim() == 2 and a.shape[1] == inputs and len(a) > 0, a, shape)
            _fit(adapter, f"{target}.{b_name}", tuple(b.shape) == (out, a.shape[0]), b, shape)
    if kind == "PiSSA":
        scale = 1.0 if adapter.scale is None else adapter.scale
        first = (parts["init_lora_A"].float(), parts["init_lora_B"].float())
        return lambda w: pissa(w, parts["lora_A"].float(), parts["lora_B"].float(), scale, *first)
    scale = adapter.scale_of(target)
    pair = (parts["lora_A"], parts["lora_B"])
    if kind == "LoRA":
        return lambda w: lora(w, pair[0].float(), pair[1].float(), scale)
    columns = "lora_M" in parts
    magnitude = parts["lora_M" if columns else "lora_magnitude_vector"]
    _fit(adapter, f"{target} (magnitudes)", magnitude.numel() == (inputs if columns else out), magnitude, shape)
    sized = magnitude.float().reshape((1, inputs) if columns else (out, 1))
    return lambda w: dora(w, pair[0].float(), pair[1].float(), scale, sized)


def _block_change(adapter: Adapter, target: str, tensor: Tensor, shape: tuple[int, ...]) -> Change:
    out, inputs = shape
    rank = 0 if not tensor.dim() else tensor.shape[-1] if tensor.dim() == 3 else tensor.shape[0]
    _fit(adapter, target, rank > 0, tensor, shape)
    scale = 1.0 if adapter.scale is None else adapter.scale
    if tensor.dim() == 3:
        fits = out % rank == 0 and tuple(tensor.shape) == (inputs // rank, rank, rank) and inputs % rank == 0
        _fit(adapter, target, fits, tensor, shape)
        return lambda w: bone(w, tensor.float(), scale)
    _fit(adapter, target, tuple(tensor.shape) == (rank, out) and rank <= inputs, tensor, shape)
    return lambda w: miss(w, tensor.float(), scale)
