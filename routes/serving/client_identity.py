"""The client of a request: its address, for limits and fair scheduling.

The client is the peer of the socket, unless the peer is a trusted proxy. Trusted are our own nginx, which sends a
secret key, and the addresses of --trusted-proxies. X-Forwarded-For from others is ignored. Proxies append addresses to
this header, so it is read from its end.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Callable, Sequence

from routes.config import HttpConfig

PROXY_KEY_HEADER = "x-rwkv-front"
"""Header with the secret key of our own nginx."""
_FORWARDED = "x-forwarded-for"
_UNKNOWN = "unknown"
_IPV6_PREFIX = 64
"""Network size that a provider gives one customer. It counts as one client."""

Header = Callable[[str], str | None]
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class ClientIdentity:
    """Identifies clients. One per HTTP worker."""

    def __init__(self, config: HttpConfig) -> None:
        self._proxy_key = config.proxy_key
        self._trusted: Sequence[Network] = [ipaddress.ip_network(text) for text in config.trusted_proxies]

    def client(self, peer: str | None, header: Header) -> str:
        """Return the address of the client (IPv6: its /64 network).

        peer: address of the socket's peer
        header: returns the value of a request header
        """
        address = _parse(peer)
        chain = (header(_FORWARDED) or "").split(",")
        if self._is_our_nginx(header):
            address = _parse(chain.pop()) or address
        while address is not None and chain and self._is_trusted(address):
            before = _parse(chain.pop())
            if before is None:
                break
            address = before
        return _as_text(address)

    def _is_our_nginx(self, header: Header) -> bool:
        given = header(PROXY_KEY_HEADER)
        return (
            bool(self._proxy_key)
            and given is not None
            and hmac.compare_digest(given.encode(), self._proxy_key.encode())
        )

    def _is_trusted(self, address: Address) -> bool:
        return any(address in network for network in self._trusted)


def _parse(text: str | None) -> Address | None:
    try:
        address = ipaddress.ip_address((text or "").strip().strip("[]"))
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _as_text(address: Address | None) -> str:
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((address, _IPV6_PREFIX), strict=False))
    return _UNKNOWN if address is None else str(address)
