"""Small tensors from the host to a device, without waiting for what the device is doing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Numbers = Sequence[int] | Sequence[float] | Sequence[list[float]]


def on_device(values: Numbers, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A list as a tensor on a device. `torch.tensor(..., device=...)` would wait until the device's queue is empty."""
    return pinned(torch.tensor(values, dtype=dtype), device).to(device, non_blocking=True)


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor in host memory from which a copy to the device need not be waited for; unchanged if it is not one."""
    return tensor.pin_memory() if device.type == "cuda" and not tensor.is_cuda else tensor
