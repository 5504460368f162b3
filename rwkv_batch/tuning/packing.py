"""Packs tokenised documents into batches. Each document begins at a multiple of CHUNK."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rwkv_batch.tuning import Document
from rwkv_batch.tuning.wkv import CHUNK

_LOOK_AHEAD = 24
"""Documents of which the first that fits is placed next."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed documents, [rows, time] each."""

    inputs: Tensor
    targets: Tensor
    weights: Tensor
    """0: does not count in the loss"""
    begins: Tensor
    """True where a document begins, and at the padding after the last one"""

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device."""
        parts = (self.inputs, self.targets, self.weights, self.begins)
        return Batch(*(part.to(device, non_blocking=True) for part in parts))

    def pieces(self, rows: int) -> list[Batch]:
        """Split into batches of at most `rows` rows; 0: one batch."""
        step = rows or len(self.inputs)
        parts = (self.inputs, self.targets, self.weights, self.begins)
        return [Batch(*some) for some in zip(*(part.split(step) for part in parts), strict=True)]

    @property
    def cu_seqlens(self) -> Tensor:
        """Starts of the documents in the flattened rows, and the end: [documents + 1] int32."""
        starts = self.begins.flatten().nonzero().flatten().tolist()
        return torch.tensor([*starts, self.begins.numel()], dtype=torch.int32)


def aligned(length: int) -> int:
    """Round a length up to whole chunks."""
    return -(-length // CHUNK) * CHUNK


def pack(documents: Iterable[Document], rows: int, time: int) -> Iterator[Batch]:
    """Yield batches of at most `rows` rows until the documents end; they have at most `time` + 1 ids each.

    Rows that stay empty are left out, except in endless streams, which have none.
    """
    source, waiting = iter(documents), list[Document]()
    while True:
        placed: list[list[tuple[int, Document]]] = []
        for _ in range(rows):
            row: list[tuple[int, Document]] = []
            at = 0
            while at < time:
                while len(waiting) < _LOOK_AHEAD and (more := next(source, None)) is not None:
                    if 0 < len(more) <= time:
                        waiting.append(more)
                fit = next((i for i, document in enumerate(waiting) if len(document) <= time - at), None)
                if fit is None:
                    break
                row.append((at, waiting.pop(fit)))
                at += aligned(len(row[-1][1]))
            if row:
                placed.append(row)
        if not placed:
            return
        yield _filled(placed, time)


def _filled(placed: list[list[tuple[int, Document]]], time: int) -> Batch:
    size = (len(placed), time)
    inputs, targets = torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)
    weights, begins = torch.zeros(size), torch.zeros(size, dtype=torch.bool)
    for row, documents in enumerate(placed):
        end = 0
        for at, document in documents:
            span, end = slice(at, at + len(document)), at + aligned(len(document))
            ids = torch.tensor([*document.ids])
            inputs[row, span], targets[row, span] = ids[:-1], ids[1:]
            weights[row, span] = torch.tensor([*document.weights[1:]])
            begins[row, at] = True
        if end < time:
            begins[row, end] = True
    return Batch(inputs, targets, weights, begins)
