"""Requests of web pages: hosts, origins and content types that a browser may send.

Any page in a visitor's browser can send requests to the visitor's machine. Without a secret, the service must tell them
from its own page. Browsers set `Origin` and `Sec-Fetch-Site` themselves; a page cannot change them. By DNS rebinding a
page reaches the service under a host name of its own, so the host is checked too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from routes.api_keys import parse_address
from routes.config import HttpConfig
from routes.request.form_body import MULTIPART
from routes.response.http_response import JSON
from rwkv_batch.errors import ErrorKind, ServiceError

if TYPE_CHECKING:
    from routes.route import Route

ANY = "*"
_LOCAL_NAME = "localhost"
_SHOWN_CHARACTERS = 100

Header = Callable[[str], str | None]


class BrowserRules:
    """The rules of one service for requests from browsers."""

    def __init__(self, config: HttpConfig) -> None:
        self._has_secret = bool(config.password or config.keys_file)
        self.origins = config.cors_origin or ((ANY,) if self._has_secret else ())
        """Origins whose pages may use every route."""
        self._hosts = config.allowed_hosts
        self._checks_host = bool(self._hosts) or (_is_loopback(config.host) and not self._has_secret)

    def allowed_origin(self, header: Header, allows_any_origin: bool) -> str:
        """Return Access-Control-Allow-Origin of the answer, "" for none."""
        if allows_any_origin or ANY in self.origins:
            return ANY
        origin = header("origin") or ""
        return origin if origin in self.origins else ""

    def check(self, route: Route, header: Header) -> None:
        """Check a request. Raises ServiceError: 403 for its host or origin, 415 for its content type."""
        if not route.is_public:
            self._check_host(header("host") or "")
        if not (route.is_public or self._has_secret or self.allowed_origin(header, route.allows_any_origin)):
            _check_origin(header)
        if route.body is not None or route.uploads:
            _check_content_type(route, header)

    def _check_host(self, host: str) -> None:
        """Check the header `Host`, which every browser sends. Raises ServiceError.

        DNS rebinding needs a name, so without --allowed-hosts an address is fine.
        """
        name = _host_name(host)
        if not (self._checks_host and host) or _is_loopback(name) or (not self._hosts and parse_address(name)):
            return
        if not any(fits(name, allowed) for allowed in self._hosts):
            allowed = ", ".join(("localhost", *self._hosts))
            message = f"host: {_shown(host)} is not a name of this service, only {allowed}; add it to --allowed-hosts"
            raise ServiceError(ErrorKind.FORBIDDEN, message)


def fits(name: str, allowed: str) -> bool:
    """Return whether a host name fits an entry of --allowed-hosts: a name, `*.` and a domain, or `*`."""
    return allowed in (ANY, name) or (allowed.startswith("*.") and name.endswith(allowed[1:]))


def _check_origin(header: Header) -> None:
    """Check that the service's own page sent the request, or no page. Raises ServiceError."""
    origin, site = header("origin"), header("sec-fetch-site")
    if site == "same-origin" or (origin is None and not _is_loaded_by_page(site, header)):
        return
    host = (header("host") or "").lower()
    if host and (origin or "").lower().partition("://")[2] == host:
        return
    sender = f"origin: a page of {_shown(origin)}" if origin else "origin: a page of another site"
    message = f"{sender} may not use this service, which has no password; give --cors-origin or a password"
    raise ServiceError(ErrorKind.FORBIDDEN, message)


def _is_loaded_by_page(site: str | None, header: Header) -> bool:
    """Return whether another page loads this, for example as an image. A link to it is allowed."""
    return site in ("cross-site", "same-site") and header("sec-fetch-mode") != "navigate"


def _check_content_type(route: Route, header: Header) -> None:
    """Check the content type of a browser's body. Raises ServiceError.

    A page may send a few types to any address without a preflight. JSON is not one of them.
    """
    if header("origin") is None and header("sec-fetch-site") is None:
        return
    given = (header("content-type") or "").partition(";")[0].strip().lower()
    allowed = (route.uploads or JSON, *((MULTIPART,) if route.takes_form else ()))
    if given not in allowed:
        message = f"Content-Type: must be {' or '.join(allowed)} in a browser's request, got {_shown(given) or 'none'}"
        raise ServiceError(ErrorKind.UNSUPPORTED_MEDIA_TYPE, message)


def _shown(text: str) -> str:
    return text[:_SHOWN_CHARACTERS]


def _host_name(host: str) -> str:
    """Return a `Host` header's name, without port and brackets."""
    name = host.strip().lower()
    return name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0].rstrip(".")


def _is_loopback(name: str) -> bool:
    """Return whether a name or address means this machine in every browser."""
    address = parse_address(name)
    return name == _LOCAL_NAME or name.endswith(f".{_LOCAL_NAME}") if address is None else address.is_loopback
