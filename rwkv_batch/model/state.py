"""Sizes of models, and their states: storage formats of WKV states, and the slots on a device. Plain torch.

The arithmetic is always fp32. After each token, a state is stored as

    fp32  numbers
    fp16  numbers, rounded to nearest
    int8  a head of [64 value, 64 key] is 4,224 bytes: its integers q in -127 .. 127, then a bf16 scale per value;
          a number is q * scale

int8 uses stochastic rounding. A decay of 0.999 moves q by at most 1/8, so with rounding to nearest nothing would ever
decay. The random bits come from the numbers themselves, so a row's bits do not depend on the batch. The 64 numbers x
of a value are packed thus:

    m = max |x|; below 2^-100 scale and q are 0
    scale: the old one if m / scale is between MIN_KEPT_CODE and 127; else m / 127, rounded up to bf16
    y = x / scale, to 15 fractional bits
    q = floor(y + u), u the upper 15 bits of (bits of x + sum of the head's bits) * HASH, as a fraction of 1

Keeping the old scale leaves unchanged numbers bit for bit the same, and does not round slowly decaying ones again for
every token. The CPU's kernels give these bits. A GPU's use the same layout, scales and means, but other random bits,
and store a prompt's state once per piece of the prompt, if they are not deterministic.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import torch
from torch import Tensor

HEAD_SIZE = 64
"""Channels of a head; RWKV-7 has no other size."""
HEAD_BYTES = HEAD_SIZE * HEAD_SIZE + 2 * HEAD_SIZE
"""Of a head in int8: integers and scales."""
MAX_CODE = 127
MIN_KEPT_CODE = 112
"""An old scale is kept while the largest integer is at least this."""
SMALLEST = 2.0**-100
"""Rows with smaller numbers are stored as zeros: the inverse of their scale might not be finite."""
FRACTION_BITS = 15
HASH = 0x9E3779B1 - (1 << 32)
"""As int32; products wrap around."""


class StateFormat(enum.StrEnum):
    """Storage format of a layer's recurrent state. The values are those of `--wkv-state`."""

    FP32 = "fp32"
    FP16 = "fp16"
    INT8 = "int8"

    @property
    def dtype(self) -> torch.dtype:
        return {StateFormat.FP32: torch.float32, StateFormat.FP16: torch.float16, StateFormat.INT8: torch.uint8}[self]

    @property
    def display_name(self) -> str:
        """The name in /status: "float32", "float16", "int8"."""
        return self.value if self is StateFormat.INT8 else str(self.dtype).removeprefix("torch.")

    def sizes(self, wkv: tuple[int, ...]) -> tuple[int, ...]:
        """Return the sizes of the stored tensor for a state.

        wkv: the state's sizes (`ModelShape.wkv`). int8: returns [H, 4224].
        """
        return (wkv[0], HEAD_BYTES) if self is StateFormat.INT8 else wkv

    def num_bytes(self, wkv: tuple[int, ...]) -> int:
        return math.prod(self.sizes(wkv)) * self.dtype.itemsize

    def pack(self, wkv: Tensor) -> Tensor:
        """Pack a state: [..., H, 64, 64] fp32 -> [..., H, 64, 64], or [..., H, 4224] uint8."""
        return pack_int8(wkv) if self is StateFormat.INT8 else wkv.to(self.dtype)

    def unpack(self, stored: Tensor) -> Tensor:
        """Unpack to fp32 [..., H, 64, 64]."""
        return unpack_int8(stored) if self is StateFormat.INT8 else stored.float()

    def find_invalid(self, stored: Tensor) -> str:
        """Describe values in a stored state [...] that no step produces; "" if there are none."""
        if self is StateFormat.INT8:
            return _find_invalid(_scales(stored), "scales", 0)
        return find_invalid(stored)


def find_invalid(numbers: Tensor) -> str:
    """Describe NaN or infinity in numbers [...]; "" if there are none."""
    return _find_invalid(numbers, "numbers", -math.inf)


def _find_invalid(numbers: Tensor, name: str, minimum: float) -> str:
    low, high = torch.aminmax(numbers) if numbers.numel() else (torch.zeros(()), torch.zeros(()))  # NaN stays NaN
    if low.isfinite() and high.isfinite() and low >= minimum:
        return ""
    kinds = "NaN or infinite" if math.isinf(minimum) else "NaN, infinite or negative"
    wrong = ~(numbers.isfinite() & (numbers >= minimum)).reshape(-1)
    return f"{kinds} {name} ({int(wrong.sum())}, the first at {int(wrong.int().argmax())})"


