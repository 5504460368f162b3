"""Streamed answers of the native chat route: from a service. local_answers.py has those of an engine."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any, Protocol

import aiohttp

from programs.backends.backend import UNREACHABLE, Reply
from programs.backends.remote_service import RemoteService, parse_body
from programs.batch.tasks import CHAT
from programs.chat.conversation import ConsoleError, Piece
from programs.record import RunError

_DATA, _DONE = b"data: ", b"[DONE]"
_UNAUTHORIZED = 401


class AnswerSource(Protocol):
    """Streams answers of the native chat route."""

    async def open(self) -> object:
        """Prepares the source. Raises RunError or ConsoleError."""

    async def models(self) -> tuple[str, ...]:
        """Returns the names that `model` may have. Empty if the source does not say."""

    def stream(self, body: dict[str, Any]) -> AsyncGenerator[Piece, None]:
        """Yields the pieces of an answer. Raises ConsoleError. Closing the generator cancels the request."""

    async def close(self) -> None:
        """Releases the source."""


class RemoteAnswers(RemoteService):
    """An AnswerSource: a service at a URL."""

    read_timeout_s = 60.0
    """A stream has a heartbeat, so a service that sends nothing hangs."""

    async def models(self) -> tuple[str, ...]:
        """See AnswerSource."""
        try:
            return await super().models()
        except RunError:
            return ()  # the first message shows what is wrong

    async def stream(self, body: dict[str, Any]) -> AsyncGenerator[Piece, None]:
        """See AnswerSource."""
        try:
            async with self.client().post(self.url + CHAT, json=body) as answer:
                if answer.status != 200:
                    remedy = "; give the right --password" if answer.status == _UNAUTHORIZED else ""
                    value = parse_body(await answer.read())  # a proxy's page is no message
                    raise ConsoleError(Reply(answer.status, value if isinstance(value, dict) else None).reason + remedy)
                buffer = b""
                async for piece in answer.content.iter_any():
                    *events, buffer = (buffer + piece).split(b"\n\n")
                    for event in events:
                        for one in pieces_of(event):
                            yield one
        except (aiohttp.ClientError, OSError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ConsoleError(
                f"no answer from {self.url}{CHAT} ({reason}); check --url, and that it is running"
            ) from None


def pieces_of(event: bytes) -> list[Piece]:
    """Returns the pieces in a server-sent event. Raises ConsoleError for an error event."""
    if not event.startswith(_DATA) or event == _DATA + _DONE:
        return []
    try:
        value = json.loads(event[len(_DATA) :])
        if "error" in value:
            raise ConsoleError(Reply(UNREACHABLE, value).reason)
        if usage := value.get("usage"):
            return [Piece("", usage["prompt_tokens"], usage["completion_tokens"])]
        return [Piece(str(text)) for choice in value["choices"] if (text := choice["delta"].get("content", ""))]
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        raise ConsoleError("the server is not an rwkv-batch service; check --url") from None
