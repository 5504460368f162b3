"""A running service, over HTTP."""

from __future__ import annotations

import json
import socket
from typing import Any

import aiohttp
from aiohttp import AddrInfoType

from programs.backends.backend import UNREACHABLE, Reply
from programs.record import RunError

_CONNECT_TIMEOUT_S = 60.0
_KEEPALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}
"""Seconds and probes until a host that has vanished is noticed. A slow answer sends nothing, so reads have no limit."""
_IN_FLIGHT = 256
_OK, _UNAUTHORIZED, _FAILED = 200, 401, 500


class RemoteService:
    """A Backend: the service at a URL. One event loop."""

    read_timeout_s: float | None = None
    """A slow answer sends nothing."""

    def __init__(self, url: str, password: str) -> None:
        self.url = (url if "://" in url else f"http://{url}").rstrip("/")
        self._headers = {"Authorization": f"Bearer {password}"} if password else {}
        self._session: aiohttp.ClientSession | None = None

    def client(self) -> aiohttp.ClientSession:
        """Return the connections to the service. Opens none."""
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S, sock_read=self.read_timeout_s)
            connector = aiohttp.TCPConnector(limit=0, socket_factory=_keepalive_socket)
            self._session = aiohttp.ClientSession(
                headers=self._headers, timeout=timeout, connector=connector, trust_env=True
            )
        return self._session

    async def model(self) -> str:
        """See Backend."""
        return ",".join(await self.models())

    async def models(self) -> tuple[str, ...]:
        """Return the names of the service's models. Raises RunError."""
        try:
            async with self.client().get(f"{self.url}/openai/v1/models") as answer:
                status, value = answer.status, parse_body(await answer.read())
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise RunError(
                f"no service at {self.url} ({_error_text(error)}); check --url, or start the service"
            ) from None
        if status != _OK:
            remedy = "; give it with --password-file FILE" if status == _UNAUTHORIZED else ""
            raise RunError(f"the service at {self.url} refuses: {Reply(status, value).reason}{remedy}")
        try:
            return tuple(str(one["id"]) for one in value["data"])
        except (KeyError, TypeError):
            raise RunError(f"the server at {self.url} is not an rwkv-batch service; check --url") from None

    async def open(self) -> int:
        return _IN_FLIGHT

    async def request(self, path: str, body: dict[str, Any]) -> Reply:
        try:
            async with self.client().post(self.url + path, json={"priority": "batch", **body}) as answer:
                value = parse_body(await answer.read())
        except (aiohttp.ClientError, OSError) as error:
            return Reply(UNREACHABLE, f"the service at {self.url} cannot be reached ({_error_text(error)})")
        status = answer.status
        if status == _OK and not (isinstance(value, dict) and "error" not in value):
            status = _FAILED  # of another server, or an error of an older service
        usage = value.get("usage") or {} if isinstance(value, dict) else {}
        tokens = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
        wait = answer.headers.get("Retry-After", "")
        return Reply(status, value, float(wait) if wait.isdecimal() else None, *tokens)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def _keepalive_socket(address: AddrInfoType) -> socket.socket:
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


def parse_body(body: bytes) -> Any:
    """Return a body's JSON value, or the beginning of its text."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return body[:500].decode("utf-8", "replace")


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