def pack_int8(wkv: Tensor, before: Tensor | None = None) -> Tensor:
    """Pack [..., 64 (value), 64 (key)] fp32 to [..., 4224] uint8. before: the packed state before the step."""
    largest = wkv.abs().amax(-1)
    # The upper 16 bits, rounded up, are bf16. Non-negative floats can be rounded as int32.
    scale = (((largest / MAX_CODE).view(torch.int32) + 0xFFFF) >> 16 << 16).view(torch.float32)
    if before is not None:
        old = _scales(before).float()
        scale = torch.where((largest <= MAX_CODE * old) & (largest >= MIN_KEPT_CODE * old), old, scale)
    scale = torch.where(largest < SMALLEST, 0.0, scale)
    inverse = torch.where(scale == 0, 0.0, 1 / scale)
    # fp64 holds the exact product, so that whole numbers stay exact.
    steps = (wkv.double() * inverse.double().unsqueeze(-1)).mul_(1 << FRACTION_BITS).round_().to(torch.int32)
    bits = wkv.contiguous().view(torch.int32)
    chance = (bits + bits.sum((-2, -1), keepdim=True).to(torch.int32)) * HASH
    chance = (chance >> (32 - FRACTION_BITS)).bitwise_and_((1 << FRACTION_BITS) - 1)
    codes = (steps.add_(chance) >> FRACTION_BITS).to(torch.int8)
    return torch.cat([codes.view(torch.uint8).flatten(-2), scale.bfloat16().view(torch.uint8)], -1)


def unpack_int8(stored: Tensor) -> Tensor:
    """Unpack a state: [..., 4224] uint8 -> [..., 64 (value), 64 (key)] fp32."""
    codes = stored[..., : HEAD_SIZE * HEAD_SIZE].contiguous().view(torch.int8)
    return codes.view(*codes.shape[:-1], HEAD_SIZE, HEAD_SIZE).float() * _scales(stored).float().unsqueeze(-1)


def _scales(stored: Tensor) -> Tensor:
    """Return the scales: [..., 4224] uint8 -> [..., 64] bf16."""
    return stored[..., HEAD_SIZE * HEAD_SIZE :].contiguous().view(torch.bfloat16)


RWKV7 = "RWKV-7"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model, read from its tensors."""

    layers: int
    width: int
    vocab: int
    ffn: int
    decay_rank: int = 0
    """of RWKV-7 and RWKV-6; 0: no such map"""
    a_rank: int = 0
    v_rank: int = 0
    gate_rank: int = 0
    version: str = RWKV7
    """"RWKV-7", "RWKV-6", "RWKV-5.2", "RWKV-5.1", "RWKV-5.0" or "RWKV-4\""""
    head_size: int = HEAD_SIZE
    mix_rank: int = 0
    """of RWKV-6's token shift"""

    @property
    def heads(self) -> int:
        return self.width // self.head_size

    @property
    def wkv(self) -> tuple[int, ...]:
        """Sizes of a layer's recurrent state: [H, head (value), head (key)]; RWKV-4: [3, C]."""
        return (3, self.width) if self.version == "RWKV-4" else (self.heads, self.head_size, self.head_size)

    def slot_bytes(self, layers: int, form: StateFormat, shift_itemsize: int, first_wkv: int = 0) -> int:
        """Bytes of the state of this many layers. first_wkv: see StateArena."""
        return (layers - first_wkv) * form.num_bytes(self.wkv) + layers * 2 * self.width * shift_itemsize

    def describe(self) -> str:
        heads = "" if self.version == "RWKV-4" else f" ({self.heads} heads)"
        return f"{self.version}, {self.layers} layers x {self.width}{heads}, vocabulary {self.vocab}"


class StateArena:
    """Slots of recurrent state for the layers of one stage.

    wkv:   [num_slots, layers, H, 64 (value), 64 (key)] fp32 or fp16, or [num_slots, layers, H, 4224] uint8 for int8
           (see above); other versions: see `ModelShape.wkv`.
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
        """Return a layer's WKV states in all slots.

        A view [num_slots, H, 64, 64], or by version and format; strided over slots.
        """
        return self.wkv[:, layer - self._first_wkv]

    def att_shift(self, layer: int) -> Tensor:
        """Return the time mix's token-shift states. [num_slots, C]; a view, strided over slots"""
        return self.shift[:, layer, 0]

    def ffn_shift(self, layer: int) -> Tensor:
        """Return the channel mix's token-shift states. [num_slots, C]; a view, strided over slots"""
        return self.shift[:, layer, 1]
