"""A link with a slow peer: a separate thread sends queued frames, once and in order."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest

from rwkv_batch.errors import ErrorInfo, ErrorKind
from rwkv_batch.ipc import wire
from rwkv_batch.ipc.event_frames import split_frames
from rwkv_batch.ipc.wire import EventBatch, SocketLink
from rwkv_batch.request import Delta, Finish, FinishReason, JobEvents, TokenLogprob
from test.serving import wait_for

DECODER = msgspec.msgpack.Decoder(list[tuple[int, bytes]])
LARGE = b"x" * 300_000
WAIT_S = 60.0
Ends = tuple[SocketLink, SocketLink]


@pytest.fixture
def links() -> Iterator[Ends]:
    """A sender and a receiver with small buffers."""
    ends = socket.socketpair()
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    sender, receiver = (SocketLink(end, DECODER, name) for end, name in zip(ends, ("sender", "receiver"), strict=True))
    yield sender, receiver
    sender.close()
    receiver.close()


class SendsWhenReleased:
    """A lock whose release lets another sender in, once. This happens when the queue is empty."""

    def __init__(self, link: SocketLink) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._done = False

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()
        if threading.current_thread().name == "sender-send" and not self._link._waiting and not self._done:
            self._done = True
            self._link.send((1, LARGE))


def test_a_frame_added_while_the_last_one_is_sent_is_sent_once(links: Ends) -> None:
    sender, receiver = links
    sender._lock = SendsWhenReleased(sender)  # type: ignore[assignment]
    actual: list[tuple[int, int]] = []
    ended = threading.Event()

    def read() -> None:
        for number, body in receiver.receive():
            actual.append((number, len(body)))
            if len(actual) == 2:
                sender.send((2, b"last"))
        ended.set()

    sender.send((0, LARGE))
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    wait_for(lambda: len(actual) == 3, WAIT_S, "all three have come")
    assert actual == [(0, len(LARGE)), (1, len(LARGE)), (2, 4)]
    sender.close()
    assert ended.wait(WAIT_S)


def test_without_a_thread_the_peer_is_lost_and_not_the_sender(links: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = links

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    sender.send((0, LARGE))
    sender.send((1, b"dropped"))
    assert list(receiver.receive()) == []


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """Threads that would send queued frames; they are not started."""
    threads: list[threading.Thread] = []
    monkeypatch.setattr(threading.Thread, "start", lambda thread: threads.append(thread))
    return threads


def unread(link: SocketLink) -> bytes:
    """Return all received bytes until the other side closes. Fails if it stays open."""
    link._connection.settimeout(WAIT_S)
    actual = b""
    while piece := link._connection.recv(1 << 20):
        actual += piece
    return actual


def test_frames_to_a_slow_peer_keep_their_order(
    links: Ends, held: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = links
    sender.send((0, LARGE))
    rest = len(sender._waiting[0])
    assert 0 < rest < len(LARGE), "part of it was sent at once"
    first = receiver._connection.recv(1 << 20)  # now a short frame fits
    sender.send((1, b"short"))
    assert len(sender._waiting) == 2 and len(held) == 1
    monkeypatch.undo()
    held[0].start()
    actual = first
    while len(actual) < len(LARGE) + 20:
        actual += receiver._connection.recv(1 << 20)
    size = int.from_bytes(actual[:4], "big")
    assert DECODER.decode(actual[4 : 4 + size]) == [(0, LARGE)]
    assert DECODER.decode(actual[8 + size :]) == [(1, b"short")]


def test_a_frame_to_a_full_socket_is_sent_whole(links: Ends) -> None:
    sender, receiver = links
    num_bytes = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            num_bytes += sender._connection.send(bytes(1 << 16), socket.MSG_DONTWAIT)
    sender.send((1, b"short"))
    receiver._connection.settimeout(WAIT_S)
    while num_bytes > 0:
        num_bytes -= len(receiver._connection.recv(min(num_bytes, 1 << 20)))
    assert next(receiver.receive()) == (1, b"short")


@pytest.mark.parametrize(("bound", "maximum"), [("MAX_WAITING_FRAMES", 3), ("MAX_WAITING_BYTES", 400_000)])
def test_a_peer_that_reads_nothing_is_cut_off(
    links: Ends, held: list[threading.Thread], monkeypatch: pytest.MonkeyPatch, bound: str, maximum: int
) -> None:
    monkeypatch.setattr(wire, bound, maximum)
    sender, receiver = links
    for number in range(6):
        sender.send((number, LARGE[:150_000]))
    assert sender._closed and not sender._waiting
    assert len(unread(receiver)) < 300_000


def test_a_peer_may_have_exactly_so_many_frames_to_read(
    links: Ends, held: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MAX_WAITING_FRAMES", 3)
    sender, _ = links
    for number in range(3):
        sender.send((number, LARGE))
    assert len(sender._waiting) == 3 and not sender._closed
    sender.send((3, b"short"))
    assert sender._closed


def test_a_peer_may_lag_repeatedly(links: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_WAITING_BYTES", 3 * len(LARGE))
    sender, receiver = links
    messages = receiver.receive()
    for number in range(8):
        sender.send((number, LARGE))
        assert next(messages) == (number, LARGE)


def step_events(seed: int) -> list[JobEvents]:
    """One step's events of several jobs: long rows that end together, log-probabilities, a failed job."""
    rng = random.Random(seed)
    finish = Finish(reason=FinishReason.LENGTH, prompt_tokens=1, completion_tokens=9)
    events = []
    for number in range(rng.randint(1, 6)):
        received = [TokenLogprob(b"token", -1.0, [(b"rival", -2.0)] * 20)] * rng.choice([0, 0, 30])
        deltas = [
            Delta(row, rng.randbytes(rng.choice([3, 900, 40_000])), 9, finish, received or None)
            for row in range(rng.randint(0, 12))
        ]
        error = ErrorInfo(kind=ErrorKind.INTERNAL, message="broken") if rng.random() < 0.2 else None
        events.append(JobEvents(job_id=f"j{number}", deltas=deltas, done=rng.random() < 0.7, error=error))
    return events


