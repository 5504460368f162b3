"""Random tuned states as files, in every form in which they are found."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor


def random_state(seed: int, layers: int = 3, width: int = 128, scale: float = 0.5) -> Tensor:
    """[layers, H, 64 (value), 64 (key)] fp32, large enough to change what a random model says."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(layers, width // 64, 64, 64, generator=generator) * scale


def state_tensors(wkv: Tensor) -> dict[str, Tensor]:
    """The tensors of a state file."""
    return {f"blocks.{i}.att.time_state": layer.clone() for i, layer in enumerate(wkv)}


def write_state(path: Path, wkv: Tensor, metadata: dict[str, str] | None = None) -> Path:
    """By the file's name: as RWKV-PEFT writes it (.pth), else safetensors, whose matrices are not turned here."""
    if path.suffix == ".pth":
        torch.save(state_tensors(wkv), path)
    else:
        from safetensors.torch import save_file

        save_file({name: layer.contiguous() for name, layer in state_tensors(wkv).items()}, path, metadata=metadata)
    return path
