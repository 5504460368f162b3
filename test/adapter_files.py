"""Random adapters as files and as tensors, for tests."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

MAPS = ("att.receptance", "att.key", "att.value", "att.output", "ffn.key", "ffn.value")


def random_lora(seed: int, layers: int, width: int, rank: int = 4, scale: float = 0.2) -> dict[str, Tensor]:
    """Return pairs for every matrix of every layer, as RWKV-PEFT names them."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for i in range(layers):
        for name in MAPS:
            out, inputs = width * (4 if name == "ffn.key" else 1), width * (4 if name == "ffn.value" else 1)
            tensors[f"blocks.{i}.{name}.lora_A"] = torch.randn(rank, inputs, generator=generator) * scale
            tensors[f"blocks.{i}.{name}.lora_B"] = torch.randn(out, rank, generator=generator) * scale
    return tensors


def random_experts(
    seed: int, layers: int, width: int, experts: int = 4, same: bool = False, scale: float = 0.2
) -> dict[str, Tensor]:
    """Experts of rank 6 in every channel mix, and pairs for att.key. Tensor names are those of RWKV-Infer's trainer.

    Two experts are mixed for a token. `same`: all have the same numbers.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator) * scale

    found: dict[str, Tensor] = {"moe_info": torch.tensor([experts, 2])}
    for i in range(layers):
        at = f"blocks.{i}.ffn"
        found[f"{at}.router.linear.weight"] = normal(experts - 1, width) * 3
        for e in range(experts):
            for name, out, inputs in (("key", 4 * width, width), ("value", width, 4 * width)):
                first = f"{at}.expert_0.{name}"
                a = found[f"{first}.lora_A_expert_0"] if same and e else normal(6, inputs)
                b = found[f"{first}.lora_B_expert_0"] if same and e else normal(out, 6)
                found |= {f"{at}.expert_{e}.{name}.lora_A_expert_0": a, f"{at}.expert_{e}.{name}.lora_B_expert_0": b}
        found[f"blocks.{i}.att.key.lora_A"] = normal(4, width)
        found[f"blocks.{i}.att.key.lora_B"] = normal(width, 4)
    return found


def write_adapter(path: Path, tensors: dict[str, Tensor]) -> Path:
    torch.save(tensors, path)
    return path
