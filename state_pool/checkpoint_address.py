"""How a checkpoint store is named: file:///FOLDER or s3://BUCKET/PREFIX?endpoint=URL&region=NAME."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

_QUERY = ("endpoint", "region")


@dataclass(frozen=True, slots=True)
class FolderAddress:
    """A folder, which every engine that shares the database has under this path."""

    folder: Path


@dataclass(frozen=True, slots=True)
class BucketAddress:
    """A bucket of an S3-compatible server; whose keys, the environment says."""

    bucket: str
    prefix: str
    endpoint: str
    """"": Amazon's."""
    region: str
    """"": by the environment."""


def parse_checkpoint_address(address: str) -> FolderAddress | BucketAddress:
    """Raises ValueError with what is wrong; the message repeats nothing that may be secret."""
    parts = urlsplit(address)
    if parts.scheme == "file":
        folder = Path(unquote(parts.path))
        if parts.netloc or not folder.is_absolute():
            raise ValueError("a folder is named by its whole path, with three slashes: file:///shared/folder")
        return FolderAddress(folder)
    if parts.scheme != "s3":
        raise ValueError("must be file:///FOLDER or s3://BUCKET/PREFIX?endpoint=URL")
    if "@" in parts.netloc or ":" in parts.netloc or not parts.netloc:
        raise ValueError(
            "s3:// is followed by the bucket's name alone; keys come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "the server's address from ?endpoint="
        )
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := sorted(set(query) - set(_QUERY)):
        raise ValueError(f"knows no {unknown[0]!r} behind the question mark, only {' and '.join(_QUERY)}")
    endpoint = query.get("endpoint", "")
    if endpoint and (urlsplit(endpoint).scheme not in ("http", "https") or "@" in endpoint):
        raise ValueError("endpoint must be an http:// or https:// address, without a password")
    return BucketAddress(parts.netloc, parts.path.strip("/"), endpoint, query.get("region", ""))
