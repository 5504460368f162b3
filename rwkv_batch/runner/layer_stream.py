"""Streams layers that do not fit on the GPU: host memory to device while the previous layer runs."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from rwkv_batch.model.layer import LayerBase, Linear

NUM_BUFFERS = 2
"""Streamed layers on the device at a time: one runs, one is copied."""
ALIGNMENT = 256


@dataclasses.dataclass(slots=True)
class FlatLayer:
    """A layer whose tensors share one memory block."""

    flat: Tensor
    """[bytes] uint8"""
    layer: LayerBase


class StreamedLayers(Sequence[LayerBase]):
    """A pipeline stage's layers. The first ones stay on the device; the others are copied to it in every forward.

    Iterate once per forward: iteration yields a streamed layer in a device buffer, indexing returns its host copy.
    Streamed layers have the same layout. Layer 0 has no weights for the value residual, so it stays on the device.
    """

    def __init__(self, layers: Iterator[LayerBase], resident: int, device: torch.device) -> None:
        """Take layers one by one. So a streamed one leaves the device before the next is created."""
        self._device = device
        self._resident: list[LayerBase] = []
        self._hosts: list[FlatLayer] = []
        self._buffers: list[FlatLayer] = []
        self._copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        for layer in layers:
            if len(self._resident) < resident or not layer.has_uniform_layout:
                self._resident.append(layer)
                continue
            if len(self._buffers) < NUM_BUFFERS:
                self._buffers.append(flatten(layer, device))
            self._hosts.append(flatten(layer, torch.device("cpu"), pinned=self._copy_stream is not None))

    @property
    def on_device(self) -> list[LayerBase]:
        """The resident layers and the buffers."""
        return [*self._resident, *(buffer.layer for buffer in self._buffers)]

    @property
    def num_streamed(self) -> int:
        return len(self._hosts)

    def __len__(self) -> int:
        return len(self._resident) + len(self._hosts)

    @overload
    def __getitem__(self, index: int) -> LayerBase: ...
    @overload
    def __getitem__(self, index: slice) -> list[LayerBase]: ...
    def __getitem__(self, index: int | slice) -> LayerBase | list[LayerBase]:
        return [*self._resident, *(host.layer for host in self._hosts)][index]

    def __iter__(self) -> Iterator[LayerBase]:
        """Yield each layer when it is on the device.

        The work for one layer must be launched on the current stream before the next is taken.
        """
        self._wait_for_compute()
        for buffer, host in zip(self._buffers, self._hosts, strict=False):
            self._copy(buffer, host)
        arrived = [self._record_event() for _ in self._buffers]
        yield from self._resident
        for i, _ in enumerate(self._hosts):
            buffer_index = i % len(self._buffers)
            self._wait_for_copy(arrived[buffer_index])
            yield self._buffers[buffer_index].layer
            if i + NUM_BUFFERS < len(self._hosts):
                self._wait_for_compute()
                self._copy(self._buffers[buffer_index], self._hosts[i + NUM_BUFFERS])
                arrived[buffer_index] = self._record_event()
        if self._copy_stream is not None:  # a CUDA graph's capture must end with all its streams joined
            torch.cuda.current_stream(self._device).wait_stream(self._copy_stream)

    def _wait_for_compute(self) -> None:
        """Make later copies wait for all work launched so far."""
        if self._copy_stream is not None:
            self._copy_stream.wait_stream(torch.cuda.current_stream(self._device))

    def _copy(self, buffer: FlatLayer, host: FlatLayer) -> None:
        with torch.cuda.stream(self._copy_stream):
            buffer.flat.copy_(host.flat, non_blocking=True)

    def _record_event(self) -> torch.cuda.Event | None:
        return None if self._copy_stream is None else self._copy_stream.record_event()

    def _wait_for_copy(self, event: torch.cuda.Event | None) -> None:
        """Make later work on the current stream wait for the copy."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)


def flatten(layer: LayerBase, device: torch.device, pinned: bool = False) -> FlatLayer:
    """Copy a layer into one memory block on `device`; tensors that share memory still do."""
    tensors = {id(tensor): tensor for tensor in _tensors_in(layer)}
    spans: dict[int, tuple[int, int]] = {}
    for tensor in tensors.values():
        first, last = _span(tensor)
        start, end = spans.get(_storage_address(tensor), (first, last))
        spans[_storage_address(tensor)] = min(start, first), max(end, last)
    offsets, total = {}, 0
    for address, (start, end) in spans.items():
        aligned = start - start % ALIGNMENT  # keeps each tensor's address modulo ALIGNMENT
        offsets[address] = total - aligned
        total += end - aligned + (aligned - end) % ALIGNMENT
    flat = torch.empty(total, dtype=torch.uint8, device=device, pin_memory=pinned)
    moved = {}
    for key, tensor in tensors.items():
        offset = (offsets[_storage_address(tensor)] + tensor.storage_offset() * tensor.itemsize) // tensor.itemsize
        view = torch.empty(0, dtype=tensor.dtype, device=device)
        moved[key] = view.set_(flat.untyped_storage(), offset, tensor.size(), tensor.stride())
        moved[key].copy_(tensor)
    return FlatLayer(flat, copy.deepcopy(layer, dict(moved)))  # the memo replaces each tensor by its view


def _storage_address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return a tensor's first and last + 1 byte in its storage."""
    first = tensor.storage_offset() * tensor.itemsize
    reach = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return int(first), int(first + (reach + 1) * tensor.itemsize)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor of a layer's vectors, norms and linear maps."""
    if isinstance(value, Tensor):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _tensors_in(getattr(value, field.name))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors_in(part)
    elif isinstance(value, Linear):
        for part in vars(value).values():
            yield from _tensors_in(part)
