"""Random RWKV-4, RWKV-5 and RWKV-6 weights under the names of public files."""

from __future__ import annotations

import torch
from torch import Tensor


class _Random:
    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self._g = torch.Generator().manual_seed(seed)
        self._dtype = dtype

    def normal(self, *size: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        return (torch.randn(*size, generator=self._g) * scale + mean).to(self._dtype)

    def uniform(self, *size: int) -> Tensor:
        return torch.rand(*size, generator=self._g).to(self._dtype)

    def norm(self, name: str, width: int) -> dict[str, Tensor]:
        return {
            f"{name}.weight": self.normal(width, scale=0.1, mean=1.0),
            f"{name}.bias": self.normal(width, scale=0.1),
        }


def random_older_weights(
    version: str,
    layers: int,
    width: int,
    vocab: int = 512,
    heads: int = 0,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    has_time_first: bool = False,
) -> dict[str, Tensor]:
    """Return tensors by name for `version` "4", "5.0", "5.1", "5.2" or "6".

    heads: 0 for heads of 64. has_time_first: RWKV-5's bonus as a logarithm, under its older name.
    Every tensor affects the logits.
    """
    random, heads = _Random(seed, dtype), heads or width // 64
    scale = width**-0.5
    tensors = {"emb.weight": random.normal(vocab, width, scale=0.3), **random.norm("blocks.0.ln0", width)}
    for i in range(layers):
        att, ffn = f"blocks.{i}.att.", f"blocks.{i}.ffn."
        tensors |= random.norm(f"blocks.{i}.ln1", width) | random.norm(f"blocks.{i}.ln2", width)
        for name in ("receptance", "key", "value", "output"):
            tensors[f"{att}{name}.weight"] = random.normal(width, width, scale=scale)
        if version != "4":
            tensors |= random.norm(f"{att}ln_x", width)
        if version not in ("4", "5.0"):
            tensors[f"{att}gate.weight"] = random.normal(width, width, scale=scale)
        tensors |= {
            f"{att}{name}": tensor
            for name, tensor in _time_mix_tensors(random, version, width, heads, has_time_first).items()
        }
        mix = "time_maa" if version == "6" else "time_mix"
        tensors |= {f"{ffn}{mix}_{letter}": random.uniform(1, 1, width) for letter in "kr"}
        tensors[f"{ffn}key.weight"] = random.normal(7 * width // 2, width, scale=scale)
        tensors[f"{ffn}value.weight"] = random.normal(width, 7 * width // 2, scale=0.5 * scale)
        tensors[f"{ffn}receptance.weight"] = random.normal(width, width, scale=scale)
    return tensors | random.norm("ln_out", width) | {"head.weight": random.normal(vocab, width, scale=2 * scale)}


def _time_mix_tensors(random: _Random, version: str, c: int, heads: int, has_time_first: bool) -> dict[str, Tensor]:
    """Return the time mix's tensors without matrices and norms."""
    if version == "4":
        mixes = {f"time_mix_{letter}": random.uniform(1, 1, c) for letter in "kvr"}
        return mixes | {"time_decay": random.normal(c), "time_first": random.normal(c)}
    if version == "6":
        mixes = {f"time_maa_{letter}": random.uniform(1, 1, c) for letter in "xwkvrg"}
        return mixes | {
            "time_maa_w1": random.normal(c, 5 * 12, scale=c**-0.5),
            "time_maa_w2": random.normal(5, 12, c, scale=0.3),
            "time_decay": random.normal(1, 1, c),
            "time_decay_w1": random.normal(c, 20, scale=c**-0.5),
            "time_decay_w2": random.normal(20, c, scale=0.3),
            "time_faaaa": random.normal(heads, c // heads, scale=0.5),
        }
    mixes = {f"time_mix_{letter}": random.uniform(1, 1, c) for letter in ("kvr" if version == "5.0" else "kvrg")}
    decay_shape = (heads, c // heads) if version == "5.2" else (heads,)
    first = "time_first" if has_time_first else "time_faaaa"
    return mixes | {"time_decay": random.normal(*decay_shape), first: random.normal(*decay_shape, scale=0.5)}
