"""Streamed answers of the native chat route: from a service. local_answers.py has those of an engine."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any, Protocol

import aiohttp

from programs.batch.tasks import CHAT
from programs.chat.conversation import ConsoleError, Piece

_DATA, _DONE = b"data: ", b"[DONE]"
_MODELS_PATH = "/v1/models"
_READ_TIMEOUT_S = 60.0
_UNAUTHORIZED = 401


class AnswerSource(Protocol):
    """Streams answers of the native chat route."""

    async def open(self) -> None:
        """Prepares the source. Raises RunError or ConsoleError."""

    async def models(self) -> tuple[str, ...]:
        """Returns the names that `model` may have. Empty if the source does not say."""

    def stream(self, body: dict[str, Any]) -> AsyncGenerator[Piece, None]:
        """Yields the pieces of an answer. Raises ConsoleError. Closing the generator cancels the request."""

    async def close(self) -> None:
        """Releases the source."""


class RemoteAnswers:
    """An AnswerSource: a service at a URL."""

    def __init__(self, url: str, password: str) -> None:
        self._service = (url if "://" in url else f"http://{url}").rstrip("/")
        self._url = self._service + CHAT
        self._headers = {"Authorization": f"Bearer {password}"} if password else {}
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_READ_TIMEOUT_S, sock_read=_READ_TIMEOUT_S)
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout, trust_env=True)

    async def models(self) -> tuple[str, ...]:
        """See AnswerSource."""
        assert self._session is not None
        try:
            async with self._session.get(self._service + _MODELS_PATH) as answer:
                return tuple(str(model["id"]) for model in (await answer.json())["data"])
        except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError):
            return ()  # the first message shows what is wrong

    async def stream(self, body: dict[str, Any]) -> AsyncGenerator[Piece, None]:
        """See AnswerSource."""
        assert self._session is not None
        try:
            async with self._session.post(self._url, json=body) as answer:
                if answer.status != 200:
                    remedy = "; give the right --password" if answer.status == _UNAUTHORIZED else ""
                    raise ConsoleError(reason_of(await answer.read(), answer.status) + remedy)
                buffer = b""
                async for piece in answer.content.iter_any():
                    *events, buffer = (buffer + piece).split(b"\n\n")
                    for event in events:
                        for one in pieces_of(event):
                            yield one
        except (aiohttp.ClientError, OSError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ConsoleError(f"no answer from {self._url} ({reason}); check --url, and that it is running") from None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def pieces_of(event: bytes) -> list[Piece]:
    """Returns the pieces in a server-sent event. Raises ConsoleError for an error event."""
    if not event.startswith(_DATA) or event == _DATA + _DONE:
        return []
    try:
        value = json.loads(event[len(_DATA) :])
        if "error" in value:
            raise ConsoleError(_message(value["error"]))
        if usage := value.get("usage"):
            return [Piece("", usage["prompt_tokens"], usage["completion_tokens"])]
        return [Piece(str(text)) for choice in value["choices"] if (text := choice["delta"].get("content", ""))]
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        raise ConsoleError("the server is not an rwkv-batch service; check --url") from None


def _message(error: object) -> str:
    """Returns the text of an error. OpenAI's routes put it into an object."""
    return str(error.get("message", error) if isinstance(error, dict) else error)


def reason_of(body: bytes, status: int) -> str:
    """Returns the error message of an answer."""
    try:
        return _message(json.loads(body)["error"])
    except (ValueError, RecursionError, KeyError, TypeError):
        return f"status {status}"
