"""Copies between two devices without waiting, ordered by stream events."""

from __future__ import annotations

import torch
from torch import Tensor

from native.tensors import Copier, copy_on, enable_peer_access


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
        """Number of sends so far, which is the number of the last one."""
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
