"""Authentication by password or API key. Routes that change the service require an administrator."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from urllib.parse import unquote

from routes.api_keys import ApiKey
from routes.context import Context


@dataclass(frozen=True, slots=True)
class Grant:
    """Permission to run a request, and its API key."""

    key: ApiKey | None = None


_UNRESTRICTED = Grant()


def anonymous_grant(context: Context, is_admin: bool = False) -> Grant | None:
    """Return what anyone may do: everything if there is neither password nor keys."""
    config = context.config
    expected = config.password or context.keys.is_configured or (is_admin and config.admin_password)
    return None if expected else _UNRESTRICTED


def bearer_grant(context: Context, header: str | None, is_admin: bool = False) -> Grant | None:
    """Return what the `Authorization` header permits."""
    scheme, _, token = (header or "").partition(" ")
    if scheme.lower() != "bearer":
        return None
    return grant(context, token.strip(), is_admin, is_header=True)


def grant(context: Context, secret: str, is_admin: bool = False, is_header: bool = False) -> Grant | None:
    """Return what a secret permits. It may be a key, the password or the admin password."""
    config = context.config
    passwords = [config.admin_password or config.password] if is_admin else [config.password, config.admin_password]
    # Compare with every password, so that the time does not depend on the result.
    matches = [
        bool(expected) and _equal(_decode_secret(secret, expected, is_header), expected) for expected in passwords
    ]
    found = context.keys.find(secret)
    if found is not None and not is_admin:
        return Grant(found)
    return _UNRESTRICTED if any(matches) else None


def _decode_secret(secret: str, expected: str, is_header: bool) -> str:
    """Decode a percent-encoded password: Robyn drops header values with other characters."""
    return unquote(secret) if is_header and not _is_printable(expected) else secret


def _equal(given: str, password: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), password.encode("utf-8", "surrogatepass"))


def _is_printable(password: str) -> bool:
    return password.isascii() and password.isprintable()
