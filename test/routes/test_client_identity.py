"""Client identity: sockets, our own nginx, other proxies, and forged headers."""

from __future__ import annotations

import pytest

from routes.config import HttpConfig
from routes.serving.access import PROXY_KEY_HEADER, ClientIdentity

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
