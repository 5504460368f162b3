"""From one device to the next without waiting: values of several steps on their way, ordered by events of streams."""

from __future__ import annotations

import torch
from torch import Tensor


class Link:
    """A ring of places at the target. What is sent lies there until it is received or a newer one makes it needless.

    Values go straight from GPU to GPU where the machine lets them (`how` is "peer"), else through pinned memory of the
    host. The source's stream waits only for a place that was sent to `depth` sends ago and is still being read. One
    thread uses a link. It sends and receives on the streams that are the two devices' current ones when it is made.
    """

    def __init__(self, source: torch.device, target: torch.device, size: int, dtype: torch.dtype, depth: int) -> None:
        """Places for `size` numbers each."""
        is_direct = source == target or torch.cuda.can_device_access_peer(target, source)
        self.how = "peer" if is_direct else "pinned memory"
        self._from, self._to = torch.cuda.current_stream(source), torch.cuda.current_stream(target)
        here = {"device": target} if self.how == "peer" else {"pin_memory": True}
        self._places = [torch.empty(size, dtype=dtype, **here) for _ in range(depth)]
        self._arrived = [torch.cuda.Event() for _ in range(depth)]
        self._taken = [torch.cuda.Event() for _ in range(depth)]
        self._idle = torch.cuda.Stream(target)
        """Stands for the target's stream in a copy, which would else wait for all that the target has to do."""
        self.sent = 0
        """Sends so far; the last one has this number."""
        self.received = 0

    def send(self, values: Tensor) -> int:
        """Start to carry values [n], n at most the size, as soon as the source's stream has made them: their number."""
        at = self.sent % len(self._places)
        self._from.wait_event(self._taken[at])
        place = self._places[at][: len(values)]
        if self.how == "peer" and self._from.device != self._to.device:
            with torch.cuda.stream(self._idle):
                place.copy_(values, non_blocking=True)
        else:
            place.copy_(values, non_blocking=True)
        self._arrived[at].record(self._from)
        self.sent += 1
        return self.sent

    def receive(self, number: int, into: Tensor) -> None:
        """Have the target's stream wait for send `number` and copy it into `into` [n]; older ones are dropped."""
        assert self.received < number <= self.sent, "each is received once, in order"
        at = (number - 1) % len(self._places)
        self._to.wait_event(self._arrived[at])
        into.copy_(self._places[at][: len(into)], non_blocking=True)
        self._taken[at].record(self._to)
        self.received = number