@pytest.mark.parametrize("seed", range(30))
def test_events_of_a_step_are_split_into_frames(seed: int) -> None:
    sent, bound = step_events(seed), 50_000
    frames = list(split_frames(sent, bound))
    largest = max((len(msgspec.msgpack.encode(delta)) for event in sent for delta in event.deltas), default=0)
    for frame in frames:
        assert len(msgspec.msgpack.encode([EventBatch(frame)])) <= max(bound, largest) + 2_000
    for event in sent:
        pieces = [piece for frame in frames for piece in frame if piece.job_id == event.job_id]
        assert [delta for piece in pieces for delta in piece.deltas] == event.deltas
        assert [piece.done for piece in pieces[:-1]] == [False] * (len(pieces) - 1)
        assert (pieces[-1].done, pieces[-1].error) == (event.done, event.error)
        assert all(piece.error is None for piece in pieces[:-1])


def test_few_events_need_one_frame() -> None:
    events = [JobEvents(job_id="j", deltas=[Delta(0, b"abc", 1)]), JobEvents(job_id="k", deltas=[], done=True)]
    assert list(split_frames(events)) == [events]
    assert list(split_frames([])) == []


def test_a_frame_that_is_too_long_is_not_sent(links: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 1000)
    sender, receiver = links
    with pytest.raises(wire.FrameTooLong, match="the limit is 1000"):
        sender.send((0, LARGE))
    sender.send((1, b"short"))
    assert next(receiver.receive()) == (1, b"short")


def test_a_frame_may_have_exactly_the_largest_length(links: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = links
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", len(msgspec.msgpack.encode([(1, b"short")])))
    sender.send((1, b"short"))
    assert next(receiver.receive()) == (1, b"short")


def test_a_received_length_is_limited() -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall((0xFFFFFFFF).to_bytes(4, "big") + b"x")
    theirs.close()
    link: SocketLink = SocketLink(ours, DECODER, "receiver")
    with pytest.raises(wire.FrameTooLong, match="4294967295 bytes"):
        list(link.receive())
    link.close()


def test_an_offer_behind_waiting_frames_has_less_room(
    links: Ends, held: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = links
    sender.send((0, LARGE))
    waiting = sender._waiting_bytes
    assert len(held) == 1 and 0 < waiting < len(LARGE) and sender.is_sending
    offered = len(sender._encoder.encode(((1, b"abc"),)))
    monkeypatch.setattr(wire, "MAX_OFFERED_BYTES", waiting + offered - 1)
    with pytest.raises(wire.LinkFull, match=f"^{waiting} bytes wait for the other process, the limit is "):
        sender.offer((1, b"abc"))
    monkeypatch.setattr(wire, "MAX_OFFERED_BYTES", waiting + offered)
    sender.offer((1, b"abc"))
    with pytest.raises(wire.FrameTooLong, match="has 8 bytes, the limit is 6"):
        sender.offer((2, b"abc"), 6)
    sender.send((3, b""))
    reader = threading.Thread(target=sender._send_waiting)
    monkeypatch.undo()
    reader.start()
    incoming = receiver.receive()
    assert [next(incoming) for _ in range(3)] == [(0, LARGE), (1, b"abc"), (3, b"")]
    reader.join(WAIT_S)
    assert (sender._waiting_bytes, sender.is_sending) == (0, False)
    assert receiver.num_pieces >= 4, "a long frame is read in pieces"


def test_a_stream_that_ends_inside_a_frame_has_no_message() -> None:
    ours, theirs = socket.socketpair()
    receiver = SocketLink(theirs, DECODER, "receiver")
    ours.sendall((9).to_bytes(4, "big") + b"half")
    ours.close()
    assert list(receiver.receive()) == []
