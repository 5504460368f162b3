"""Random RWKV-7 weights for tests and benchmarks. The names are those of public files."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from rwkv_batch.model.state import HEAD_SIZE


def random_weights(
    layers: int,
    width: int,
    vocab: int = 65536,
    seed: int = 0,
    ranks: tuple[int, int, int, int] = (64, 64, 32, 128),
    first_v: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
) -> dict[str, Tensor]:
    """Return a model's tensors by name.

    `ranks`: of w, a, v and g. `first_v`: whether block 0 has its unused v tensors. Every tensor affects the logits, so
    a comparison finds an error in any of them.
    """
    g = torch.Generator(device).manual_seed(seed)

    def normal(*size: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        return (torch.randn(*size, generator=g, device=device) * scale + mean).to(dtype)

    def uniform(*size: int) -> Tensor:
        return torch.rand(*size, generator=g, device=device).to(dtype)

    def norm(name: str) -> dict[str, Tensor]:
        return {f"{name}.weight": normal(width, scale=0.1, mean=1.0), f"{name}.bias": normal(width, scale=0.1)}

    c, scale = width, width**-0.5
    tensors = {"emb.weight": normal(vocab, c, scale=0.3), **norm("blocks.0.ln0")}
    for i in range(layers):
        att, ffn = f"blocks.{i}.att.", f"blocks.{i}.ffn."
        tensors |= norm(f"blocks.{i}.ln1") | norm(f"blocks.{i}.ln2") | norm(f"{att}ln_x")
        tensors |= {f"{att}x_{s}": uniform(1, 1, c) for s in "rwkvag"}
        tensors |= {
            f"{att}{name}.weight": normal(c, c, scale=scale) for name in ("receptance", "key", "value", "output")
        }
        for letter, rank in zip("wavg", ranks, strict=True):
            if letter == "v" and i == 0 and not first_v:
                continue
            tensors[f"{att}{letter}1"] = normal(c, rank, scale=scale)
            tensors[f"{att}{letter}2"] = normal(rank, c, scale=rank**-0.5)
            if letter != "g":
                tensors[f"{att}{letter}0"] = normal(1, 1, c)
        tensors |= {
            f"{att}k_k": normal(1, 1, c, scale=0.2, mean=0.8),
            f"{att}k_a": normal(1, 1, c, scale=0.2, mean=0.8),
        }
        tensors[f"{att}r_k"] = normal(c // HEAD_SIZE, HEAD_SIZE, scale=0.2)
        tensors[f"{ffn}x_k"] = uniform(1, 1, c)
        tensors[f"{ffn}key.weight"] = normal(4 * c, c, scale=scale)
        tensors[f"{ffn}value.weight"] = normal(c, 4 * c, scale=0.5 * scale)
    return tensors | norm("ln_out") | {"head.weight": normal(vocab, c, scale=2 * scale)}


def write_random_model(path: str | Path, layers: int, width: int, vocab: int = 65536, seed: int = 0) -> Path:
    """Write a seeded random model. The path's suffix decides between `.pth` and `.safetensors`."""
    path = Path(path)
    tensors = random_weights(layers, width, vocab, seed)
    if path.suffix == ".safetensors":
        from safetensors.torch import save_file

        save_file(tensors, path)
    else:
        torch.save(tensors, path)
    return path
