"""Random adapters as files and as tensors, for tests."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

MAPS = ("att.receptance", "att.key", "att.value", "att.output", "ffn.key", "ffn.value")


def random_lora(seed: int, layers: int, width: int, rank: int = 4, scale: float = 0.2) -> dict[str, Tensor]:
    """Pairs beside every map of every layer, as RWKV-PEFT names them."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for i in range(layers):
        for name in MAPS:
            out, inputs = width * (4 if name == "ffn.key" else 1), width * (4 if name == "ffn.value" else 1)
            tensors[f"blocks.{i}.{name}.lora_A"] = torch.randn(rank, inputs, generator=generator) * scale
            tensors[f"blocks.{i}.{name}.lora_B"] = torch.randn(out, rank, generator=generator) * scale
    return tensors


def write_adapter(path: Path, tensors: dict[str, Tensor]) -> Path:
    """The tensors as a .pth file."""
    torch.save(tensors, path)
    return path
