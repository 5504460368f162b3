"""Memory that a layer's kernels use between their blocks and between launches.

There is one on each device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_SPARSE_ROWS = 8
"""Rows that read only a part of ffn.value (channel_mix.py)."""
SPARSE_BLOCK_INPUTS = 512
"""Inputs per CTA there."""
SPARSE_COLUMNS = 256
"""Outputs per CTA there."""


@dataclass(slots=True)
class Workspace:
    """Scratch memory of one device, for the largest model."""

    partials: Tensor
    """[ffn / 512 * 8 * C] fp32: partials of sparse_value"""
    counters: Tensor
    """[C / 256] int32, zero between launches"""
    mix_counter: Tensor
    """[1] int32, zero between launches"""
    row_sums: Tensor
    """[8, C / 8] int64: one row's fixed-point sums, from a channel mix to the next residual add"""
    num_sms: int
    transposed_weight: Tensor | None = None
    """[bytes] uint8: ffn.value transposed, of the running layer; None: not needed"""

    @classmethod
    def build(cls, device: torch.device, width: int, ffn: int) -> Workspace:
        """Allocates the memory for models up to this width and channel mix."""
        return cls(
            torch.empty(-(-ffn // SPARSE_BLOCK_INPUTS) * MAX_SPARSE_ROWS * width, dtype=torch.float32, device=device),
            torch.zeros(-(-width // SPARSE_COLUMNS), dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
            torch.zeros(8, -(-width // 8), dtype=torch.int64, device=device),
            torch.cuda.get_device_properties(device).multi_processor_count,
        )
