"""The states of all sequences on one device."""

from __future__ import annotations

import torch
from torch import Tensor

from rwkv_batch.model.shape import ModelShape
from rwkv_batch.model.state_format import StateFormat


class StateArena:
    """Slots of recurrent state for the layers of one stage.

    wkv:   [num_slots, layers, H, 64 (value), 64 (key)] fp32 or fp16, or [num_slots, layers, H, 4224] uint8 for int8
           (state_format.py); other versions: see `ModelShape.wkv`.
    shift: [num_slots, layers, 2, C]; 0 = the last ln1 output (time mix), 1 = the last ln2 output (channel mix).

    In GPU memory, layers come before slots: a step reads all slots of one layer, and adjacent states are read faster. A
    slot there has one piece per layer; on a CPU it is contiguous.

    Slot 0 is zero and never written. Slot 1 is the dummy that graph padding writes to.
    """

    def __init__(
        self,
        num_slots: int,
        num_layers: int,
        shape: ModelShape,
        device: torch.device,
        form: StateFormat,
        shift_dtype: torch.dtype,
        first_wkv: int = 0,
    ) -> None:
        """first_wkv: the first layer with a recurrent state; 1 for a stage that starts within a layer."""
        self.num_slots = num_slots
        self.form = form
        self._first_wkv = first_wkv

        def slots(layers: int, dtype: torch.dtype, *size: int) -> Tensor:
            if device.type == "cpu":
                return torch.zeros(num_slots, layers, *size, dtype=dtype, device=device)
            return torch.zeros(layers, num_slots, *size, dtype=dtype, device=device).transpose(0, 1)

        self.wkv = slots(num_layers - first_wkv, form.dtype, *form.sizes(shape.wkv))
        self.shift = slots(num_layers, shift_dtype, 2, shape.width)

    def layer_wkv(self, layer: int) -> Tensor:
        """Return a view [num_slots, H, 64, 64] of one layer, or as version and format have it; strided over slots."""
        return self.wkv[:, layer - self._first_wkv]

    def att_shift(self, layer: int) -> Tensor:
        """Return a view [num_slots, C]: token-shift state of the time mix; strided over slots."""
        return self.shift[:, layer, 0]

    def ffn_shift(self, layer: int) -> Tensor:
        """Return a view [num_slots, C]: token-shift state of the channel mix; strided over slots."""
        return self.shift[:, layer, 1]
