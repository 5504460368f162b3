"""How a PostgreSQL server's database is named: postgresql://[USER[:PASSWORD]@]HOST[:PORT]/NAME[?OPTIONS][#SCHEMA]."""

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
"""As libpq reads it; an @ where none may be is one of a password whose characters are not written %XX."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """A server's database, and the schema in it."""

    dsn: str
    """What the driver is given, with what is secret in it."""
    schema: str
    display_name: str
    """What it is called in messages: without user, password and options."""


def parse_server_address(address: str) -> ServerAddress:
    """Raises ValueError with what is wrong; the message repeats nothing of the address, which may be secret."""
    found = _ADDRESS.fullmatch(address)
    if found is None or not _are_ports(found["place"]):
        raise ValueError(
            "must be postgresql://USER:PASSWORD@HOST:PORT/NAME#SCHEMA, of which all but the host may be left out; "
            "write / @ # ? : and % in a name or password as %2F %40 %23 %3F %3A and %25"
        )
    schema = found["schema"] or ""
    display_name = found["scheme"] + found["place"] + (f"#{schema}" if schema else "")
    return ServerAddress(address.partition("#")[0], schema, display_name)


def _are_ports(place: str) -> bool:
    """Whether what stands behind the hosts can be ports; digits may be a password behind which @HOST was forgotten."""
    hosts = place.partition("/")[0].split(",")
    ports = (host.rpartition("]")[2].partition(":")[2] for host in hosts)
    return all(not port or 0 < int(port[:6]) <= _MAX_PORT for port in ports)
