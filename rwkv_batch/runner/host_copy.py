"""Tensors on their way to the host, so that reading one step does not wait for the next."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from native.transfer import Copier


class _PinnedBuffer:
    """Memory of the host for the tokens of one step."""

    def __init__(self, max_tokens: int) -> None:
        self.memory = torch.empty(max_tokens, dtype=torch.int64).pin_memory()
        self.numbers = self.memory.numpy()
        self.arrived = torch.cuda.Event()


class HostCopy:
    """Starts copying tensors to the host; `read` waits for these copies only, not for steps launched later."""

    def __init__(self, *tensors: Tensor) -> None:
        """Tensors [...] of one device; on a CPU nothing is copied."""
        self._event: torch.cuda.Event | None = None
        self._host = tensors
        if tensors and tensors[0].is_cuda:
            self._host = tuple(torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors)
            for host, tensor in zip(self._host, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.current_stream(tensors[0].device).record_event()

    def read(self) -> tuple[Tensor, ...]:
        """The tensors [...] on the host, in the order given, of the same types."""
        if self._event is not None:
            self._event.synchronize()
        return self._host

    def tokens(self) -> list[int]:
        """The first tensor [n], int64."""
        numbers: list[int] = self.read()[0].tolist()
        return numbers


class TokenCopy:
    """Tokens of one step on their way to the host."""

    def __init__(self, buffer: _PinnedBuffer, count: int, release: Callable[[_PinnedBuffer], None]) -> None:
        """`release` is called with the place once, when the tokens were read or nobody wants them."""
        self._buffer: _PinnedBuffer | None = buffer
        self._count = count
        self._release = release

    def tokens(self) -> list[int]:
        """All of them; waits for this copy only. Once."""
        assert self._buffer is not None, "its place may be another step's by now"
        buffer, self._buffer = self._buffer, None
        buffer.arrived.synchronize()
        numbers: list[int] = buffer.numbers[: self._count].tolist()
        self._release(buffer)
        return numbers

    def __del__(self) -> None:
        if self._buffer is not None:
            self._release(self._buffer)


class TokenCopies:
    """Starts copying what steps draw on one device, into pinned memory that later steps use again. Engine thread.

    All copies go on one stream, so one into memory whose last copy nobody has waited for comes behind that.
    """

    def __init__(self, device: torch.device, max_tokens: int) -> None:
        """At most so many tokens a step; the stream is the device's current one."""
        self._max_tokens = max_tokens
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._copier = None if self._stream is None else Copier(self._stream)
        self._free: list[_PinnedBuffer] = []

    def start(self, tokens: Tensor) -> TokenCopy | HostCopy:
        """Tokens [n] int64, contiguous; on a CPU nothing is copied. Does not wait for the device."""
        if self._stream is None or self._copier is None:
            return HostCopy(tokens)
        buffer = self._free.pop() if self._free else _PinnedBuffer(self._max_tokens)
        count = len(tokens)
        assert count <= self._max_tokens, f"{count} tokens do not fit places of {self._max_tokens}"
        self._copier.copy(buffer.memory, tokens, count)
        buffer.arrived.record(self._stream)
        return TokenCopy(buffer, count, self._free.append)
