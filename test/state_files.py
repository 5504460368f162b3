"""Random tuned states as files in each known format."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor


def random_state(seed: int, layers: int = 3, width: int = 128, scale: float = 0.5) -> Tensor:
    """Return a random state [layers, H, 64 (value), 64 (key)] fp32.

    It is large enough to change a random model's output.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(layers, width // 64, 64, 64, generator=generator) * scale


def state_tensors(wkv: Tensor) -> dict[str, Tensor]:
    """Return a state file's tensors from `wkv` [layers, H, 64, 64]."""
    return {f"blocks.{i}.att.time_state": layer.clone() for i, layer in enumerate(wkv)}


def write_state(path: Path, wkv: Tensor, metadata: dict[str, str] | None = None) -> Path:
    """Write `wkv` [layers, H, 64, 64]: .pth as RWKV-PEFT does, otherwise safetensors. Does not transpose."""
    if path.suffix == ".pth":
        torch.save(state_tensors(wkv), path)
    else:
        from safetensors.torch import save_file

        save_file({name: layer.contiguous() for name, layer in state_tensors(wkv).items()}, path, metadata=metadata)
    return path
