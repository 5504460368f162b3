"""Clients of a request: their address, their permission by password or API key, and the access log.

The client is the peer of the socket, unless the peer is a trusted proxy. Trusted are our own nginx, which sends a
secret key, and the addresses of --trusted-proxies. X-Forwarded-For from others is ignored. Proxies append addresses to
this header, so it is read from its end.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from routes.api_keys import Address, ApiKey, parse_address
from routes.config import PROXY_KEY_HEADER, HttpConfig
from routes.context import Context
from routes.request_context import RequestContext, current_request
from rwkv_batch.errors import ErrorKind, ServiceError

_FORWARDED = "x-forwarded-for"
_UNKNOWN = "unknown"
MAX_ANONYMOUS_BYTES = 1 << 16
"""A larger body is not searched for a password."""
_IPV6_PREFIX = 64
"""Network size that a provider gives one customer. It counts as one client."""

Header = Callable[[str], str | None]
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


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

    def is_proxy(self, peer: str, header: Header) -> bool:
        """Return whether a trusted proxy sends the request. Its connections carry requests of several clients."""
        address = _parse(peer)
        return self._is_our_nginx(header) or (address is not None and self._is_trusted(address))

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
    address = parse_address((text or "").strip().strip("[]"))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _as_text(address: Address | None) -> str:
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((address, _IPV6_PREFIX), strict=False))
    return _UNKNOWN if address is None else str(address)


@dataclass(frozen=True, slots=True)
class Grant:
    """Permission to run a request, and its API key."""

    key: ApiKey | None = None
    is_admin: bool = False
    """Whether it may also use the routes that change the service, and see all of /status."""


def anonymous_grant(context: Context) -> Grant | None:
    """Return what anyone may do: everything if there is neither password nor keys."""
    config = context.config
    if config.password or context.keys.is_configured:
        return None
    return Grant(is_admin=not config.admin_password)


def header_grant(context: Context, header: Header) -> Grant | None:
    """Return the rights of the secret in `Authorization` or `x-api-key`.

    `Authorization` may be Bearer or DeepL-Auth-Key.
    """
    scheme, _, token = (header("authorization") or "").partition(" ")
    secrets = (token if scheme.lower() in ("bearer", "deepl-auth-key") else None, header("x-api-key"))
    grants = (grant(context, one.strip(), is_header=True) for one in secrets if one is not None)
    return next(filter(None, grants), None)


def shows_secret(context: Context, identity: ClientIdentity, peer: str, head: bytes) -> bool:
    """Return whether the head of a request shows a secret.

    Also true for a request from a trusted proxy. A head that is not complete counts as it is.
    """
    lines = (line.partition(b":") for line in head.partition(b"\r\n\r\n")[0].split(b"\r\n")[1:])
    headers = {name.decode("latin-1").lower(): value.decode("latin-1").strip() for name, _, value in lines}
    return identity.is_proxy(peer, headers.get) or header_grant(context, headers.get) is not None


def grant(context: Context, secret: str, is_header: bool = False) -> Grant | None:
    """Return the rights of a secret: a key, the password or the admin password."""
    config = context.config
    # Compare with every password, so that the time does not depend on the result.
    is_password, is_admin = (
        bool(expected) and _is_equal(secret, expected, is_header)
        for expected in (config.password, config.admin_password)
    )
    key = context.keys.find(secret)
    if is_password or is_admin:
        return Grant(is_admin=is_admin or not config.admin_password)
    return None if key is None else Grant(key, key.admin)


def unauthorized(access: Grant | None, *, has_large_body: bool = False) -> ServiceError:
    """Return the error for a request whose permission is not enough."""
    if access is None:
        message = "Unauthorized: invalid or missing password or key"
        if has_large_body:
            message += f"; a body above {MAX_ANONYMOUS_BYTES} bytes needs it as a header, Authorization: Bearer"
    elif access.key is not None:
        message = f"Unauthorized: the key {access.key.name!r} has no admin rights; use a key that has them"
    else:
        message = "Unauthorized: this route needs the admin password"
    return ServiceError(ErrorKind.UNAUTHORIZED, message)


def _is_equal(given: str, password: str, is_header: bool) -> bool:
    """Compare. Clients percent-encode other than printable ASCII, because Robyn drops such header values."""
    if is_header and not (password.isascii() and password.isprintable()):
        given = unquote(given)
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), password.encode("utf-8", "surrogatepass"))


logger = logging.getLogger("access")

DONE, CLIENT_DISCONNECTED = "done", "client_left"
"""Outcomes of requests, in addition to the error kinds."""
CLIENT_CLOSED_REQUEST = 499
"""Status of a request whose client left before its answer, in log and metrics. nginx has the same."""
MAX_LOGGED_ERROR = 300
"""Characters of an error's message in the log."""
PROBES = frozenset({"/healthz", "/readyz", "/health", "/metrics", "/authz"})
"""Sent often by other programs, so they are logged at level debug."""
_POLLED = frozenset({"/state/status", "/v1/tokens/count"})
"""Sent often by the page. Like reads, they would push other requests out of /v1/requests."""
_FIRST_ERROR = 400


class RequestIds(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        """See logging.Filter. Never drops a record."""
        if current_request().request_id and not hasattr(record, "fields"):
            record.fields = {"request_id": current_request().request_id}
        return True


def add_request_ids() -> None:
    """Add request ids to all log lines of this process."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(RequestIds())


def log_access(request_context: RequestContext, status: int, outcome: str) -> dict[str, Any]:
    """Log a finished request and return its entry of /v1/requests, which may be empty.

    outcome: DONE, CLIENT_DISCONNECTED or the error kind
    """
    level = logging.DEBUG if request_context.route in PROBES else logging.INFO
    is_change = request_context.method != "GET" and request_context.route not in _POLLED
    is_listed = request_context.route not in PROBES and (is_change or status >= _FIRST_ERROR)
    if not is_listed and not logger.isEnabledFor(level):
        return {}
    fields = _fields(request_context, status, outcome)
    logger.log(level, "%s %s %d", request_context.method, request_context.route, status, extra={"fields": fields})
    return {"at": round(time.time(), 3), **fields} if is_listed else {}


def _fields(request_context: RequestContext, status: int, outcome: str) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "request_id": request_context.request_id,
        "client": request_context.client,
        "method": request_context.method,
        "route": request_context.route,
        "status": status,
        "outcome": outcome,
        "total_s": round(time.monotonic() - request_context.started, 4),
    }
    if request_context.rows:
        fields |= {
            "rows": request_context.rows,
            "prompt_tokens": request_context.prompt_tokens,
            "completion_tokens": request_context.completion_tokens,
        }
    if request_context.queue_s is not None:
        fields["queue_s"] = round(request_context.queue_s, 4)
    if request_context.is_stream and request_context.first_byte_s:
        fields["ttft_s"] = round(request_context.first_byte_s, 4)
    if request_context.refusal is not None:
        refusal = request_context.refusal
        fields["refused"] = {"field": refusal.field, "message": refusal.message[:MAX_LOGGED_ERROR]}
    if request_context.ignored:
        fields["ignored"] = request_context.ignored
    return fields
