"""Copies between two devices without waiting, ordered by stream events."""

from __future__ import annotations

from collections.abc import Sequence

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
        """Make the target's stream wait for send `number` and copy it to into[:count]. Drops older ones."""
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
        self._is_read = is_read
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
        """Store tokens [n] of these slots, from a device or the host.

        Returns the number for `receive`.
        """
        if not self._is_read:
            return 0
        values = torch.as_tensor(tokens, dtype=torch.int64).to(self.sampled_tokens.device, non_blocking=True)
        self.sampled_tokens[on_device(req_slots, torch.int64, self.sampled_tokens.device)] = values
        return self.send()

    def send(self) -> int:
        """Start to send all tokens to the first device. Returns an increasing number."""
        return 0 if self._link is None else self._link.send(self.sampled_tokens, len(self.sampled_tokens))

    def receive(self, number: int) -> None:
        """Make the first device wait for that `send`, unless it received that one or a later one."""
        if self._link is not None and number > self._link.received:
            self._link.receive(number, self.input_tokens, len(self.input_tokens))
