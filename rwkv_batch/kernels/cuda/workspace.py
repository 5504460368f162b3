"""Memory that a layer's kernels use between their blocks and from launch to launch: one on each device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_SPARSE_ROWS = 8
"""Rows that read only what they need of ffn.value (channel_mix.py)."""
SPARSE_BLOCK_INPUTS = 512
"""Inputs of a block there."""
SPARSE_COLUMNS = 256
"""Outputs of one."""


@dataclass(slots=True)
class Workspace:
    """What blocks and launches of a layer leave for each other, on one device, for the largest case."""

    partial: Tensor
    """[ffn / 512 * 8 * C] fp32: what the blocks of the sparse map add up"""
    counters: Tensor
    """[C / 256] int32, zero between launches"""
    mix_counter: Tensor
    """[1] int32, likewise"""
    row_sums: Tensor
    """[8, C / 8] int64: of one row, from a channel mix to what adds it to the residual stream"""
    num_sms: int
    """of the device"""
    transposed_weight: Tensor | None = None
    """[bytes] uint8: ffn.value in the other order, of the layer that runs; None: no product wants that"""

    @classmethod
    def build(cls, device: torch.device, width: int, ffn: int) -> Workspace:
        """For models of up to this width and channel mix."""
        return cls(
            torch.empty(-(-ffn // SPARSE_BLOCK_INPUTS) * MAX_SPARSE_ROWS * width, dtype=torch.float32, device=device),
            torch.zeros(-(-width // SPARSE_COLUMNS), dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
            torch.zeros(8, -(-width // 8), dtype=torch.int64, device=device),
            torch.cuda.get_device_properties(device).multi_processor_count,
        )
