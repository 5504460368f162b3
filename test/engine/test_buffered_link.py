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


def test_a_call_carries_at_most_a_piece(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffered_link, "PIECE_BYTES", 600)
    sender, _ = ends
    assert sender.take(0.01) == [], "nothing has come in that time"
    for _ in range(5):
        sender.send((0, bytes(190)))
    assert [len(sender.take(0.0) or ()) for _ in range(3)] == [3, 2, 0]


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


def test_a_full_window_opens_with_acknowledged_bytes(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, _ = ends
    sender.send((0, b"short"))
    (size,) = (len(piece) for piece in sender._waiting)
    monkeypatch.setattr(buffered_link, "PIECE_BYTES", size)
    monkeypatch.setattr(buffered_link, "WINDOW_BYTES", size)
    for _ in range(2):
        sender.send((0, b"short"))
    assert [len(sender.take(0.0) or ()) for _ in range(2)] == [1, 0], "exactly the window is on its way"
    for read_bytes, num_pieces in ((size, 1), (2 * size, 1)):
        sender.acknowledge(read_bytes)
        sender.acknowledge(0)  # an older one, that came late
        assert len(sender.take(0.0) or ()) == num_pieces


def frame(num_bytes: int) -> tuple[int, bytes]:
    """A message of so many bytes on the link, up to 256."""
    return 1, bytes(num_bytes - 6)


def test_an_offer_that_does_not_fit_is_refused_and_the_link_stays(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_OFFERED_BYTES", 300)
    sender, receiver = ends
    sender.offer((0, bytes(1000)))  # nothing waits before it
    with pytest.raises(wire.LinkFull, match="1007 bytes wait for the other process, the limit is 300"):
        sender.offer(frame(10))
    carry(sender, receiver)
    for _ in range(5):  # what was taken waits no more
        sender.send(frame(200))
        with pytest.raises(wire.LinkFull):
            sender.offer(frame(102))
        sender.offer(frame(101))
        carry(sender, receiver)
    sender.send(frame(200))
    sender.send(frame(200))
    assert not sender.is_closed and len(sender.take(0.0) or ()) == 2, "only offers are limited"


def test_half_of_the_waiting_frames_are_for_events(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_WAITING_FRAMES", 4)
    sender, _ = ends
    for _ in range(3):
        sender.offer(frame(10))
    with pytest.raises(wire.LinkFull):
        sender.offer(frame(10))
    sender.send(frame(10))
    assert not sender.is_closed


def test_pieces_of_a_stale_call_wait_for_the_next_one(ends: Ends) -> None:
    """The sender may have given up this link."""
    sender, receiver = ends
    sender.send((0, b"first"))
    receiver._last_put_at -= 60.0
    receiver.put_stale(sender.take(0.0) or [])
    assert not receiver.has_input and receiver.silent_s < 60.0
    sender.send((1, b"second"))
    receiver.put_stale(sender.take(0.0) or [])
    incoming = receiver.receive()
    assert [next(incoming), next(incoming)] == [(0, b"first"), (1, b"second")]
    sender.send((2, b"third"))
    receiver.put_stale(sender.take(0.0) or [])
    receiver.put([])
    assert next(incoming) == (2, b"third")


def test_a_link_whose_peer_is_too_slow_is_closed(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_WAITING_BYTES", 500)
    sender, receiver = ends
    for _ in range(5):
        sender.send(frame(250))
        sender.send(frame(250))
        carry(sender, receiver)
    sender.send(frame(250))
    sender.send(frame(251))
    assert sender.is_closed


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


def test_each_frame_may_have_exactly_the_limit(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = ends
    message = (0, bytes(2000))
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", len(msgspec.msgpack.encode([message])))
    for _ in range(2):
        sender.send(message)
    carry(sender, receiver)
    incoming = receiver.receive()
    assert [next(incoming) for _ in range(2)] == [message, message]


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
