"""The forms in which the WKV states of rows are kept between steps; the arithmetic is fp32 in each. Plain torch.

    fp32  numbers
    fp16  numbers, rounded to nearest
    int8  a head of [64 value, 64 key] is 4,224 bytes: its codes -127 .. 127, then a bf16 scale for each value;
          a number is code * scale

int8 is rounded at random, up or down with the chances that keep the mean: a decay of 0.999 moves a code by an eighth of
a step at most, and rounded to nearest none would ever decay. Chance comes from the numbers themselves, so that a row's
bits are the same alone and in company. How 64 numbers x of a value are packed:

    m = max |x|; below 2^-100 scale and codes are 0
    scale: the one before, if m is between KEEP and 127 of it; else m / 127 rounded up to bf16. So what does not change
        stays bit for bit, and what decays slowly is not rounded anew for every token because its scale moved
    y = x / scale to 15 fractional bits
    code = floor(y + u), u the upper 15 bits of (bits of x + sum of the head's bits) * HASH, as a fraction of 1

Kernels keep to the layout, the scales and the means; what they take for chance is their own.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from rwkv_batch.model.layer import HEAD_SIZE
from rwkv_batch.model.step_inputs import StepInputs

HEAD_BYTES = HEAD_SIZE * HEAD_SIZE + 2 * HEAD_SIZE
"""Of a head in int8: codes and scales."""
MAX_CODE = 127
"""Largest code."""
MIN_KEPT_CODE = 112
"""Of a scale: the largest code may come down to this before a smaller scale is taken."""
SMALLEST = 2.0**-100
"""Rows whose largest number is below are kept as zeros: the inverse of their scale might not be finite."""
FRACTION_BITS = 15
HASH = 0x9E3779B1 - (1 << 32)
"""As int32, in which products wrap around."""

T = TypeVar("T")


class StateFormat(enum.StrEnum):
    """How a layer's recurrent state is stored; the values are those of `--wkv-state`."""

    FP32 = "fp32"
    FP16 = "fp16"
    INT8 = "int8"

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor that holds it."""
        return {StateFormat.FP32: torch.float32, StateFormat.FP16: torch.float16, StateFormat.INT8: torch.uint8}[self]

    @property
    def display_name(self) -> str:
        """For people, as in /status: "float32", "float16", "int8"."""
        return self.value if self is StateFormat.INT8 else str(self.dtype).removeprefix("torch.")

    def sizes(self, wkv: tuple[int, ...]) -> tuple[int, ...]:
        """Of the stored tensor, for a state of sizes `wkv` (see `ModelShape.wkv`); int8: [H, 4224]."""
        return (wkv[0], HEAD_BYTES) if self is StateFormat.INT8 else wkv

    def num_bytes(self, wkv: tuple[int, ...]) -> int:
        """Bytes of a layer's state."""
        return math.prod(self.sizes(wkv)) * self.dtype.itemsize

    def pack(self, wkv: Tensor) -> Tensor:
        """A state [..., H, 64, 64] fp32 as it is stored: [..., H, 64, 64], or [..., H, 4224] uint8."""
        return pack_int8(wkv) if self is StateFormat.INT8 else wkv.to(self.dtype)

    def unpack(self, stored: Tensor) -> Tensor:
        """The inverse: what is stored, as fp32 [..., H, 64, 64]."""
        return unpack_int8(stored) if self is StateFormat.INT8 else stored.float()

    def find_invalid(self, stored: Tensor) -> str:
        """What is wrong with a stored state [...] of this form that no step leaves, for people; "": nothing."""
        if self is StateFormat.INT8:
            return _find_invalid(_scales(stored), "scales", 0)
        return find_invalid(stored)


def find_invalid(numbers: Tensor) -> str:
    """The same of numbers [...] as they are."""
    return _find_invalid(numbers, "numbers", -math.inf)


def _find_invalid(numbers: Tensor, name: str, least: float) -> str:
    low, high = torch.aminmax(numbers) if numbers.numel() else (torch.zeros(()), torch.zeros(()))  # NaN in: NaN out
    if low.isfinite() and high.isfinite() and low >= least:
        return ""
    kinds = "NaN or infinite" if math.isinf(least) else "NaN, infinite or negative"
    wrong = ~(numbers.isfinite() & (numbers >= least)).reshape(-1)
    return f"{kinds} {name} ({int(wrong.sum())}, the first at {int(wrong.int().argmax())})"


def pack_int8(wkv: Tensor, before: Tensor | None = None) -> Tensor:
    """[..., 64 (value), 64 (key)] fp32 -> [..., 4224] uint8; `before`: what it became this from, likewise packed."""
    largest = wkv.abs().amax(-1)
    # The upper 16 bits, rounded up: bf16. What is not negative may be counted as int32.
    scale = (((largest / MAX_CODE).view(torch.int32) + 0xFFFF) >> 16 << 16).view(torch.float32)
    if before is not None:
        old = _scales(before).float()
        scale = torch.where((largest <= MAX_CODE * old) & (largest >= MIN_KEPT_CODE * old), old, scale)
    scale = torch.where(largest < SMALLEST, 0.0, scale)
    inverse = torch.where(scale == 0, 0.0, 1 / scale)
    # fp64 holds the product whole, so that whole codes come out as they were.
    steps = (wkv.double() * inverse.double().unsqueeze(-1)).mul_(1 << FRACTION_BITS).round_().to(torch.int32)
    bits = wkv.contiguous().view(torch.int32)
    chance = (bits + bits.sum((-2, -1), keepdim=True).to(torch.int32)) * HASH
    chance = (chance >> (32 - FRACTION_BITS)).bitwise_and_((1 << FRACTION_BITS) - 1)
    codes = (steps.add_(chance) >> FRACTION_BITS).to(torch.int8)
    return torch.cat([codes.view(torch.uint8).flatten(-2), scale.bfloat16().view(torch.uint8)], -1)


def unpack_int8(stored: Tensor) -> Tensor:
    """[..., 4224] uint8 -> [..., 64 (value), 64 (key)] fp32."""
    codes = stored[..., : HEAD_SIZE * HEAD_SIZE].contiguous().view(torch.int8)
    return codes.view(*codes.shape[:-1], HEAD_SIZE, HEAD_SIZE).float() * _scales(stored).float().unsqueeze(-1)


def _scales(stored: Tensor) -> Tensor:
    """[..., 4224] uint8 -> [..., 64] bf16."""
    return stored[..., HEAD_SIZE * HEAD_SIZE :].contiguous().view(torch.bfloat16)


def on_unpacked(run: Callable[[Tensor, StepInputs], T], wkv: Tensor, inputs: StepInputs) -> T:
    """Run what knows states in fp32 alone over slots wkv [num_slots, H, 4224] of int8, which are updated.

    `run` is given the rows' states [B, H, 64, 64] fp32, to be updated, and the inputs with these for slots. A row's
    state is rounded once, after the last of its tokens.
    """
    before = wkv[inputs.read_slots]
    states = unpack_int8(before)
    own = torch.arange(len(states), device=states.device)
    result = run(states, dataclasses.replace(inputs, read_slots=own, write_slots=own))
    wkv[inputs.write_slots] = pack_int8(states, before)
    return result
