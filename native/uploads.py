"""Uploads of small pieces of host memory to one GPU. Not thread-safe."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from native.tensors import copy_on, pinned

HALF_BYTES = 1 << 17
ALIGNMENT = 16


class Uploads:
    """A ring of pinned memory in two halves. A copy takes a few microseconds; pinning would take fifty."""

    def __init__(self, device: torch.device) -> None:
        self._staging = torch.empty(2 * HALF_BYTES, dtype=torch.uint8).pin_memory()
        self._device = device
        self._sent = [torch.cuda.Event(), torch.cuda.Event()]
        """per half: recorded after its last copy"""
        self._half = 0
        """half being filled; `_at` alone is ambiguous when it is full"""
        self._at = 0

    def send(self, target: Tensor, piece: ctypes.Structure | ctypes.Array[Any]) -> None:
        """Copies a C structure or array to [n] uint8 on the device. Uses the device's current stream."""
        size = ctypes.sizeof(piece)
        if size > HALF_BYTES:
            held = torch.frombuffer(bytearray(piece), dtype=torch.uint8)
            target.view(-1).copy_(pinned(held, self._device), non_blocking=True)
            return
        stream = torch.cuda.current_stream(self._device)
        if self._at + size > (self._half + 1) * HALF_BYTES:
            self._sent[self._half].record(stream)
            self._half = 1 - self._half
            self._sent[self._half].synchronize()  # long ago: a whole half lies between
            self._at = self._half * HALF_BYTES
        ctypes.memmove(self._staging.data_ptr() + self._at, ctypes.addressof(piece), size)
        copy_on(stream, target, self._staging[self._at : self._at + size])
        self._at += -(-size // ALIGNMENT) * ALIGNMENT
