"""Leaves most of a GPU's time to a service that runs there.

Between processes, a GPU switches after some milliseconds at best. So a piece of work must be short, and the next one
must not follow at once: then each step of the service contains about one piece.
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SHARE = 0.2
"""Of the GPU's time, while the service has running rows."""
_MAX_WAIT_S = 0.5
_QUEUED = 8
"""Pieces that a GPU has ahead while it is not paced. They delay the service's first step."""


class Pacer:
    """While a file exists, begins a piece when the piece before has taken no more than its share of the time.

    A piece's own time is the shortest that was seen: other processes' work makes it longer.
    """

    def __init__(self, path: Path, device: torch.device) -> None:
        self._path, self._device = path, device
        self._began: float | None = None
        self._shortest: dict[tuple[str, int], float] = {}
        self._ends: deque[torch.cuda.Event] = deque()

    def wait(self, piece: str, tokens: int) -> None:
        """End a piece and wait. Pieces of a name and as many tokens have the same work."""
        if not self._path.exists():
            self._began = None
            self._keep_queue_short()
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        if self._began is not None:
            key = piece, tokens
            own = self._shortest[key] = min(now - self._began, self._shortest.get(key, _MAX_WAIT_S * SHARE))
            time.sleep(max(0.0, self._began + own / SHARE - now))
        self._began = time.perf_counter()

    def _keep_queue_short(self) -> None:
        if self._device.type != "cuda":
            return
        event = torch.cuda.Event()
        event.record()
        self._ends.append(event)
        if len(self._ends) > _QUEUED:
            self._ends.popleft().synchronize()


class PieceEnd(torch.autograd.Function):
    """Returns its input [N, C]. Ends a piece in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pacer: Pacer, piece: str) -> Tensor:
        """x: [N, C]. piece: the name of the work before it."""
        pacer.wait(piece, len(x))
        ctx.pacer, ctx.piece = pacer, f"after {piece}, backward"
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """grads: one of [N, C]."""
        ctx.pacer.wait(ctx.piece, len(grads[0]))
        return grads[0], None, None
