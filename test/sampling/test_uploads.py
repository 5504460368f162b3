"""A sampler's small pieces on their way to a GPU, over stand-ins of its events: every byte from its own place."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from native import uploads
from native.uploads import HALF_BYTES, Uploads
from sampling.rapid import Entry, Seat

SEAT, ENTRY = ctypes.sizeof(Seat), ctypes.sizeof(Entry)


class Event:
    """Of a half: its number, told when it is recorded or waited for."""

    told: list[tuple[str, int]]
    made = 0

    def __init__(self) -> None:
        self.number, Event.made = Event.made, Event.made + 1

    def record(self, stream: object) -> None:
        self.told.append(("record", self.number))

    def synchronize(self) -> None:
        self.told.append(("wait", self.number))


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> Uploads:
    def copy_on(stream: object, target: torch.Tensor, source: torch.Tensor) -> None:
        assert source.nbytes == target.nbytes
        target.copy_(source)

    Event.told, Event.made = [], 0
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(uploads, "copy_on", copy_on)
    return Uploads(torch.device("cpu"))


def send(ring: Uploads, size: int, number: int) -> None:
    """A piece of so many bytes arrives whole."""
    piece: Any = (ctypes.c_uint8 * size)(*([number % 251] * size))
    target = torch.zeros(size, dtype=torch.uint8)
    ring.send(target, piece)
    assert set(target.tolist()) == {number % 251}


@pytest.mark.parametrize("sizes", [(SEAT,), (SEAT, ENTRY), (SEAT, 2 * ENTRY, SEAT), (HALF_BYTES,), (HALF_BYTES // 2,)])
def test_pieces_that_fill_a_half_to_its_last_byte_are_followed_by_others(ring: Uploads, sizes: tuple[int, ...]) -> None:
    """Rows without a bias do: 2,048 seats are a half. At the end of the second one each row from then on failed."""
    sent, number = 0, 0
    while sent < 5 * HALF_BYTES:
        for size in sizes:
            send(ring, size, number)
            sent, number = sent + size, number + 1
    turns = len(Event.told) // 2
    assert turns >= 4
    assert Event.told == [entry for turn in range(turns) for entry in (("record", turn % 2), ("wait", 1 - turn % 2))]
