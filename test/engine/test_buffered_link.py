"""Links over another transport: frames arrive whole and in order, and queues are bounded."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import pytest

from rwkv_batch.ipc import buffered_link, wire
from rwkv_batch.ipc.buffered_link import BufferedLink

DECODER = msgspec.msgpack.Decoder(list[tuple[int, bytes]])
Ends = tuple[BufferedLink[Any, Any], BufferedLink[Any, Any]]


@pytest.fixture
def ends() -> Ends:
    return BufferedLink(DECODER), BufferedLink(DECODER)


def carry(sender: BufferedLink[Any, Any], receiver: BufferedLink[Any, Any]) -> int:
    """Carry all pieces that may be sent; returns their number."""
    count = 0
    while pieces := sender.take(0.0):
        receiver.put(pieces)
        count += len(pieces)
    return count


def test_frames_of_any_length_come_whole_and_in_order(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffered_link, "PIECE_BYTES", 100)
    sender, receiver = ends
    sent = [(number, bytes([number]) * (number * 37)) for number in range(12)]
    for number, message in enumerate(sent):
        if number % 2:
            sender.send(sent[number - 1], message)
    assert carry(sender, receiver) > len(sent), "long ones travel in pieces"
    incoming = receiver.receive()
    assert [next(incoming) for _ in sent] == sent
    assert receiver.num_pieces > len(sent)


def test_queued_frames_are_sent_together(ends: Ends) -> None:
    sender, _ = ends
    for number in range(5):
        sender.send((number, b"short"))
    assert len(sender.take(0.0) or ()) == 5 and sender.take(0.0) == []


def test_unacknowledged_bytes_are_bounded(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffered_link, "PIECE_BYTES", 1000)
    monkeypatch.setattr(buffered_link, "WINDOW_BYTES", 3000)
    sender, receiver = ends
    sender.send((0, bytes(10_000)))
    carry(sender, receiver)
    assert sender.take(0.0) == [], "the window is full"
    incoming = receiver.receive()
    reads = threading.Thread(target=lambda: next(incoming))
    reads.start()
    while reads.is_alive():
        sender.acknowledge(receiver.read_bytes)
        carry(sender, receiver)
    reads.join()
    assert receiver.read_bytes > 10_000


def test_a_link_without_transport_is_closed(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_WAITING_FRAMES", 3)
    sender, _ = ends
    for number in range(4):
        sender.send((number, b"short"))
    assert sender.is_closed and sender.take(0.0) is None
    sender.send((9, b"nobody hears it"))


def test_a_frame_is_bounded_at_both_ends(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = ends
    sender.send((0, bytes(2000)))
    carry(sender, receiver)
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 1000)
    with pytest.raises(wire.FrameTooLong, match="the limit is 1000"):
        sender.send((1, bytes(2000)))
    with pytest.raises(wire.FrameTooLong, match="the limit is 1000"):
        list(receiver.receive())


def test_close_wakes_waiting_threads(ends: Ends) -> None:
    link, _ = ends
    ended: list[object] = []
    waiting = [
        threading.Thread(target=lambda: ended.append(list(link.receive()))),
        threading.Thread(target=lambda: ended.append(link.take(60.0))),
    ]
    for thread in waiting:
        thread.start()
    link.close()
    for thread in waiting:
        thread.join(60)
    assert sorted(ended, key=str) == [None, []]
