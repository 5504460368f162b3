"""Addresses of PostgreSQL databases: postgresql://[USER[:PASSWORD]@]HOST[:PORT]/NAME[?OPTIONS][#SCHEMA]."""

from __future__ import annotations

import re
from dataclasses import dataclass

SCHEMES = ("postgresql://", "postgres://")
_MAX_PORT = 65_535
_HOST = r"(?:\[[^\]@/?#]*\]|[^\[\]:,@/?#]*)(?::\d*)?"
_ADDRESS = re.compile(
    rf"(?P<scheme>postgres(?:ql)?://)(?:[^@/#]*@)?(?P<place>{_HOST}(?:,{_HOST})*(?:/[^?#@]*)?)"
    r"(?:\?[^#]*)?(?:#(?P<schema>[^@]*))?"
)
"""As libpq reads it. An @ in a wrong place belongs to a password that is not percent-encoded."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    dsn: str
    """with its secrets"""
    schema: str
    display_name: str
    """without user, password and options"""


def parse_server_address(address: str) -> ServerAddress:
    """Raises ValueError; its message contains nothing of the address, which may be secret."""
    found = _ADDRESS.fullmatch(address)
    if found is None or not _are_ports(found["place"]):
        raise ValueError(
            "must be postgresql://USER:PASSWORD@HOST:PORT/NAME#SCHEMA; all but the host may be left out; "
            "write / @ # ? : and % in a name or password as %2F %40 %23 %3F %3A and %25"
        )
    schema = found["schema"] or ""
    display_name = found["scheme"] + found["place"] + (f"#{schema}" if schema else "")
    return ServerAddress(address.partition("#")[0], schema, display_name)


def _are_ports(place: str) -> bool:
    """Check the ports after the hosts. Digits may be a password where @HOST is missing."""
    hosts = place.partition("/")[0].split(",")
    ports = (host.rpartition("]")[2].partition(":")[2] for host in hosts)
    return all(not port or 0 < int(port[:6]) <= _MAX_PORT for port in ports)
