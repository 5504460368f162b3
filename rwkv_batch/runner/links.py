"""Copies between two devices and to the host, without waiting. Stream events order the copies."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from native.tensors import Copier, copy_on, enable_peer_access, on_device


class Link:
    """A ring of buffers on the target, each received once or dropped.

    Values go directly from GPU to GPU if possible (`transport` is "peer"), else through pinned host memory. The
    source's stream waits only if a buffer from `depth` sends ago is still being read. A send uses no stream of the
    target: a waiting stream would block others in its hardware queue. One thread uses a link. It works on the streams
    that were current at construction.
    """

    def __init__(self, source: torch.device, target: torch.device, size: int, dtype: torch.dtype, depth: int) -> None:
        """size: numbers per buffer; depth: number of buffers."""
        is_direct = source == target or torch.cuda.can_device_access_peer(target, source)
        self.transport = "peer" if is_direct else "pinned memory"
        if is_direct and source != target:
            enable_peer_access(source, target)
        self._from, self._to = torch.cuda.current_stream(source), torch.cuda.current_stream(target)
        self._out, self._in = Copier(self._from), Copier(self._to)
        self._size = size
        memory = {"device": target} if self.transport == "peer" else {"pin_memory": True}
        self._buffers = [torch.empty(size, dtype=dtype, **memory) for _ in range(depth)]
        self._arrived = [torch.cuda.Event() for _ in range(depth)]
        self._consumed = [torch.cuda.Event() for _ in range(depth)]
        self.sent = 0
        """the number of the last send"""
        self.received = 0

    def send(self, values: Tensor, count: int) -> int:
        """Send values[:count] once the source's stream has computed them. Returns the send's number."""
        assert count <= self._size, f"{count} numbers exceed a buffer of {self._size}"
        at = self.sent % len(self._buffers)
        self._consumed[at].wait(self._from)
        self._out.copy(self._buffers[at], values, count)
        self._arrived[at].record(self._from)
        self.sent += 1
        return self.sent

    def receive(self, number: int, into: Tensor, count: int) -> None:
        """Make the target's stream await send `number` and copy it to into[:count]. Drops older ones."""
        assert self.received < number <= self.sent, "receive each send once, in order"
        at = (number - 1) % len(self._buffers)
        self._arrived[at].wait(self._to)
        self._in.copy(into, self._buffers[at], count)
        self._consumed[at].record(self._to)
        self.received = number


def copy_to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy values [...] to another device for its current stream.

    `Tensor.to` between two GPUs would make the source wait for all earlier work of the target.
    """
    source = values.device
    both_gpus = source.type == device.type == "cuda"
    if not both_gpus or source == device or not torch.cuda.can_device_access_peer(device, source):
        return values.to(device)
    enable_peer_access(source, device)
    contiguous, stream = values.contiguous(), torch.cuda.current_stream(device)
    stream.wait_event(torch.cuda.current_stream(source).record_event())
    result = torch.empty_like(contiguous, device=device)
    copy_on(stream, result, contiguous)
    contiguous.record_stream(stream)
    return result


class LastTokens:
    """The last sampled token of each request slot.

    Written on the last device and read on the first, which may be another one.
    """

    def __init__(
        self, req_slots: int, first: torch.device, last: torch.device, depth: int, is_read: bool = True
    ) -> None:
        """req_slots: number of slots; one more is for padding
        depth: steps in flight, each in at most two launches.
        is_read: False if the host knows every token before the next step, and no graph reads them.
        """
        self.is_read = is_read
        self.sampled_tokens = torch.zeros(req_slots + 1, dtype=torch.int64, device=last)
        """[req_slots + 1] int64 on the last device"""
        self.input_tokens = (
            self.sampled_tokens if first == last else torch.zeros(req_slots + 1, dtype=torch.int64, device=first)
        )
        """[req_slots + 1] int64 on the first device, as of the last `receive`"""
        self._link = None if first == last else Link(last, first, req_slots + 1, torch.int64, 2 * depth + 4)

    @property
    def link_kind(self) -> str | None:
        """How tokens return to the first device; None if they are already there."""
        return None if self._link is None else self._link.transport

    @torch.inference_mode()
    def store(self, req_slots: Sequence[int], tokens: Tensor | Sequence[int]) -> int:
        """Store tokens [n] of these slots, from a device or the host. Returns the number for `receive`."""
        if not self.is_read:
            return 0
        values = torch.as_tensor(tokens, dtype=torch.int64).to(self.sampled_tokens.device, non_blocking=True)
        self.sampled_tokens[on_device(req_slots, torch.int64, self.sampled_tokens.device)] = values
        return self.send()

    def send(self) -> int:
        """Start to send all tokens to the first device. Returns an increasing number."""
        return 0 if self._link is None else self._link.send(self.sampled_tokens, len(self.sampled_tokens))

    def receive(self, number: int) -> None:
        """Make the first device wait for that `send`. Does nothing if the device received that one or a later one."""
        if self._link is not None and number > self._link.received:
            self._link.receive(number, self.input_tokens, len(self.input_tokens))


class _PinnedBuffer:
    def __init__(self, max_tokens: int) -> None:
        self.memory = torch.empty(max_tokens, dtype=torch.int64).pin_memory()
        self.numbers = self.memory.numpy()
        self.arrived = torch.cuda.Event()


class HostCopy:
    """Copies tensors to the host. `read` waits for these copies, not for later steps."""

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
        """Return the tensors [...] on the host. Order and dtypes are the same."""
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
        """Return all tokens. Waits for this copy only. Call it once."""
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


class DeviceGuesses:
    """Implements `Guesses`: tokens on a device, on their way to the host."""

    def __init__(self, tokens: Tensor, num_steps: int, started: float, copies: TokenCopies | None = None) -> None:
        """tokens: [n] int64, contiguous; started: by time.monotonic(); copies: of the tokens' device"""
        self.tokens, self.num_steps = tokens, num_steps
        self._copy: HostCopy | TokenCopy | None = HostCopy(tokens) if copies is None else copies.start(tokens)
        self._on_host: list[int] = []
        self._started = started
        self.seconds = 0.0
        """see `Guesses`"""

    def read(self) -> list[int]:
        """See `Guesses`."""
        if self._copy is not None:
            self._on_host, self._copy = self._copy.tokens(), None
            self.seconds = time.monotonic() - self._started
        return self._on_host
