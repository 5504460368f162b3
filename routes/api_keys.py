"""API keys with their names and limits, read from `--keys-file`.

The file is TOML, one table per key:

    [[key]]
    name = "team-a"                 # for logs, metrics and limits; letters, digits and . _ @ -, no address
    key = "sk-8f0c…"                # or its SHA-256, to keep the secret out of the file:
    # sha256 = "…"                  # printf %s "$KEY" | sha256sum
    rows = 64                       # running at the same time; limits are optional
    tokens_per_minute = 100000      # prompts and answers
    requests_per_minute = 600       # generation requests
    admin = true                    # may do what the admin password may; default: false
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Annotated

import msgspec

from rwkv_batch.request import ClientLimits

logger = logging.getLogger(__name__)

_Limit = Annotated[int, msgspec.Meta(ge=1, le=10**12)]
# msgspec searches; `$` would allow a line break at the end.
_Name = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9._@-]{1,64}\Z")]
_Key = Annotated[str, msgspec.Meta(pattern=r"\A[!-~]{8,512}\Z")]
_Digest = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]


Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_MAX_ADDRESS_CHARACTERS = 100
"""A longer text is no address, and is not kept."""
LIMITS = ("rows", "tokens_per_minute", "requests_per_minute")


class ApiKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: _Name
    key: _Key | None = None
    """Printable ASCII without spaces, as a Bearer token requires."""
    sha256: _Digest | None = None
    rows: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    requests_per_minute: _Limit | None = None
    admin: bool = False
    """Whether it may use the admin routes, and sees everyone's files, batches and figures."""

    @property
    def limits(self) -> ClientLimits:
        return ClientLimits(**{name: getattr(self, name) for name in LIMITS})

    @property
    def digest(self) -> str:
        """SHA-256 of the key in hexadecimal digits."""
        return self.sha256 if self.key is None else key_digest(self.key)  # type: ignore[return-value]  # one is given


class _File(msgspec.Struct, forbid_unknown_fields=True):
    key: list[ApiKey] | None = None


class KeysError(Exception):
    """The keys file cannot be used. The message is one line and contains no key."""


def load_keys(path: str) -> tuple[ApiKey, ...]:
    """Read the keys of a file. Raises KeysError."""
    try:
        keys = msgspec.toml.decode(Path(path).read_bytes(), type=_File).key
    except OSError as error:
        raise KeysError(f"{path} cannot be read: {error.strerror}; docs/operations.md shows an example") from None
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise KeysError(f"{path} is not a keys file: {str(error).splitlines()[0]}") from None
    if keys is None:  # an empty file may be half written
        raise KeysError(f"{path} has no [[key]]; write the line `key = []` if no key is to be in force")
    for number, api_key in enumerate(keys, 1):
        if (api_key.key is None) == (api_key.sha256 is None):
            raise KeysError(f"{path}: key {number} ({api_key.name}) must have either key or sha256")
        if parse_address(api_key.name) is not None:  # these are the names of clients without a key
            message = f"key {number} is named {api_key.name}, the address of clients without a key; choose a name"
            raise KeysError(f"{path}: {message} that is no IP address")
    names, digests = Counter(api_key.name for api_key in keys), Counter(api_key.digest for api_key in keys)
    for api_key in keys:
        if names[api_key.name] > 1 or digests[api_key.digest] > 1:
            raise KeysError(f"{path}: {api_key.name} is there twice; every key needs its own name and its own value")
    return tuple(keys)


@lru_cache(1024)
def _parse_address(text: str) -> Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def parse_address(text: str) -> Address | None:
    """Return the text's IP address, None if it has none. Recent ones are cached."""
    return _parse_address(text) if len(text) <= _MAX_ADDRESS_CHARACTERS else None


class KeysFile:
    """The keys file and its last valid content. The supervisor owns it and sends the keys to all HTTP workers."""

    def __init__(self, path: str = "") -> None:
        """`path`: --keys-file, "" for none. There are no keys until `read`."""
        self._path = path
        self._is_read = False
        self.keys: tuple[ApiKey, ...] = ()

    @property
    def is_configured(self) -> bool:
        return bool(self._path)

    @property
    def names(self) -> frozenset[str] | None:
        """Return the names of the keys. None if they are not known: there is no file, or it was never valid."""
        return frozenset(key.name for key in self.keys) if self._is_read else None

    def read(self) -> None:
        """Reload the file. The current keys stay if it is invalid."""
        if not self._path:
            return
        try:
            self.keys = load_keys(self._path)
            self._is_read = True
        except KeysError as error:
            logger.error("--keys-file %s; %d keys stay in force", error, len(self.keys))
        else:
            logger.info("--keys-file %s: %d keys are in force", self._path, len(self.keys))


def key_digest(key: str) -> str:
    """Return the SHA-256 of a key in hexadecimal digits."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
