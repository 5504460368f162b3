"""Copies tensors to the host: reading one step does not wait for the next."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from native.tensors import Copier


class _PinnedBuffer:
    def __init__(self, max_tokens: int) -> None:
        self.memory = torch.empty(max_tokens, dtype=torch.int64).pin_memory()
        self.numbers = self.memory.numpy()
        self.arrived = torch.cuda.Event()


class HostCopy:
    """`read` waits for these copies, not for later steps."""

    def __init__(self, *tensors: Tensor) -> None:
        """Starts to copy tensors [...] of one device. CPU tensors are not copied."""
        self._event: torch.cuda.Event | None = None
        self._host = tensors
        if tensors and tensors[0].is_cuda:
            self._host = tuple(torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors)
            for host, tensor in zip(self._host, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.current_stream(tensors[0].device).record_event()

    def read(self) -> tuple[Tensor, ...]:
        """Tensors [...] in order, with the same dtypes."""
        if self._event is not None:
            self._event.synchronize()
        return self._host

    def tokens(self) -> list[int]:
        """The first tensor, [n] int64, as a list."""
        numbers: list[int] = self.read()[0].tolist()
        return numbers


class TokenCopy:
    def __init__(self, buffer: _PinnedBuffer, count: int, release: Callable[[_PinnedBuffer], None]) -> None:
        """release: called once with the buffer, after `tokens` or when this object is dropped."""
        self._buffer: _PinnedBuffer | None = buffer
        self._count = count
        self._release = release

    def tokens(self) -> list[int]:
        """Waits for this copy only. Call it once."""
        assert self._buffer is not None, "the buffer may belong to another step"
        buffer, self._buffer = self._buffer, None
        buffer.arrived.synchronize()
        numbers: list[int] = buffer.numbers[: self._count].tolist()
        self._release(buffer)
        return numbers

    def __del__(self) -> None:
        if self._buffer is not None:
            self._release(self._buffer)


class TokenCopies:
    """Copies sampled tokens of one device to reused pinned memory. Engine thread.

    All copies are on one stream, so reusing a buffer whose copy was never awaited is safe.
    """

    def __init__(self, device: torch.device, max_tokens: int) -> None:
        """max_tokens: per step. Uses the device's current stream."""
        self._max_tokens = max_tokens
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._copier = None if self._stream is None else Copier(self._stream)
        self._free: list[_PinnedBuffer] = []

    def start(self, tokens: Tensor) -> TokenCopy | HostCopy:
        """Start to copy tokens [n] int64, contiguous; CPU tensors are not copied. Does not wait."""
        if self._stream is None or self._copier is None:
            return HostCopy(tokens)
        buffer = self._free.pop() if self._free else _PinnedBuffer(self._max_tokens)
        count = len(tokens)
        assert count <= self._max_tokens, f"{count} tokens exceed a buffer of {self._max_tokens}"
        self._copier.copy(buffer.memory, tokens, count)
        buffer.arrived.record(self._stream)
        return TokenCopy(buffer, count, self._free.append)
