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

SHARE = 0.25
"""Of the GPU's time, while the service has running rows. Host work of a piece counts in it."""
_PIECE_S = 0.0011
"""Short pieces become one up to this: each switch between processes costs about a third of a millisecond."""
_MAX_WAIT_S = 0.5
_QUEUED = 8
"""Pieces that a GPU has ahead while it is not paced. They delay the service's first step."""
_Work = tuple[str, int]
"""name and tokens of work that ends with a call of `wait`; equal ones take equal time"""


class Pacer:
    """While a file exists, begins a piece when the piece before has taken no more than its share of the time.

    A piece's own time is the shortest that was seen: other processes' work makes it longer.
    """

    def __init__(self, path: Path, device: torch.device) -> None:
        self._path, self._device = path, device
        self._began: float | None = None
        self._piece: tuple[_Work, ...] = ()
        """since the last pause"""
        self._before: _Work | None = None
        self._next: dict[_Work | None, _Work] = {}
        self._shortest: dict[tuple[_Work, ...], float] = {}
        self._least = _MAX_WAIT_S
        """shortest piece: little but the switch to it"""
        self._ends: deque[torch.cuda.Event] = deque()

    def wait(self, name: str, tokens: int) -> None:
        """End work; if it ends a piece, wait."""
        if not self._path.exists():
            self._began, self._piece = None, ()
            self._keep_queue_short()
            return
        work = name, tokens
        self._next[self._before] = work
        self._before = work
        self._piece += (work,)
        if self._began is not None and self._has_room():
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        if self._began is not None:
            longest = self._shortest.get(self._piece, _MAX_WAIT_S * SHARE)
            own = self._shortest[self._piece] = min(now - self._began, longest)
            self._least = min(self._least, own)
            time.sleep(max(0.0, self._began + own / SHARE - now))
        self._began, self._piece = time.perf_counter(), ()

    def _has_room(self) -> bool:
        """Return whether the next work fits into the piece. Both must have been timed."""
        own, following = self._shortest.get(self._piece), self._next.get(self._piece[-1])
        added = None if following is None else self._shortest.get((following,))
        if own is None or added is None:
            return False
        return own + added - self._least <= _PIECE_S

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
