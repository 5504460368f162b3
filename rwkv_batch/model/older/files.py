"""Weight files of RWKV-4, 5 and 6: version, sizes and layers."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from rwkv_batch.model.older.layer import (
    FIRST,
    FIRST_AS_LOGARITHM,
    MIXES,
    SQUARE,
    ChannelMix,
    OlderLayer,
    TensorSource,
    TimeMix,
    TimeMix4,
    TimeMix5,
    TimeMix6,
)
from rwkv_batch.model.state import ModelShape

_OLDER = re.compile(r"\.att\.time_(maa_|mix_|faaaa|first|decay)")
_ATT = "blocks.0.att"


def version_of(tensors: Mapping[str, Tensor]) -> str | None:
    """Return "RWKV-4" to "RWKV-6" by the names of tensors [...].

    The rules are those of the `rwkv` package. None: another version.
    """
    if not any(_OLDER.search(name) for name in tensors):
        return None
    if any(".att.time_maa_" in name for name in tensors):
        return "RWKV-6"
    if not any(".att.ln_x." in name for name in tensors):
        return "RWKV-4"
    if not any(name.endswith(".att.gate.weight") for name in tensors):
        return "RWKV-5.0"
    return "RWKV-5.2" if _by_head(tensors.get(f"{_ATT}.time_decay"))[1] > 1 else "RWKV-5.1"


def _by_head(tensor: Tensor | None) -> tuple[int, int]:
    """Return heads and numbers per head. The tensor is [H], [H, N] or [H, 1, 1]. Returns (0, 0) for none."""
    if tensor is None or tensor.dim() == 0 or not len(tensor):
        return 0, 0
    return len(tensor), tensor.numel() // len(tensor)


def matrix_size(tensors: Mapping[str, Tensor], name: str, axis: int) -> int:
    """Return an axis of the matrix [N, K]. 0: the matrix is missing, which the check of shapes reports."""
    tensor = tensors.get(name)
    return int(tensor.shape[axis]) if tensor is not None and tensor.dim() == 2 else 0


def shape_of(tensors: Mapping[str, Tensor], version: str, layers: int) -> ModelShape:
    """Return the sizes that the tensors show: emb.weight [V, C], decays [H, N]."""
    width = matrix_size(tensors, "emb.weight", 1)
    heads = 1
    if version != "RWKV-4":
        first = tensors.get(f"{_ATT}.{FIRST}", tensors.get(f"{_ATT}.{FIRST_AS_LOGARITHM}"))
        heads = _by_head(first)[0] or 1
    return ModelShape(
        layers=layers,
        width=width,
        vocab=matrix_size(tensors, "emb.weight", 0),
        ffn=matrix_size(tensors, "blocks.0.ffn.key.weight", 0),
        decay_rank=matrix_size(tensors, f"{_ATT}.time_decay_w1", 1),
        version=version,
        head_size=max(1, width // heads),
        mix_rank=matrix_size(tensors, f"{_ATT}.time_maa_w1", 1) // len(MIXES),
    )


def expected_shapes(shape: ModelShape, tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every tensor that a layer must have. A shape is a tuple, as (C, C) for [C, C]."""
    c, f = shape.width, shape.ffn
    if shape.version == "RWKV-4":
        att = TimeMix4.expected(shape)
    elif shape.version == "RWKV-6":
        att = TimeMix6.expected(shape)
    else:
        att = TimeMix5.expected(shape, has_logarithm=f"{_ATT}.{FIRST}" not in tensors)
    att |= {f"{name}.weight": (c, c) for name in SQUARE}
    mix = _ffn_mix(shape)
    ffn = {
        f"{mix}_k": (c,),
        f"{mix}_r": (c,),
        "key.weight": (f, c),
        "value.weight": (c, f),
        "receptance.weight": (c, c),
    }
    expected: dict[str, tuple[int, ...]] = {}
    for i in range(shape.layers):
        expected |= {f"blocks.{i}.{norm}.{part}": (c,) for norm in ("ln1", "ln2") for part in ("weight", "bias")}
        expected |= {f"blocks.{i}.att.{name}": size for name, size in att.items()}
        expected |= {f"blocks.{i}.ffn.{name}": size for name, size in ffn.items()}
    return expected


def _ffn_mix(shape: ModelShape) -> str:
    """Return the prefix of the mix weights. RWKV-6's weight the previous token, others' the token itself."""
    return "time_maa" if shape.version == "RWKV-6" else "time_mix"


def make_layer(source: TensorSource, shape: ModelShape, i: int) -> OlderLayer:
    """Load a layer. Mixes are [C], matrices [out, in]."""
    ffn, mix = f"blocks.{i}.ffn", _ffn_mix(shape)
    mix_k, mix_r = source.vector(f"{ffn}.{mix}_k"), source.vector(f"{ffn}.{mix}_r")
    if mix == "time_mix":
        mix_k, mix_r = 1 - mix_k, 1 - mix_r
    return OlderLayer(
        ln1=source.norm(f"blocks.{i}.ln1"),
        ln2=source.norm(f"blocks.{i}.ln2"),
        time_mix=_time_mix(source, f"blocks.{i}.att", shape),
        channel_mix=ChannelMix(
            mix_k=mix_k,
            mix_r=mix_r,
            key=source.linear(f"{ffn}.key.weight"),
            value=source.linear(f"{ffn}.value.weight"),
            receptance=source.linear(f"{ffn}.receptance.weight"),
        ),
    )


def _time_mix(source: TensorSource, att: str, shape: ModelShape) -> TimeMix:
    if shape.version == "RWKV-4":
        return TimeMix4.load(source, att, shape)
    if shape.version == "RWKV-6":
        return TimeMix6.load(source, att, shape)
    return TimeMix5.load(source, att, shape)
