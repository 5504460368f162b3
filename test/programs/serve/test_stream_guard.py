"""Streams whose HTTP worker has ended, with real sockets. The worker is this process."""

from __future__ import annotations

import itertools
import os
import socket
from pathlib import Path

import pytest

from routes.serving import stream_guard
from routes.serving.connections import Connection
from routes.serving.stream_guard import GuardedStreams, StreamGuard
from test.serving import read_all, wait_for

_serials = itertools.count()


def connected() -> tuple[Connection, socket.socket, socket.socket]:
    """Return a worker's view of a connection, its socket, and the client's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    ours.setblocking(False)
    inode = os.fstat(ours.fileno()).st_ino
    return Connection(next(_serials), ours.fileno(), inode, "127.0.0.1"), ours, client


def descriptors_of(inode: int) -> int:
    """Return how many descriptors of this process are that socket."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(entry.readlink()))
        except OSError:
            continue
    return links.count(f"socket:[{inode}]")


def test_only_streams_that_have_not_ended_get_the_event() -> None:
    streams = GuardedStreams()
    guard = StreamGuard(streams.worker_link)
    (lost, lost_ours, lost_client), (done, done_ours, done_client) = connected(), connected()
    assert guard.watch(lost, b"data: lost\n\n") is not None
    number = guard.watch(done, b"data: lost\n\n")
    assert number is not None
    wait_for(lambda: descriptors_of(done.inode) == 2, 20, "the supervisor has it")
    guard.release(number)
    wait_for(lambda: descriptors_of(done.inode) == 1, 20, "the supervisor has closed it")
    lost_ours.close()
    streams.end(os.getpid() + 1)
    assert descriptors_of(lost.inode) == 1, "another worker's streams are held"
    streams.end(os.getpid())
    assert read_all(lost_client) == b"c\r\ndata: lost\n\n\r\n0\r\n\r\n"
    done_ours.close()
    assert read_all(done_client) == b""
    lost_client.close()
    done_client.close()


def test_a_connection_that_has_closed_is_not_held() -> None:
    streams = GuardedStreams()
    guard = StreamGuard(streams.worker_link)
    connection, ours, client = connected()
    client.close()
    wait_for(lambda: not connection.is_open(), 20, "the client has left")
    assert guard.watch(connection, b"data: lost\n\n") is None
    wait_for(lambda: descriptors_of(connection.inode) == 1, 20, "it is closed again")
    ours.close()


def test_the_thread_that_receives_outlives_a_message_that_it_cannot_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It died without a line in the log, and no later stream of any worker got its error event."""
    monkeypatch.setattr(stream_guard, "_RETRY_S", 0.0)
    streams = GuardedStreams()
    guard = StreamGuard(streams.worker_link)
    streams.worker_link.send(b"short")
    connection, ours, client = connected()
    assert guard.watch(connection, b"data: lost\n\n") is not None
    wait_for(lambda: descriptors_of(connection.inode) == 2, 20, "the supervisor has it")
    assert "cannot be read" in caplog.text
    ours.close()
    client.close()
    streams.end(os.getpid())


def test_a_full_link_leaves_streams_unguarded_and_forgets_no_end() -> None:
    streams = GuardedStreams()
    guard = StreamGuard(streams.worker_link)
    connection, ours, client = connected()
    number = guard.watch(connection, b"data: lost\n\n")
    assert number is not None
    wait_for(lambda: descriptors_of(connection.inode) == 2, 20, "the supervisor has it")
    with streams._lock:  # the supervisor reads nothing
        while guard.watch(connection, b"x" * 1000) is not None:
            pass
        guard.release(number)
    wait_for(lambda: descriptors_of(connection.inode) > 2, 20, "it reads the others")
    guard.flush()
    streams.end(os.getpid())
    assert b"data: lost" not in client.recv(1 << 20)
    ours.close()
    client.close()
