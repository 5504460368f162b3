"""Connections by the address that Robyn gives to handlers, and the identity of clients behind proxies."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from routes.config import PROXY_KEY_HEADER, HttpConfig
from routes.serving import connections
from routes.serving.access import ClientIdentity
from routes.serving.connections import Connection, find

Accept = Callable[[str], tuple[socket.socket, socket.socket]]


@pytest.fixture
def accept() -> Iterator[Accept]:
    """Open a connection to an address of this machine; returns the client's and the server's socket."""
    with ExitStack() as opened:

        def connect(host: str) -> tuple[socket.socket, socket.socket]:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = opened.enter_context(socket.create_server((host, 0), family=family))
            client = opened.enter_context(socket.create_connection(listener.getsockname()[:2]))
            return client, opened.enter_context(listener.accept()[0])

        yield connect


def address_of(server: socket.socket) -> str:
    """Return what Robyn passes on: the result of the replaced getpeername."""
    buffer, length = ctypes.create_string_buffer(128), ctypes.c_uint32(128)
    place, size = ctypes.addressof(buffer), ctypes.addressof(length)
    assert connections._numbered_peer(server.fileno(), place, size) == 0
    assert (int.from_bytes(buffer.raw[:2], "little"), length.value) == (socket.AF_INET6, 28)
    return socket.inet_ntop(socket.AF_INET6, buffer.raw[8:24])


def found(server: socket.socket) -> Connection:
    connection = find(address_of(server))
    assert connection is not None
    return connection


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_connection_is_open_until_its_client_leaves(accept: Accept, host: str) -> None:
    client, server = accept(host)
    connection = found(server)
    assert (connection.peer, connection.is_open()) == (host, True)
    client.sendall(b"more of the request")
    assert connection.is_open()
    client.close()
    assert not connection.is_open()


def test_a_descriptor_that_is_used_again_is_another_connection(accept: Accept) -> None:
    _, server = accept("127.0.0.1")
    other_client, other = accept("127.0.0.1")
    address = address_of(server)
    connection = find(address)
    assert connection is not None and connection.is_open()
    os.dup2(other.fileno(), server.fileno())
    assert not connection.is_open()
    assert found(server).is_open() and find(address) is None
    other_client.close()


@pytest.mark.parametrize(
    "address", [None, "", "unknown", "127.0.0.1", "::1", "100::", "100::ffff:ffff:0:26", "2001:db8::26"]
)
def test_other_addresses_are_no_connections(address: str | None) -> None:
    assert find(address) is None


def test_a_failed_call_fails() -> None:
    with socket.socket() as unconnected:
        buffer, length = ctypes.create_string_buffer(128), ctypes.c_uint32(128)
        assert (
            connections._numbered_peer(unconnected.fileno(), ctypes.addressof(buffer), ctypes.addressof(length)) == -1
        )


KEY = {PROXY_KEY_HEADER: "secret"}


@pytest.mark.parametrize(
    ("peer", "headers", "client"),
    [
        ("9.9.9.9", {}, "9.9.9.9"),
        ("9.9.9.9", {"x-forwarded-for": "1.1.1.1"}, "9.9.9.9"),  # forged by the client
        ("127.0.0.1", {PROXY_KEY_HEADER: "guess", "x-forwarded-for": "1.1.1.1"}, "127.0.0.1"),
        ("127.0.0.1", {**KEY, "x-forwarded-for": "1.1.1.1"}, "1.1.1.1"),
        ("127.0.0.1", {**KEY, "x-forwarded-for": "6.6.6.6, 1.1.1.1"}, "1.1.1.1"),  # nginx's own entry is the last
        ("127.0.0.1", KEY, "127.0.0.1"),
        ("10.0.0.7", {"x-forwarded-for": "6.6.6.6, 1.1.1.1"}, "1.1.1.1"),
        ("10.0.0.7", {"x-forwarded-for": "1.1.1.1, 10.0.0.8"}, "1.1.1.1"),  # two trusted proxies
        ("10.0.0.7", {"x-forwarded-for": "nonsense"}, "10.0.0.7"),
        ("127.0.0.1", {**KEY, "x-forwarded-for": "1.1.1.1, 10.0.0.7"}, "1.1.1.1"),  # trusted proxy, then our nginx
        ("::ffff:9.9.9.9", {}, "9.9.9.9"),
        ("2001:db8:1:2:3::4", {}, "2001:db8:1:2::/64"),
        (None, {}, "unknown"),
    ],
)
def test_the_client_is_the_peer_or_from_a_trusted_proxy(peer: str | None, headers: dict[str, str], client: str) -> None:
    identity = ClientIdentity(HttpConfig(proxy_key="secret", trusted_proxies=("10.0.0.0/8",)))
    assert identity.client(peer, headers.get) == client


def test_without_a_proxy_key_no_peer_is_our_nginx() -> None:
    assert (
        ClientIdentity(HttpConfig()).client("9.9.9.9", {PROXY_KEY_HEADER: "", "x-forwarded-for": "1.1.1.1"}.get)
        == "9.9.9.9"
    )
