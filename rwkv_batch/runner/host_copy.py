"""Tensors on their way to the host, so that reading one step does not wait for the next."""

from __future__ import annotations

import torch
from torch import Tensor


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
