"""Small uploads of a sampler to a GPU, with fake events: every byte from its own place."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from native import uploads
from native.uploads import HALF_BYTES, Uploads
from sampling.rapid import Entry, SlotState

SLOT, ENTRY = ctypes.sizeof(SlotState), ctypes.sizeof(Entry)


class Event:
    """The event of a half: logs its number when recorded or awaited."""

    reported: list[tuple[str, int]]
    made = 0

    def __init__(self) -> None:
        self.number, Event.made = Event.made, Event.made + 1

    def record(self, stream: object) -> None:
        self.reported.append(("record", self.number))

    def synchronize(self) -> None:
        self.reported.append(("wait", self.number))


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> Uploads:
    def copy_on(stream: object, target: torch.Tensor, source: torch.Tensor) -> None:
        assert source.nbytes == target.nbytes
        target.copy_(source)

    Event.reported, Event.made = [], 0
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(uploads, "copy_on", copy_on)
    return Uploads(torch.device("cpu"))


def send(ring: Uploads, size: int, number: int) -> None:
    """Assert that a piece of this many bytes arrives complete."""
    piece: Any = (ctypes.c_uint8 * size)(*([number % 251] * size))
    target = torch.zeros(size, dtype=torch.uint8)
    ring.send(target, piece)
    assert set(target.tolist()) == {number % 251}


@pytest.mark.parametrize("sizes", [(SLOT,), (SLOT, ENTRY), (SLOT, 2 * ENTRY, SLOT), (HALF_BYTES,), (HALF_BYTES // 2,)])
def test_uploads_continue_after_a_half_is_exactly_full(ring: Uploads, sizes: tuple[int, ...]) -> None:
    """Rows without a bias fill halves exactly, 2,048 rows each. The row after them uploads too."""
    sent, number = 0, 0
    while sent < 5 * HALF_BYTES:
        for size in sizes:
            send(ring, size, number)
            sent, number = sent + size, number + 1
    turns = len(Event.reported) // 2
    assert turns >= 4
    assert Event.reported == [
        entry for turn in range(turns) for entry in (("record", turn % 2), ("wait", 1 - turn % 2))
    ]
