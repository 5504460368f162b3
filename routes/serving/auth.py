"""Who may ask: holders of the password, and of the keys in --keys-file."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from urllib.parse import unquote

from routes.api_keys import ApiKey
from routes.context import Context


@dataclass(frozen=True, slots=True)
class Grant:
    """That a request may be answered, and under which key."""

    key: ApiKey | None = None


_FREELY = Grant()


def free_grant(context: Context) -> Grant | None:
    """What everybody is granted: all, where neither a password nor keys are set."""
    return None if context.config.password or context.keys.is_used else _FREELY


def bearer_grant(context: Context, header: str | None) -> Grant | None:
    """What the header `Authorization` grants."""
    scheme, _, token = (header or "").partition(" ")
    if scheme.lower() != "bearer":
        return None
    # Robyn drops header values beyond printable ASCII: such a password comes percent-encoded.
    password = context.config.password
    return grant(context, token.strip(), token.strip() if _is_printable(password) else unquote(token.strip()))


def grant(context: Context, key: str, password: str | None = None) -> Grant | None:
    """What a secret grants that may be a key or the password."""
    wanted = context.config.password
    is_password = bool(wanted) and _same(key if password is None else password, wanted)
    found = context.keys.find(key)
    if found is not None:
        return Grant(found)
    return _FREELY if is_password else None


def _same(given: str, password: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), password.encode("utf-8", "surrogatepass"))


def _is_printable(password: str) -> bool:
    return password.isascii() and password.isprintable()
