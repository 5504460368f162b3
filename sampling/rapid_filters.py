"""Filters of the sampler for CUDA devices (csrc/rapid_filters.cu): their state by request slot."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from native.tensors import fields, on_device
from native.uploads import Uploads
from sampling.cpu import STEPS, FilterParameters, filter_parameters
from sampling.params import MAX_WINDOW, SamplingParams
from sampling.row_context import RowContext


class FilterSlot(ctypes.Structure):
    _fields_ = (
        ("parameters", FilterParameters),
        *fields(ctypes.c_double, "mu log_total"),
        *fields(ctypes.c_void_p, "lists breakers"),
        ("num_known", ctypes.c_uint32),
        *fields(ctypes.c_int32, "num_listed num_steps"),
        ("steps", ctypes.c_int32 * len(STEPS)),
        ("largest", ctypes.c_float),
        ("chosen", ctypes.c_int32),
    )


def lists_of(params: SamplingParams, context: RowContext) -> list[int]:
    """Return the stops and bad words as the kernel reads them; nothing if there are none."""
    assert params.filters is not None
    stops = context.stop_ids if params.filters.min_tokens else ()
    words = [number for word in params.filters.bad_words for number in (len(word), *word)]
    return [len(stops), *stops, *words] if stops or words else []


def packed(params: SamplingParams, steps: tuple[str, ...], num_known: int) -> FilterSlot:
    """Return a new row's state, without its lists."""
    assert params.filters is not None
    numbers = (ctypes.c_int32 * len(STEPS))(*(STEPS[name] for name in steps))
    return FilterSlot(
        parameters=filter_parameters(params),
        mu=2 * params.filters.mirostat_tau,
        num_known=num_known,
        num_steps=len(steps),
        steps=numbers,
    )


class SlotFilters:
    """Device memory of the filters, by request slot."""

    def __init__(self, max_rows: int, device: torch.device, uploads: Uploads) -> None:
        self.table = torch.zeros(max_rows, ctypes.sizeof(FilterSlot), dtype=torch.uint8, device=device)
        self.history = torch.zeros(max_rows, MAX_WINDOW, dtype=torch.int32, device=device)
        """rings of each slot's last tokens"""
        self._uploads, self._device = uploads, device
        self._lists: dict[int, Tensor] = {}
        self._breakers: dict[int, tuple[Tensor, Tensor]] = {}
        """by request slot: the mask on the host, and on the device"""

    def admit(self, req_slot: int, params: SamplingParams, steps: tuple[str, ...], context: RowContext) -> None:
        """Start a new row with filters in this request slot. Does not wait for the device."""
        prompt = list(context.prompt[-MAX_WINDOW:])
        slot = packed(params, steps, len(prompt))
        numbers = lists_of(params, context)
        if numbers:
            self._lists[req_slot] = lists = on_device(numbers, torch.int32, self._device)
            slot.lists, slot.num_listed = lists.data_ptr(), len(numbers)
        if context.breakers is not None and "dry" in steps:
            slot.breakers = self._breakers_of(req_slot, context.breakers).data_ptr()
        if prompt:
            tokens = self.history[req_slot, : len(prompt)].view(torch.uint8)
            self._uploads.send(tokens, (ctypes.c_int32 * len(prompt))(*prompt))
        self._uploads.send(self.table[req_slot], slot)

    def _breakers_of(self, req_slot: int, mask: Tensor) -> Tensor:
        """Return a mask [V] bool on the device; rows with the same one share it."""
        known = next((one for one in self._breakers.values() if one[0] is mask), None)
        self._breakers[req_slot] = known or (mask, mask.pin_memory().to(self._device, non_blocking=True))
        return self._breakers[req_slot][1]
