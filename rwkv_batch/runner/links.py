"""From one device to the next without waiting: values of several steps on their way, ordered by events of streams."""

from __future__ import annotations

import torch
from torch import Tensor

from native.transfer import Copier, copy_on, enable_peer_access


class Link:
    """A ring of places at the target. What is sent lies there until it is received or a newer one makes it needless.

    Values go straight from GPU to GPU where the machine lets them (`transport` is "peer"), else through pinned memory of the
    host. The source's stream waits only for a place that was sent to `depth` sends ago and is still being read. No
    stream of the target has a part in a send: one that waits holds up what shares its hardware queue, such as branches
    of a graph. One thread uses a link. It sends and receives on the streams that are the devices' current ones when it
    is made.
    """

    def __init__(self, source: torch.device, target: torch.device, size: int, dtype: torch.dtype, depth: int) -> None:
        """Places for `size` numbers each."""
        is_direct = source == target or torch.cuda.can_device_access_peer(target, source)
        self.transport = "peer" if is_direct else "pinned memory"
        if is_direct and source != target:
            enable_peer_access(source, target)
        self._from, self._to = torch.cuda.current_stream(source), torch.cuda.current_stream(target)
        self._out, self._in = Copier(self._from), Copier(self._to)
        self._size = size
        here = {"device": target} if self.transport == "peer" else {"pin_memory": True}
        self._buffers = [torch.empty(size, dtype=dtype, **here) for _ in range(depth)]
        self._arrived = [torch.cuda.Event() for _ in range(depth)]
        self._consumed = [torch.cuda.Event() for _ in range(depth)]
        self.sent = 0
        """Sends so far; the last one has this number."""
        self.received = 0

    def send(self, values: Tensor, count: int) -> int:
        """Start to carry values[:count], no more than the size, as soon as the source's stream has made them: their
        number."""
        assert count <= self._size, f"{count} numbers do not fit places of {self._size}"
        at = self.sent % len(self._buffers)
        self._consumed[at].wait(self._from)
        self._out.copy(self._buffers[at], values, count)
        self._arrived[at].record(self._from)
        self.sent += 1
        return self.sent

    def receive(self, number: int, into: Tensor, count: int) -> None:
        """Have the target's stream wait for send `number` and copy it into into[:count]; older ones are dropped."""
        assert self.received < number <= self.sent, "each is received once, in order"
        at = (number - 1) % len(self._buffers)
        self._arrived[at].wait(self._to)
        self._in.copy(into, self._buffers[at], count)
        self._consumed[at].record(self._to)
        self.received = number


def copy_to_device(values: Tensor, device: torch.device) -> Tensor:
    """values [...] on another device, for its current stream's next work; neither waits for more than it has to.

    `Tensor.to` between two GPUs would have the source wait until the target has done all that it was given before.
    """
    source = values.device
    both_gpus = source.type == device.type == "cuda"
    if not both_gpus or source == device or not torch.cuda.can_device_access_peer(device, source):
        return values.to(device)
    enable_peer_access(source, device)
    made, stream = values.contiguous(), torch.cuda.current_stream(device)
    stream.wait_event(torch.cuda.current_stream(source).record_event())
    result = torch.empty_like(made, device=device)
    copy_on(stream, result, made)
    made.record_stream(stream)
    return result
