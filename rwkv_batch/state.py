"""The states of all sequences on one device: slots in two tensors, one state contiguous in each."""

from __future__ import annotations

import torch
from torch import Tensor

HEAD_SIZE = 64


class StateArena:
    """Slots of recurrent state for the layers of one stage.

    wkv:   [num_slots, layers, H, 64 (value), 64 (key)], fp32 or fp16
    shift: [num_slots, layers, 2, C]; 0 = the last ln1 output (time mix), 1 = the last ln2 output (channel mix)

    Slot 0 holds zeros and is never written; slot 1 is the dummy that graph padding writes to.
    """

    def __init__(
        self,
        num_slots: int,
        num_layers: int,
        width: int,
        device: torch.device,
        wkv_dtype: torch.dtype,
        shift_dtype: torch.dtype,
    ) -> None:
        heads = width // HEAD_SIZE
        self.num_slots = num_slots
        self.wkv = torch.zeros(num_slots, num_layers, heads, HEAD_SIZE, HEAD_SIZE, dtype=wkv_dtype, device=device)
        self.shift = torch.zeros(num_slots, num_layers, 2, width, dtype=shift_dtype, device=device)

    def layer_wkv(self, layer: int) -> Tensor:
        """View [num_slots, H, 64, 64] of one layer; strided over slots."""
        return self.wkv[:, layer]

    def att_shift(self, layer: int) -> Tensor:
        """View [num_slots, C]: token-shift state of the time mix."""
        return self.shift[:, layer, 0]

    def ffn_shift(self, layer: int) -> Tensor:
        """View [num_slots, C]: token-shift state of the channel mix."""
        return self.shift[:, layer, 1]

    @staticmethod
    def slot_bytes(num_layers: int, width: int, wkv_dtype: torch.dtype, shift_dtype: torch.dtype) -> int:
        """Bytes of one slot."""
        return num_layers * width * (HEAD_SIZE * wkv_dtype.itemsize + 2 * shift_dtype.itemsize)
