"""Streamed answers of an engine in this process, by the service's handler of the native chat route.

A module of its own: it imports all routes, which takes half a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from programs.backends.backend import Reply
from programs.backends.local_engine import LocalEngine
from programs.backends.remote_service import parse_body
from programs.chat.answer_sources import pieces_of
from programs.chat.conversation import ConsoleError, Piece
from routes.native_completions import ROUTES
from routes.request_context import RequestContext, set_current_request
from routes.response.http_response import HttpResponse
from routes.route import response_or_error, run_handler


class LocalAnswers(LocalEngine):
    """An AnswerSource: an engine in this process, called through the service's handler."""

    async def models(self) -> tuple[str, ...]:
        """See AnswerSource."""
        return (self.context.config.model_name,)

    async def stream(self, body: dict[str, Any]) -> AsyncGenerator[Piece, None]:
        """See AnswerSource."""
        route = ROUTES[0]
        set_current_request(RequestContext(method="POST", route=route.path, client="console"))
        reply = await response_or_error(route, run_handler(self.context, route, body, may_stream=True))
        if isinstance(reply, HttpResponse):
            raise ConsoleError(Reply(reply.status, parse_body(reply.body)).reason)
        chunks = reply.chunks
        try:
            while not chunks.ended:
                for event in (await asyncio.to_thread(chunks.__next__)).split(b"\n\n"):
                    for piece in pieces_of(event):
                        yield piece
        finally:
            chunks.close()
