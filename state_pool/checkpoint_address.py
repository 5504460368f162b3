"""Addresses of checkpoint stores: file:///FOLDER or s3://BUCKET/PREFIX?endpoint=URL&region=NAME."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

_QUERY = ("endpoint", "region")


@dataclass(frozen=True, slots=True)
class FolderAddress:
    """Every engine that shares the database mounts the folder under this path."""

    folder: Path


@dataclass(frozen=True, slots=True)
class BucketAddress:
    """Credentials come from the environment."""

    bucket: str
    prefix: str
    endpoint: str
    """"": Amazon's."""
    region: str
    """"": from the environment."""


def parse_checkpoint_address(address: str) -> FolderAddress | BucketAddress:
    """Raises ValueError; its message contains nothing that may be secret."""
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
