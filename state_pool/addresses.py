"""Addresses of PostgreSQL databases and of the folders or buckets of checkpoints.

A database: postgresql://[USER[:PASSWORD]@]HOST[:PORT]/NAME[?OPTIONS][#SCHEMA].
A checkpoint store: file:///FOLDER or s3://BUCKET/PREFIX?endpoint=URL&region=NAME.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

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
    """Parse an address. Raises ValueError; its message contains nothing of the address, which may be secret."""
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


_QUERY = ("endpoint", "region")


@dataclass(frozen=True, slots=True)
class FolderAddress:
    """A folder for checkpoints. Every engine that shares the database mounts it under this path."""

    folder: Path


@dataclass(frozen=True, slots=True)
class BucketAddress:
    """A bucket of an S3-compatible server. Credentials come from the environment."""

    bucket: str
    prefix: str
    endpoint: str
    """"": Amazon's."""
    region: str
    """"": from the environment."""


def parse_checkpoint_address(address: str) -> FolderAddress | BucketAddress:
    """Parse an address. Raises ValueError; its message contains nothing that may be secret."""
    parts = urlsplit(address)
    if parts.scheme == "file":
        folder = Path(unquote(parts.path))
        if parts.netloc or not folder.is_absolute():
            raise ValueError("a folder needs its absolute path, with three slashes: file:///shared/folder")
        return FolderAddress(folder)
    if parts.scheme != "s3":
        raise ValueError("must be file:///FOLDER or s3://BUCKET/PREFIX?endpoint=URL")
    if "@" in parts.netloc or ":" in parts.netloc or not parts.netloc:
        raise ValueError(
            "s3:// is followed by the bucket's name alone; keys come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "the server's address comes from ?endpoint="
        )
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := sorted(set(query) - set(_QUERY)):
        raise ValueError(f"has the unknown parameter {unknown[0]!r}; only {' and '.join(_QUERY)} are allowed")
    endpoint = query.get("endpoint", "")
    if endpoint and (urlsplit(endpoint).scheme not in ("http", "https") or "@" in endpoint):
        raise ValueError("endpoint must be an http:// or https:// address, without a password")
    return BucketAddress(parts.netloc, parts.path.strip("/"), endpoint, query.get("region", ""))
