"""Who asks: the address that a request comes from, as limits and fair shares count it.

The peer of the socket is the client, unless it is a proxy that is believed: our own nginx, which proves itself with a
key that only the supervisor and nginx know, or an address of --trusted-proxies. A stranger's X-Forwarded-For is
ignored. Proxies append the address of whoever asked them, so the list is read from its end.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Callable, Sequence

from routes.config import HttpConfig

PROXY_KEY_HEADER = "x-rwkv-front"
"""What our own nginx proves itself with."""
_FORWARDED = "x-forwarded-for"
_UNKNOWN = "unknown"
_IPV6_PREFIX = 64
"""What one customer of a provider is given: counted as one client."""

Header = Callable[[str], str | None]
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class ClientIdentity:
    """Tells clients apart. One per HTTP worker."""

    def __init__(self, config: HttpConfig) -> None:
        self._proxy_key = config.proxy_key
        self._trusted: Sequence[Network] = [ipaddress.ip_network(text) for text in config.trusted_proxies]

    def client(self, peer: str | None, header: Header) -> str:
        """The client's address (IPv6: its /64 network) of a request from `peer`, whose headers `header` looks up."""
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
